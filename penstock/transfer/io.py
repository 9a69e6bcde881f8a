"""Movers for memory and stores: what a transfer thread runs. All of them release the GIL.

A mover carries one `Transfer` and returns a verdict a block. The CUDA mover (streams, batched
copies) will stand beside these, behind the same protocol.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import xxhash

from penstock.errors import Corrupt, Missing, StoreError
from penstock.stores.base import Arena, Block, Store
from penstock.types import BlockKey, Direction, Slot, Transfer, Verdict

log = logging.getLogger(__name__)


class Moved(NamedTuple):
    verdicts: list[Verdict]
    error: str = ""


class Mover(Protocol):
    def move(self, transfer: Transfer) -> Moved: ...


class Seals:
    """What HOST holds, slot by slot: the key always, a checksum too if loads verify it.

    The books already know which block lies where; the seal is written and read by the threads
    that move the bytes, so that a load out of step with the books is a miss instead of an answer.
    """

    def __init__(self, arena: Arena, *, checksums: bool = False) -> None:
        self._arena = arena
        self._keys: list[BlockKey | None] = [None] * arena.num_slots
        self._sums: list[bytes] | None = [b""] * arena.num_slots if checksums else None

    def open(self, slots: Sequence[Slot]) -> None:
        """The slots are about to be written: until sealed again they hold nothing."""
        for slot in slots:
            self._keys[slot] = None

    def seal(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            if self._sums is not None:
                self._sums[slot] = self._checksum(slot)
            self._keys[slot] = key

    def verdict(self, key: BlockKey, slot: Slot) -> Verdict:
        if self._keys[slot] != key:
            return Verdict.MISSING
        if self._sums is not None and self._checksum(slot) != self._sums[slot]:
            return Verdict.CORRUPT
        return Verdict.OK

    def _checksum(self, slot: Slot) -> bytes:
        return xxhash.xxh3_128_digest(self._arena.view(slot)[: self._arena.block_bytes])


class CopyMover:
    """HOST to and from a device pool that the processor can address, by memcpy."""

    def __init__(self, device: Arena, host: Arena, seals: Seals) -> None:
        if device.block_bytes != host.block_bytes:
            raise ValueError(
                f"device blocks of {device.block_bytes} bytes cannot go into HOST slots of "
                f"{host.block_bytes}"
            )
        self._device = device
        self._host = host
        self._seals = seals

    def move(self, transfer: Transfer) -> Moved:
        keys, sources, targets = transfer.keys, transfer.source_slots, transfer.target_slots
        if transfer.direction is Direction.LOAD:
            self._copy(self._host, sources, self._device, targets)
            # After the copy: a slot that changed under it has lost its seal by now.
            return Moved(list(map(self._seals.verdict, keys, sources)))
        self._seals.open(targets)
        self._copy(self._device, sources, self._host, targets)
        self._seals.seal(keys, targets)
        return Moved([Verdict.OK] * len(keys))

    def _copy(
        self, source: Arena, sources: Sequence[Slot], target: Arena, targets: Sequence[Slot]
    ) -> None:
        same_stride = source.stride_bytes == target.stride_bytes
        for start, end in _runs(sources, targets) if same_stride else _singles(len(sources)):
            num_bytes = (end - start - 1) * source.stride_bytes + source.block_bytes
            ctypes.memmove(
                target.address + targets[start] * target.stride_bytes,
                source.address + sources[start] * source.stride_bytes,
                num_bytes,
            )


class StoreMover:
    """HOST to and from a store."""

    def __init__(self, host: Arena, store: Store, seals: Seals) -> None:
        self._host = host
        self._store = store
        self._seals = seals

    def move(self, transfer: Transfer) -> Moved:
        load = transfer.direction is Direction.LOAD
        host_slots = transfer.target_slots if load else transfer.source_slots
        store_slots = transfer.source_slots if load else transfer.target_slots
        blocks = [
            Block(key, slot, self._host.view(host_slot))
            for key, slot, host_slot in zip(transfer.keys, store_slots, host_slots, strict=True)
        ]
        verdicts = [Verdict.OK] * len(blocks)
        error = ""
        if load:
            self._seals.open(host_slots)
            answers = self._store.get(blocks)
        else:
            verdicts = list(map(self._seals.verdict, transfer.keys, host_slots))
            sound = [block for block, v in zip(blocks, verdicts, strict=True) if v is Verdict.OK]
            answered = iter(self._store.put(sound))
            answers = [next(answered) if v is Verdict.OK else None for v in verdicts]
        for index, answer in enumerate(answers):
            if answer is not None:
                error = error or str(answer)
                verdicts[index] = _verdict_of(answer)
                if load and isinstance(answer, Corrupt):
                    self._store.drop(blocks[index].key, blocks[index].slot)
            elif load:
                self._seals.seal([transfer.keys[index]], [host_slots[index]])
        return Moved(verdicts, error)


def _verdict_of(error: StoreError) -> Verdict:
    if isinstance(error, Corrupt):
        return Verdict.CORRUPT
    return Verdict.MISSING if isinstance(error, Missing) else Verdict.FAILED


def _runs(sources: Sequence[Slot], targets: Sequence[Slot]) -> Iterator[tuple[int, int]]:
    """Stretches in which the slots of both sides follow each other: one copy instead of many."""
    start = 0
    for index in range(1, len(sources) + 1):
        if (
            index < len(sources)
            and sources[index] == sources[index - 1] + 1
            and targets[index] == targets[index - 1] + 1
        ):
            continue
        yield start, index
        start = index


def _singles(length: int) -> Iterator[tuple[int, int]]:
    return ((index, index + 1) for index in range(length))
