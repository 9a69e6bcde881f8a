"""The device pool's book: which blocks are free, held, or idle with reusable content. Pure.

A block is held by every sequence that uses it and by every save that reads it. A complete block
gets its key, and then other sequences can share it. When it is no longer held, it can still be
found until its slot is needed, least recently released first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from penstock.errors import BookError
from penstock.types import BlockKey, Slot


class PoolObserver(Protocol):
    """Is told which blocks can be found in the pool."""

    def named(self, key: BlockKey) -> None: ...

    def dropped(self, keys: Sequence[BlockKey]) -> None: ...


class BlockPool:
    def __init__(self, num_blocks: int, observer: PoolObserver | None = None) -> None:
        self.num_blocks = num_blocks
        self._observer = observer
        self._free = [Slot(number) for number in reversed(range(num_blocks))]
        self._num_holds = [0] * num_blocks
        self._key_of: dict[Slot, BlockKey] = {}
        self._slot_of: dict[BlockKey, Slot] = {}
        self._idle: OrderedDict[Slot, None] = OrderedDict()  # named and not held

    @property
    def num_available(self) -> int:
        """The number of blocks that `take` can return."""
        return len(self._free) + len(self._idle)

    def num_holds(self, slot: Slot) -> int:
        return self._num_holds[slot]

    def share(self, keys: Sequence[BlockKey]) -> list[Slot]:
        """Hold the leading blocks that the pool has."""
        slots: list[Slot] = []
        for key in keys:
            slot = self._slot_of.get(key)
            if slot is None:
                break
            slots.append(slot)
        self.hold(slots)
        return slots

    def num_leading(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks `share` would hold."""
        for number, key in enumerate(keys):
            if key not in self._slot_of:
                return number
        return len(keys)

    def take(self, count: int) -> list[Slot] | None:
        """Hold `count` empty blocks, evicting idle ones. If None, nothing has changed."""
        if count > self.num_available:
            return None
        evicted: list[BlockKey] = []
        while len(self._free) < count:
            slot, _ = self._idle.popitem(last=False)
            key = self._key_of.pop(slot)
            del self._slot_of[key]
            evicted.append(key)
            self._free.append(slot)
        if evicted and self._observer is not None:
            self._observer.dropped(evicted)
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._num_holds[slot] = 1
        return slots

    def name(self, slot: Slot, key: BlockKey) -> None:
        """Name a held block that is complete. If blocks have the same key, the first is found."""
        if not self._num_holds[slot] or slot in self._key_of:
            raise BookError(f"block {slot} cannot be named: it is not held, or has a name")
        if key not in self._slot_of:
            self._key_of[slot] = key
            self._slot_of[key] = slot
            if self._observer is not None:
                self._observer.named(key)

    def hold(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self._idle.pop(slot, None)
            self._num_holds[slot] += 1

    def release(self, slots: Sequence[Slot]) -> None:
        """Release one hold on each. The tail of a sequence will be evicted before its head."""
        for slot in reversed(slots):
            if not self._num_holds[slot]:
                raise BookError(f"block {slot} is released more often than held")
            self._num_holds[slot] -= 1
            if self._num_holds[slot]:
                continue
            if slot in self._key_of:
                self._idle[slot] = None
            else:
                self._free.append(slot)

    def forget(self) -> None:
        """Drop the content of all idle blocks."""
        if self._observer is not None:
            self._observer.dropped([self._key_of[slot] for slot in self._idle])
        for slot in self._idle:
            del self._slot_of[self._key_of.pop(slot)]
            self._free.append(slot)
        self._idle.clear()

    def distrust(self) -> None:
        """Drop the content of all idle blocks, and let nobody share those that are held."""
        self.forget()
        if self._observer is not None:
            self._observer.dropped(list(self._slot_of))
        self._key_of.clear()
        self._slot_of.clear()

    def check(self) -> None:
        free, idle = set(self._free), set(self._idle)
        held = {Slot(slot) for slot, holds in enumerate(self._num_holds) if holds}
        if len(self._free) != len(free):
            raise BookError("a block is in the free list twice")
        if free & idle or free & held or idle & held:
            raise BookError("a block is two of free, idle and held")
        if len(free | idle | held) != self.num_blocks:
            raise BookError("a block is neither free nor idle nor held")
        if {slot: key for key, slot in self._slot_of.items()} != self._key_of:
            raise BookError("keys and blocks disagree")
        if not idle <= self._key_of.keys() or free & self._key_of.keys():
            raise BookError("an idle block has no content, or a free one has")


class CompletedBlocks:
    """The blocks that a step completed, to be named and then saved together."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._slots: dict[BlockKey, Slot] = {}
        self.parents: dict[int, BlockKey | None] = {}  # see `Offloader.save`

    @property
    def keys(self) -> list[BlockKey]:
        return list(self._slots)

    @property
    def slots(self) -> list[Slot]:
        return list(self._slots.values())

    def without(self, is_unwanted: Callable[[BlockKey], bool]) -> CompletedBlocks:
        """The same blocks but some, which are not to be saved."""
        if not any(map(is_unwanted, self._slots)):
            return self
        kept = CompletedBlocks(self._pool)
        before: BlockKey | None = None
        for position, (key, slot) in enumerate(self._slots.items()):
            parent = self.parents.get(position, before)
            before = key
            if not is_unwanted(key):
                kept.parents[len(kept._slots)] = parent
                kept._slots[key] = slot
        return kept

    def add(self, parent: BlockKey | None, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """Name one sequence's new blocks, which follow `parent`."""
        self.parents[len(self._slots)] = parent
        for key, slot in zip(keys, slots, strict=True):
            self._pool.name(slot, key)
            if self._slots.setdefault(key, slot) != slot:  # another sequence computed the same
                self.parents[len(self._slots)] = key
