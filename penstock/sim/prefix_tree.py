"""The radix tree that `cache_aware` routers keep: which worker was sent which prompts. Pure.

It follows the tree of vllm-router (0.1.16), which sglang's router also has, with blocks in place of
characters:

- All workers share one tree. A node knows its workers, and which of them created it.
- A match ends where no child continues the prompt, perhaps inside a node. It belongs to the worker
  that created this last node, even if others were sent the same prefix later.
- A prompt's last node notes when it was inserted, nodes on the way do not. One match in eight also
  counts as a use. Above its size, a worker loses its oldest leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from penstock.types import BlockKey

_MATCHES_PER_USE = 8


class _Node:
    __slots__ = ("children", "creator", "keys", "parent", "sizes", "used")

    def __init__(
        self, keys: Sequence[BlockKey], sizes: Sequence[int], parent: _Node | None, creator: int
    ) -> None:
        self.keys = keys
        self.sizes = sizes
        self.parent = parent
        self.creator = creator
        self.children: dict[BlockKey, _Node] = {}
        self.used: dict[int, int] = {}  # by worker: when it was last used, 0 if on the way

    def is_leaf_of(self, worker: int) -> bool:
        return worker in self.used and not any(
            worker in child.used for child in self.children.values()
        )


class PrefixTree:
    """Prompts are given as the keys of their blocks and the size of each."""

    def __init__(self, num_workers: int) -> None:
        self._root = _Node((), (), None, 0)
        self._epochs = count()
        self.sizes = [0] * num_workers  # what each worker was sent
        for worker in range(num_workers):
            self._root.used[worker] = next(self._epochs)

    def match(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """The size of the longest known prefix, and the worker it belongs to."""
        node, start, size = self._root, 0, 0
        while start < len(keys):
            child = node.children.get(keys[start])
            if child is None:
                break
            node = child
            shared = _num_shared(keys, start, child.keys)
            size += sum(child.sizes[:shared])
            start += shared
            if shared < len(child.keys):
                break
        if node.creator not in node.used:  # evicted: any other
            node.creator = next(iter(node.used), 0)
        epoch = next(self._epochs)
        if not epoch % _MATCHES_PER_USE:
            node.used[node.creator] = epoch
        return size, node.creator

    def insert(self, keys: Sequence[BlockKey], sizes: Sequence[int], worker: int) -> None:
        """Note that `worker` was sent this prompt."""
        node, start = self._root, 0
        while start < len(keys):
            child = node.children.get(keys[start])
            if child is None:
                leaf = _Node(keys[start:], sizes[start:], node, worker)
                leaf.used[worker] = next(self._epochs)
                self.sizes[worker] += sum(leaf.sizes)
                node.children[keys[start]] = leaf
                return
            shared = _num_shared(keys, start, child.keys)
            if shared < len(child.keys):
                child = self._split(child, shared)
            if worker not in child.used:
                self.sizes[worker] += sum(child.sizes)
                child.used[worker] = 0
            node = child
            start += shared
        node.used[worker] = next(self._epochs)

    def evict(self, max_size: int) -> None:
        """Shrink every worker that is above `max_size`, its oldest leaves first."""
        if max(self.sizes, default=0) <= max_size:
            return
        ties = count()  # nodes have no order
        heap: list[tuple[int, int, int, _Node]] = []
        stack = [self._root]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            heap += [
                (used, next(ties), worker, node)
                for worker, used in node.used.items()
                if self.sizes[worker] > max_size and node.is_leaf_of(worker)
            ]
        heapify(heap)
        while heap:
            _, _, worker, node = heappop(heap)
            parent = node.parent
            if self.sizes[worker] <= max_size or parent is None or not node.is_leaf_of(worker):
                continue
            self.sizes[worker] -= sum(node.sizes)
            del node.used[worker]
            if not node.used and not node.children:
                del parent.children[node.keys[0]]
            if parent.is_leaf_of(worker):
                heappush(heap, (parent.used[worker], next(ties), worker, parent))

    def _split(self, node: _Node, num_kept: int) -> _Node:
        """Cut a node in two; returns the upper part."""
        assert node.parent is not None
        upper = _Node(node.keys[:num_kept], node.sizes[:num_kept], node.parent, node.creator)
        upper.used = dict(node.used)
        upper.children[node.keys[num_kept]] = node
        node.parent.children[node.keys[0]] = upper
        node.keys, node.sizes, node.parent = node.keys[num_kept:], node.sizes[num_kept:], upper
        return upper


def _num_shared(keys: Sequence[BlockKey], start: int, others: Sequence[BlockKey]) -> int:
    shared = 0
    for key, other in zip(keys[start : start + len(others)], others, strict=False):
        if key != other:
            break
        shared += 1
    return shared
