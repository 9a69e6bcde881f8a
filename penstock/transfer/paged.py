"""Copies between HOST and a device whose blocks are scattered over each layer's memory.

    device   layer 0: [block 0][block 1]...      layer 1: [block 0][block 1]...
    HOST     slot:    [worker 0: layer 0 | layer 1 | ...][worker 1: ...]

A block in HOST is one contiguous run. Layers that are adjacent within a block of the device are one
stretch. Workers that hold the same bytes share a part: one of them writes it, all of them read it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.codecs.base import Codec
from penstock.errors import ConfigError
from penstock.stores.base import Arena
from penstock.transfer.io import Mover, MoveResult
from penstock.transfer.seals import Seals
from penstock.types import Direction, Slot, Transfer, Verdict


@dataclass(frozen=True, slots=True)
class PageStretch:
    """One piece of every block: that of block b starts at `address + b * stride_bytes`."""

    address: int
    stride_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PagedMemory:
    """A worker's part of every block, in the order of its bytes in HOST."""

    stretches: tuple[PageStretch, ...]
    num_blocks: int

    @property
    def block_bytes(self) -> int:
        return sum(stretch.num_bytes for stretch in self.stretches)

    def offset(self, address: int) -> int | None:
        """Where the byte at an address of block 0 lies in a part. None if it is not copied."""
        before = 0
        for stretch in self.stretches:
            if stretch.address <= address < stretch.address + stretch.num_bytes:
                return before + address - stretch.address
            before += stretch.num_bytes
        return None

    def merged(self) -> PagedMemory:
        """The same bytes in the same order, with adjacent stretches joined."""
        joined: list[PageStretch] = []
        for stretch in self.stretches:
            last = joined[-1] if joined else None
            if (
                last is not None
                and stretch.stride_bytes == last.stride_bytes
                and stretch.address == last.address + last.num_bytes
            ):
                num_bytes = last.num_bytes + stretch.num_bytes
                joined[-1] = PageStretch(last.address, last.stride_bytes, num_bytes)
            else:
                joined.append(stretch)
        return PagedMemory(tuple(joined), self.num_blocks)


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where a worker's part lies in each block of HOST, and whether this worker writes it."""

    offset: int
    num_bytes: int
    writes: bool = True


def equal_parts(num_bytes: int, num_workers: int) -> tuple[PartPlace, ...]:
    """The places of parts of one size, one per worker."""
    return tuple(PartPlace(rank * num_bytes, num_bytes) for rank in range(num_workers))


class Part:
    """One worker's part of each block in HOST."""

    def __init__(
        self, device: PagedMemory, host: Arena, place: PartPlace, codec: Codec | None = None
    ) -> None:
        """`codec` says how HOST holds the part; None if it holds the device's bytes."""
        end = place.offset + place.num_bytes
        num_bytes = device.block_bytes if codec is None else codec.packed_bytes
        num_raw = device.block_bytes if codec is None else codec.raw_bytes
        if (num_bytes, num_raw) != (place.num_bytes, device.block_bytes) or end > host.block_bytes:
            raise ConfigError(
                f"a block in DRAM has {host.block_bytes} bytes with {place.num_bytes} for this "
                f"worker at {place.offset}, but its device needs {num_bytes}; this layout "
                "is not supported."
            )
        self.offset = place.offset
        self.writes = place.writes
        self.device = device
        self.host = host
        self.codec = codec


class PagedMover(Mover):
    """Copies by memcpy, for a device that the processor can address."""

    def __init__(self, part: Part, seals: Seals) -> None:
        self._part = part
        self._seals = seals

    def move(self, transfer: Transfer) -> MoveResult:
        if transfer.direction is Direction.LOAD:
            self._load(transfer.source_slots, transfer.target_slots)
            # After the copy: a slot that was overwritten during it has lost its seal.
            return MoveResult(self._seals.verdicts(transfer.keys, transfer.source_slots))
        if not self._part.writes:
            return MoveResult([Verdict.OK] * len(transfer.keys))
        # Sealed once all workers are done.
        return MoveResult(self._save(transfer.source_slots, transfer.target_slots))

    def _load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        if self._part.codec is None:
            self._copy(slots, blocks, load=True)
            return
        for slot, block in zip(slots, blocks, strict=True):
            raw = memoryview(bytearray(self._part.codec.raw_bytes))
            self._part.codec.unpack(self._packed(slot), raw)
            self._scatter(raw, block)

    def _save(self, blocks: Sequence[int], slots: Sequence[int]) -> list[Verdict]:
        if self._part.codec is None:
            self._copy(slots, blocks, load=False)
            return [Verdict.OK] * len(slots)
        pack = self._part.codec.pack
        return [
            Verdict.OK if pack(self._gather(block), self._packed(slot)) else Verdict.UNFIT
            for slot, block in zip(slots, blocks, strict=True)
        ]

    def _packed(self, slot: int) -> memoryview:
        return self._part.host.view(Slot(slot))[self._part.offset :]

    def _gather(self, block: int) -> memoryview:
        raw = bytearray(self._part.device.block_bytes)
        start = 0
        for address, num_bytes in self._stretches(block):
            raw[start : start + num_bytes] = _memory(address, num_bytes)
            start += num_bytes
        return memoryview(raw)

    def _scatter(self, raw: memoryview, block: int) -> None:
        start = 0
        for address, num_bytes in self._stretches(block):
            _memory(address, num_bytes)[:] = raw[start : start + num_bytes]
            start += num_bytes

    def _stretches(self, block: int) -> list[tuple[int, int]]:
        return [
            (stretch.address + block * stretch.stride_bytes, stretch.num_bytes)
            for stretch in self._part.device.stretches
        ]

    def _copy(self, slots: Sequence[int], blocks: Sequence[int], *, load: bool) -> None:
        host = self._part.host
        for slot, block in zip(slots, blocks, strict=True):
            in_host = host.address + slot * host.stride_bytes + self._part.offset
            for stretch in self._part.device.stretches:
                on_device = stretch.address + block * stretch.stride_bytes
                target, source = (on_device, in_host) if load else (in_host, on_device)
                ctypes.memmove(target, source, stretch.num_bytes)
                in_host += stretch.num_bytes


def _memory(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
