"""Blocks of HOST that somebody has asked to be kept until a time: for a session, or a prefix.

Pure. A retained block is leased, so no claim evicts it. What may be retained is bounded, and gives
way to blocks that running sequences read in place: a promise must not keep anybody from running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from penstock.books.ledger import Ledger
from penstock.errors import BookError
from penstock.types import BlockKey, Slot

_MAX_GROUPS_PER_BLOCK = 4  # on average: what sessions share is noted by each of them


@dataclass(slots=True)
class _Group:
    until: float
    keys: dict[BlockKey, None] = field(default_factory=dict)  # in the order of their prompt


class Retention:
    """Keeps each block once, for as long as one group wants it."""

    def __init__(self, host: Ledger, share: float) -> None:
        """At most `share` of HOST, and never so much that the copies below could hold the rest."""
        self._host = host
        self.max_blocks = min(int(host.capacity * share), (host.capacity - 1) // 2)
        self._limit = self.max_blocks  # less while much of HOST is pinned
        self._groups: dict[str, _Group] = {}
        self._num_groups: dict[BlockKey, int] = {}  # that want a block, here or on its way here
        self._num_wishes = 0  # the sum of these
        self._slots: dict[BlockKey, Slot] = {}  # of those that are here
        self._next_end = inf

    def __len__(self) -> int:
        """Blocks that are retained now."""
        return len(self._slots)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slots

    @property
    def slots(self) -> Collection[Slot]:
        """For whoever audits the leases."""
        return self._slots.values()

    def retain(self, keys: Sequence[BlockKey], name: str, until: float) -> int:
        """Keep those of `keys` that are in HOST, or will be in a moment; returns how many.

        The leading ones, as far as there is room. What the group `name` had before is kept with
        them, and all of it until the new time.
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
                    continue  # what is further down may come later, with a hint of its own
                group.keys[key] = None
                self._num_groups[key] = self._num_groups.get(key, 0) + 1
                self._num_wishes += 1
            num_taken += 1
        group.until = until
        if group.keys:
            self._groups[name] = group
            self._next_end = min(self._next_end, until)
        self.arrived(keys)
        return num_taken

    def release(self, name: str) -> int:
        """Let a group go; returns how many blocks it had."""
        group = self._groups.pop(name, None)
        if group is None:
            return 0
        self._let_go(group.keys)
        return len(group.keys)

    def clear(self) -> None:
        for name in list(self._groups):
            self.release(name)

    def arrived(self, keys: Sequence[BlockKey]) -> None:
        """These may have become READY in HOST: lease what is wanted."""
        if len(self._slots) == len(self._num_groups):
            return
        for key in keys:
            wanted = key in self._num_groups and key not in self._slots
            if wanted and self._host.is_ready(key):
                (self._slots[key],) = self._host.lease([key])

    def removed(self, keys: Sequence[BlockKey]) -> None:
        """HOST no longer offers these: it was told to drop them. Should they come again, fine."""
        if not self._slots:
            return
        lost = [slot for key in keys if (slot := self._slots.pop(key, None)) is not None]
        self._host.release(lost)

    def tick(self, now: float, num_pinned: int) -> None:
        """End what has lasted its time, and give way to what is pinned."""
        if now >= self._next_end:
            for name in [name for name, group in self._groups.items() if group.until <= now]:
                self.release(name)
            self._next_end = min((group.until for group in self._groups.values()), default=inf)
        # Half of what is not pinned stays free for whoever saves or loads.
        self._limit = min(self.max_blocks, (self._host.capacity - num_pinned) // 2)
        if len(self._num_groups) > self._limit:
            self._give_way()

    def check(self) -> None:
        """Audit the book."""
        wanted = Counter(key for group in self._groups.values() for key in group.keys)
        if wanted != self._num_groups or wanted.total() != self._num_wishes:
            raise BookError("what groups want retained is miscounted")
        if not self._slots.keys() <= wanted.keys() or len(wanted) > self.max_blocks:
            raise BookError("more blocks are retained than anybody wants, or than may be")
        for key, slot in self._slots.items():
            if not self._host.is_ready(key) or self._host.slot_of(key) != slot:
                raise BookError("a block is retained that HOST does not have")

    @property
    def _is_full(self) -> bool:
        return len(self._num_groups) >= self._limit or self._has_too_many_wishes

    @property
    def _has_too_many_wishes(self) -> bool:
        return self._num_wishes >= _MAX_GROUPS_PER_BLOCK * self.max_blocks

    def _give_way(self) -> None:
        """The group that ends first gives first, from its end on: heads are worth more."""
        for name, group in sorted(self._groups.items(), key=lambda item: item[1].until):
            while group.keys and len(self._num_groups) > self._limit:
                key, _ = group.keys.popitem()
                self._let_go([key])
            if group.keys:
                return
            del self._groups[name]

    def _let_go(self, keys: Collection[BlockKey]) -> None:
        free = []
        self._num_wishes -= len(keys)
        for key in keys:
            self._num_groups[key] -= 1
            if not self._num_groups[key]:
                del self._num_groups[key]
                if key in self._slots:
                    free.append(self._slots.pop(key))
        self._host.release(free)


class Demotions:
    """What somebody else has retained is left alone."""

    def __init__(self, host: Ledger, retention: Retention) -> None:
        self._host = host
        self._retention = retention
        self._coming: set[BlockKey] = set()  # on their way into HOST, or were when they were named

    def demote(self, keys: Sequence[BlockKey]) -> int:
        """Now, or when they arrive; returns how many that are. A chain loses its end first."""
        self._coming = set(filter(self._host.is_filling, self._coming))
        wanted = [key for key in keys if key in self._host and key not in self._retention]
        for key in wanted:
            self._host.demote(key)
            if self._host.is_filling(key):
                self._coming.add(key)
        return len(wanted)

    def arrived(self, keys: Sequence[BlockKey]) -> None:
        """These have become READY in HOST."""
        if self._coming:
            late = [key for key in keys if key in self._coming]
            self._coming.difference_update(late)
            self.demote(late)
