"""Retention: blocks of HOST that hints protect from eviction until a given time.

Pure. A retained block is leased, so no claim evicts it. Retention is bounded, and it yields to
pinned blocks, because a hint must not prevent a sequence from running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from penstock.books.ledger import Ledger
from penstock.errors import BookError
from penstock.types import BlockKey, Slot

_MAX_GROUPS_PER_BLOCK = 4  # on average: sessions that share a prefix each list its blocks


@dataclass(slots=True)
class _Group:
    until: float
    keys: dict[BlockKey, None] = field(default_factory=dict)  # in the order of their prompt


class Retention:
    """Leases each wanted block once, for as long as at least one group wants it.

    The opposite hint is here too: `demote` marks blocks to be evicted first, unless retained.
    """

    def __init__(self, host: Ledger, share: float) -> None:
        """Retain at most `share` of HOST, and less than half of it.

        Copies to lower tiers may lease the other half, and some room must be left for new blocks.
        """
        self._host = host
        self._share = share
        self._limit = self.max_blocks  # lower while much of HOST is pinned
        self._groups: dict[str, _Group] = {}
        self._num_groups: dict[BlockKey, int] = {}  # how many groups want each block
        self._num_wishes = 0  # the sum over all blocks
        self._slots: dict[BlockKey, Slot] = {}  # wanted blocks that are in HOST
        # Demoted while on their way into HOST; may contain blocks that have arrived since.
        self._demote_on_arrival: set[BlockKey] = set()
        self._next_end = inf

    def __len__(self) -> int:
        """How many blocks are retained now."""
        return len(self._slots)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slots

    @property
    def max_blocks(self) -> int:
        capacity = self._host.capacity
        return max(0, min(int(capacity * self._share), (capacity - 1) // 2))

    @property
    def slots(self) -> Collection[Slot]:
        """The slots that are leased."""
        return self._slots.values()

    def retain(self, keys: Sequence[BlockKey], name: str, until: float) -> int:
        """Keep leading blocks that are in HOST, or on their way into it; returns how many.

        They are added to the group `name`, and the whole group is kept until the new time.
        """
        group = self._groups.get(name) or _Group(until)
        num_taken = 0
        for key in keys:
            if key not in group.keys:
                is_shared = key in self._num_groups
                is_full = self._has_too_many_wishes if is_shared else self._is_full
                if is_full:
                    break
                if not is_shared and key not in self._host:
                    continue  # in a lower tier: retained only if a later hint names it
                group.keys[key] = None
                self._num_groups[key] = self._num_groups.get(key, 0) + 1
                self._num_wishes += 1
            num_taken += 1
        group.until = until
        if group.keys:
            self._groups[name] = group
            self._next_end = min(self._next_end, until)
        self._lease_wanted(keys)
        return num_taken

    def release(self, name: str) -> int:
        """End a group; returns how many blocks it had."""
        group = self._groups.pop(name, None)
        if group is None:
            return 0
        self._unwant(group.keys)
        return len(group.keys)

    def clear(self) -> None:
        """End all groups."""
        for name in list(self._groups):
            self.release(name)

    def demote(self, keys: Sequence[BlockKey]) -> int:
        """Evict these first, now or once they arrive; returns how many. Retained ones are skipped.

        The policy evicts a chain of blocks from its end.
        """
        self._demote_on_arrival = set(filter(self._host.is_filling, self._demote_on_arrival))
        wanted = [key for key in keys if key in self._host and key not in self]
        for key in wanted:
            self._host.demote(key)
            if self._host.is_filling(key):
                self._demote_on_arrival.add(key)
        return len(wanted)

    def arrived(self, keys: Sequence[BlockKey]) -> None:
        """Apply earlier hints to blocks that have become READY in HOST."""
        self._lease_wanted(keys)
        if self._demote_on_arrival:
            late = [key for key in keys if key in self._demote_on_arrival]
            self._demote_on_arrival.difference_update(late)
            self.demote(late)

    def removed(self, keys: Sequence[BlockKey]) -> None:
        """Release blocks that HOST was told to drop. They are retained again if they come back."""
        if not self._slots:
            return
        lost = [slot for key in keys if (slot := self._slots.pop(key, None)) is not None]
        self._host.release(lost)

    def tick(self, now: float, num_pinned: int) -> None:
        """End groups whose time is over, and yield to pinned blocks."""
        if now >= self._next_end:
            for name in [name for name, group in self._groups.items() if group.until <= now]:
                self.release(name)
            self._next_end = min((group.until for group in self._groups.values()), default=inf)
        # Half of the blocks that are not pinned stay available to loads and saves.
        self._limit = min(self.max_blocks, (self._host.capacity - num_pinned) // 2)
        if len(self._num_groups) > self._limit:
            self._shrink()

    def check(self) -> None:
        """Raise BookError if the counts do not add up."""
        wanted = Counter(key for group in self._groups.values() for key in group.keys)
        if wanted != self._num_groups or wanted.total() != self._num_wishes:
            raise BookError("the blocks that groups want retained are miscounted")
        if not self._slots.keys() <= wanted.keys() or len(wanted) > self.max_blocks:
            raise BookError("blocks are retained that no group wants, or more than allowed")
        for key, slot in self._slots.items():
            if not self._host.is_ready(key) or self._host.slot_of(key) != slot:
                raise BookError("a retained block is not in HOST")

    @property
    def _is_full(self) -> bool:
        return len(self._num_groups) >= self._limit or self._has_too_many_wishes

    @property
    def _has_too_many_wishes(self) -> bool:
        return self._num_wishes >= _MAX_GROUPS_PER_BLOCK * self.max_blocks

    def _shrink(self) -> None:
        """Give up blocks of the group that ends first, starting at the end of its prompt."""
        for name, group in sorted(self._groups.items(), key=lambda item: item[1].until):
            while group.keys and len(self._num_groups) > self._limit:
                key, _ = group.keys.popitem()
                self._unwant([key])
            if group.keys:
                return
            del self._groups[name]

    def _lease_wanted(self, keys: Sequence[BlockKey]) -> None:
        """Lease those of `keys` that are READY, wanted by a group and not leased yet."""
        if len(self._slots) == len(self._num_groups):
            return
        for key in keys:
            wanted = key in self._num_groups and key not in self._slots
            if wanted and self._host.is_ready(key):
                (self._slots[key],) = self._host.lease([key])

    def _unwant(self, keys: Collection[BlockKey]) -> None:
        free = []
        self._num_wishes -= len(keys)
        for key in keys:
            self._num_groups[key] -= 1
            if not self._num_groups[key]:
                del self._num_groups[key]
                if key in self._slots:
                    free.append(self._slots.pop(key))
        self._host.release(free)
