"""ARC: splits the tier between recency and frequency, and adapts the split to its misses.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. Blocks used once
and blocks used more often are in two LRU lists (the paper's T1 and T2). Each list has ghosts, the
keys it evicted recently (B1, B2). A ghost that returns shows which list was too short, and the
target size of the first (p) is adjusted. There is nothing to tune.

The paper evicts for one page at a time. A tier makes room for several blocks at once, before it
knows them. So ghosts are checked in `insert`, and the adjusted target is used by the next `pick`.
At most 2 * capacity keys are known in total, including those held.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from penstock.policies.base import Policy
from penstock.types import BlockKey

_Queue = OrderedDict[BlockKey, None]  # least recent first
_Ghosts = OrderedDict[int, None]


class ARC(Policy):
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._demoted: _Queue = OrderedDict()
        self._once: _Queue = OrderedDict()
        self._often: _Queue = OrderedDict()
        self._ghosts_once: _Ghosts = OrderedDict()
        self._ghosts_often: _Ghosts = OrderedDict()
        self._max_once = 0.0  # target size: if `_once` is longer, evict from it

    def __len__(self) -> int:
        return len(self._once) + len(self._often) + len(self._demoted)

    def admit(self, key: BlockKey) -> bool:
        return True

    def insert(self, key: BlockKey, parent: BlockKey | None = None) -> None:
        ghost = _ghost(key)
        num_once, num_often = len(self._ghosts_once), len(self._ghosts_often)
        if ghost in self._ghosts_once:
            more = max(1.0, num_often / num_once)
            self._max_once = min(float(self._capacity), self._max_once + more)
            del self._ghosts_once[ghost]
            self._often[key] = None
        elif ghost in self._ghosts_often:
            less = max(1.0, num_once / num_often)
            self._max_once = max(0.0, self._max_once - less)
            del self._ghosts_often[ghost]
            self._often[key] = None
        else:
            self._once[key] = None
            self._forget_ghosts()

    def touch(self, key: BlockKey) -> None:
        if key in self._often:
            self._often.move_to_end(key)
        else:
            self.forget(key)
            self._often[key] = None

    def forget(self, key: BlockKey) -> None:
        del self._queue_of(key)[key]

    def demote(self, key: BlockKey) -> None:
        self.forget(key)
        self._demoted[key] = None

    def pick(self, num_victims: int, is_idle: Callable[[BlockKey], bool]) -> list[BlockKey]:
        taken: list[tuple[_Queue, BlockKey]] = []  # victims and skipped leased blocks
        leased: list[tuple[_Queue, BlockKey]] = []
        num_once = len(self._once)  # including leased ones, because they occupy room
        while len(taken) - len(leased) < num_victims and (queue := self._next_list(num_once)):
            key, _ = queue.popitem(last=False)
            taken.append((queue, key))
            if not is_idle(key):
                leased.append((queue, key))
            elif queue is self._once:
                num_once -= 1
        if len(taken) - len(leased) < num_victims:
            for queue, key in reversed(taken):
                queue[key] = None
                queue.move_to_end(key, last=False)
            return []
        for queue, key in leased:
            queue[key] = None  # a leased block is in use, so it is recent
        victims = [(queue, key) for queue, key in taken if key not in queue]
        for queue, key in victims:
            # A demoted block was not this policy's choice, so there is nothing to learn.
            if queue is not self._demoted:
                ghosts = self._ghosts_once if queue is self._once else self._ghosts_often
                ghosts[_ghost(key)] = None
        return [key for _, key in victims]

    def _next_list(self, num_once: int) -> _Queue:
        """The list to evict from next; an empty one if there is nothing left."""
        if self._demoted:
            return self._demoted
        from_once = self._once and (num_once > self._max_once or not self._often)
        return self._once if from_once else self._often

    def _queue_of(self, key: BlockKey) -> _Queue:
        if key in self._once:
            return self._once
        return self._often if key in self._often else self._demoted

    def _forget_ghosts(self) -> None:
        """Know at most `capacity` blocks used once, and 2 * capacity in total."""
        while self._ghosts_once and len(self._once) + len(self._ghosts_once) > self._capacity:
            self._ghosts_once.popitem(last=False)
        max_ghosts = 2 * self._capacity - len(self)
        while self._ghosts_often and len(self._ghosts_once) + len(self._ghosts_often) > max_ghosts:
            self._ghosts_often.popitem(last=False)


def _ghost(key: BlockKey) -> int:
    """Eight bytes of the key: precise enough to learn from, in half the memory."""
    return int.from_bytes(key[:8], "little")
