"""LFU with ageing: keeps the blocks used most often, unless all their uses are long ago.

LFU-DA of Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating content management techniques
for web proxy caches", ACM SIGMETRICS Performance Evaluation Review 27(4), 2000. A block's worth is
its number of uses in this tier plus the tier's age at its last use. The age is the worth of the
last block evicted. So newer blocks overtake a block that was popular long ago, and no pass over all
counters is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from penstock.policies.base import Policy
from penstock.types import BlockKey

_DEMOTED = 0  # less than the worth of any block
_MAX_STALE = 64


class _Shelf:
    """The blocks of one worth, least recently used first, each with its number of uses."""

    __slots__ = ("uses_of", "worth")

    def __init__(self, worth: int) -> None:
        self.worth = worth
        self.uses_of: OrderedDict[BlockKey, int] = OrderedDict()


class _Taken(NamedTuple):
    key: BlockKey
    uses: int
    worth: int
    is_idle: bool


class LFU(Policy):
    def __init__(self, capacity: int) -> None:
        self._age = 0
        self._shelf_of: dict[BlockKey, _Shelf] = {}
        self._shelves: dict[int, _Shelf] = {}  # by worth; never empty
        self._worths: list[int] = []  # a heap; may contain worths whose shelf is gone

    def __len__(self) -> int:
        return len(self._shelf_of)

    def admit(self, key: BlockKey) -> bool:
        return True

    def insert(self, key: BlockKey, parent: BlockKey | None = None) -> None:
        self._put(key, 1, self._age + 1)

    def touch(self, key: BlockKey) -> None:
        uses = self._take(key) + 1
        self._put(key, uses, self._age + uses)

    def forget(self, key: BlockKey) -> None:
        self._take(key)

    def demote(self, key: BlockKey) -> None:
        self._put(key, self._take(key), _DEMOTED)

    def pick(self, num_victims: int, is_idle: Callable[[BlockKey], bool]) -> list[BlockKey]:
        taken: list[_Taken] = []
        num_idle = 0
        while num_idle < num_victims and self._shelf_of:
            shelf = self._lowest()
            key = next(iter(shelf.uses_of))
            block = _Taken(key, self._take(key), shelf.worth, is_idle(key))
            taken.append(block)
            num_idle += block.is_idle
        if num_idle < num_victims:
            for key, uses, worth, _ in reversed(taken):
                self._put(key, uses, worth)
                self._shelf_of[key].uses_of.move_to_end(key, last=False)
            return []
        victims = [block for block in taken if block.is_idle]
        if victims:
            self._age = max(self._age, victims[-1].worth)
        for key, uses, worth, idle in taken:
            if not idle:  # in use now, so update its age but not its uses
                self._put(key, uses, worth if worth == _DEMOTED else self._age + uses)
        return [block.key for block in victims]

    def _put(self, key: BlockKey, uses: int, worth: int) -> None:
        shelf = self._shelves.get(worth)
        if shelf is None:
            shelf = self._shelves[worth] = _Shelf(worth)
            heappush(self._worths, worth)
        shelf.uses_of[key] = uses
        self._shelf_of[key] = shelf

    def _take(self, key: BlockKey) -> int:
        shelf = self._shelf_of.pop(key)
        uses = shelf.uses_of.pop(key)
        if not shelf.uses_of:
            del self._shelves[shelf.worth]
            # Every use of a block may leave a stale worth in the heap.
            if len(self._worths) > 2 * len(self._shelves) + _MAX_STALE:
                self._worths = list(self._shelves)
                heapify(self._worths)
        return uses

    def _lowest(self) -> _Shelf:
        while self._worths[0] not in self._shelves:
            heappop(self._worths)
        return self._shelves[self._worths[0]]
