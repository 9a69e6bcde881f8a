"""S3-FIFO: three queues that prevent blocks used once from displacing those that are reused.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. New blocks enter a small
queue (a tenth of the tier). Those used again there move to the main queue; the others are evicted
early and remembered for a while as ghosts. A ghost that returns goes directly to the main queue.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable

from penstock.policies.base import Policy
from penstock.types import BlockKey

MAX_USES = 3


class S3FIFO(Policy):
    def __init__(self, capacity: int) -> None:
        self._small: OrderedDict[BlockKey, int] = OrderedDict()  # key -> uses since it entered
        self._main: OrderedDict[BlockKey, int] = OrderedDict()
        self._demoted: OrderedDict[BlockKey, int] = OrderedDict()  # evicted before all others
        self._max_small = max(1, capacity // 10)
        self._ghosts = Ghosts(max(1, capacity - self._max_small))

    def __len__(self) -> int:
        return len(self._small) + len(self._main) + len(self._demoted)

    def admit(self, key: BlockKey) -> bool:
        return True

    def insert(self, key: BlockKey, parent: BlockKey | None = None) -> None:
        queue = self._main if key in self._ghosts else self._small
        queue[key] = 0

    def touch(self, key: BlockKey) -> None:
        queue = self._queue_of(key)
        if queue is self._demoted:  # used after all
            del queue[key]
            self._small[key] = 1
        elif (uses := queue[key]) < MAX_USES:
            queue[key] = uses + 1

    def forget(self, key: BlockKey) -> None:
        del self._queue_of(key)[key]

    def demote(self, key: BlockKey) -> None:
        self.forget(key)
        self._demoted[key] = 0

    def pick(self, num_victims: int, is_idle: Callable[[BlockKey], bool]) -> list[BlockKey]:
        # The loop ends, because each step lowers a use count, moves a key from small to main,
        # takes a victim, or sets a leased key aside.
        victims: list[tuple[OrderedDict[BlockKey, int], BlockKey]] = []
        leased: list[tuple[OrderedDict[BlockKey, int], BlockKey, int]] = []
        while len(victims) < num_victims and self._demoted:
            key, uses = self._demoted.popitem(last=False)
            if is_idle(key):
                victims.append((self._demoted, key))
            else:
                leased.append((self._demoted, key, uses))
        while len(victims) < num_victims and (self._small or self._main):
            from_small = len(self._small) >= self._max_small or not self._main
            queue = self._small if from_small else self._main
            key, uses = queue.popitem(last=False)
            if not is_idle(key):
                leased.append((queue, key, uses))
            elif from_small and uses > 1:
                self._main[key] = 0
            elif not from_small and uses > 0:
                self._main[key] = uses - 1
            else:
                victims.append((queue, key))
        for queue, key, uses in leased:
            queue[key] = uses
        if len(victims) < num_victims:
            for queue, key in reversed(victims):
                queue[key] = 0
                queue.move_to_end(key, last=False)
            return []
        for queue, key in victims:
            if queue is self._small:
                self._ghosts.add(key)
        return [key for _, key in victims]

    def _queue_of(self, key: BlockKey) -> OrderedDict[BlockKey, int]:
        if key in self._demoted:
            return self._demoted
        return self._small if key in self._small else self._main


class Ghosts:
    """The last `capacity` evicted keys, in 16 to 32 bytes each.

    A hash table of 64-bit cells (fingerprint << 32 | sequence number); a newer key overwrites an
    older one in its cell. A false positive needs 32 equal bits of BLAKE3, and only puts one block
    into the main queue too early.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._mask = (1 << (2 * capacity - 1).bit_length()) - 1
        self._cells = array("Q", bytes(8 * (self._mask + 1)))
        self._count = 0

    def add(self, key: BlockKey) -> None:
        self._count += 1
        name = int.from_bytes(key[:12], "little")
        self._cells[name & self._mask] = name >> 64 << 32 | (self._count & 0xFFFFFFFF)

    def __contains__(self, key: BlockKey) -> bool:
        if not self._count:
            return False
        # The key is already a hash. Use different bytes of it for the cell and the fingerprint.
        name = int.from_bytes(key[:12], "little")
        held = self._cells[name & self._mask]
        if held == 0 or held >> 32 != name >> 64:
            return False
        return (self._count - held) & 0xFFFFFFFF < self._capacity
