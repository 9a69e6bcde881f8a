"""Seals: the key of the block in each HOST slot, 32 bytes, zero if the slot is empty."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from penstock.stores.base import Arena
from penstock.types import KEY_BYTES, BlockKey, Slot, Verdict

_NOTHING = bytes(KEY_BYTES)


class Seals:
    """The key of each slot, and a checksum if loads verify it.

    The books know which block is in which slot too. Seals are written and read by the code that
    moves the bytes, so that a load that disagrees with the books is a miss instead of wrong data.
    If other processes move the bytes, the keys are in `memory` that all of them share.
    """

    def __init__(
        self, arena: Arena, *, checksums: bool = False, memory: memoryview | None = None
    ) -> None:
        self._arena = arena
        self._keys: list[bytes] | _SharedKeys = (
            [_NOTHING] * arena.num_slots if memory is None else _SharedKeys(memory)
        )
        self._sums: list[bytes] | None = [b""] * arena.num_slots if checksums else None

    def open(self, slots: Sequence[Slot]) -> None:
        """Mark slots as empty until they are sealed again. Call this before writing to them."""
        keys = self._keys
        for slot in slots:
            keys[slot] = _NOTHING

    def seal(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        if self._sums is not None:
            for slot in slots:
                self._sums[slot] = self._checksum(slot)
        held = self._keys
        for key, slot in zip(keys, slots, strict=True):
            held[slot] = key

    def verdicts(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> list[Verdict]:
        held = list(map(self._keys.__getitem__, slots))
        if held == list(keys):
            verdicts = [Verdict.OK] * len(held)
        else:
            pairs = zip(keys, held, strict=True)
            verdicts = [Verdict.OK if key == found else Verdict.MISSING for key, found in pairs]
        if self._sums is not None:
            for index, slot in enumerate(slots):
                if self._checksum(slot) != self._sums[slot] and verdicts[index] is Verdict.OK:
                    verdicts[index] = Verdict.CORRUPT
        return verdicts

    def _checksum(self, slot: Slot) -> bytes:
        return xxhash.xxh3_128_digest(self._arena.view(slot)[: self._arena.block_bytes])


class ReadSeals(Seals):
    """Seals that another process writes: this one only compares them."""

    def __init__(self, arena: Arena, memory: memoryview) -> None:
        super().__init__(arena, memory=memory)

    def open(self, slots: Sequence[Slot]) -> None:
        return

    def seal(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        return

    def replace_memory(self, memory: memoryview) -> None:
        self._keys = _SharedKeys(memory)


class _SharedKeys:
    """A list of keys in memory that several processes share."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def __getitem__(self, slot: int) -> bytes:
        return bytes(self._memory[slot * KEY_BYTES : slot * KEY_BYTES + KEY_BYTES])

    def __setitem__(self, slot: int, key: bytes) -> None:
        self._memory[slot * KEY_BYTES : slot * KEY_BYTES + KEY_BYTES] = key
