"""What HOST holds, slot by slot: a key in 32 bytes, zeros for nothing."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from penstock.stores.base import Arena
from penstock.types import KEY_BYTES, BlockKey, Slot, Verdict

_NOTHING = bytes(KEY_BYTES)


class Seals:
    """The key of each slot always, a checksum too if loads verify it.

    The books already know which block lies where; the seal is written and read by those that move
    the bytes, so that a load out of step with the books is a miss instead of an answer. Where
    other processes move them, the keys lie in `memory` that all of them share.
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
        """The slots are about to be written: until sealed again they hold nothing."""
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


class _SharedKeys:
    """Keys in memory that several processes share, slot by slot."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def __getitem__(self, slot: int) -> bytes:
        return bytes(self._memory[slot * KEY_BYTES : slot * KEY_BYTES + KEY_BYTES])

    def __setitem__(self, slot: int, key: bytes) -> None:
        self._memory[slot * KEY_BYTES : slot * KEY_BYTES + KEY_BYTES] = key
