"""Packing without loss on this machine's CPU, as for a disk or a remote store below raw DRAM."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

from penstock.codecs.lossless import LosslessCodec
from penstock.codecs.lossless_format import fit_lossless
from penstock.plan.probe import links
from penstock.plan.probe.links import BLOCK_BYTES, Link, Tick
from penstock.units import counted

_NUM_BLOCKS = 8
_NUM_UNPACKING = 2  # threads that unpack blocks from one store
_HEAD_DIM = 128


@dataclass(slots=True)
class PackingProbe:
    """Packs and unpacks blocks of bfloat16 values. Measures nothing without numba and torch."""

    seconds: float
    unpack_rate: float | None = None  # bytes of raw KV per second, one thread

    @property
    def pays_below(self) -> float | None:
        """The rate of a link, in bytes per second, below which packed KV loads faster."""
        return None if self.unpack_rate is None else _NUM_UNPACKING * self.unpack_rate

    def measure(self, tick: Tick) -> Iterator[Link]:
        form = fit_lossless([BLOCK_BYTES], _HEAD_DIM)
        assert form is not None
        codec = LosslessCodec(form)
        blocks = [_block() for _ in range(_NUM_BLOCKS)]
        packed = [memoryview(bytearray(codec.packed_bytes)) for _ in blocks]
        raw = memoryview(bytearray(BLOCK_BYTES))
        try:
            for block, target in zip(blocks, packed, strict=True):
                codec.pack(block, target)
        except ImportError:
            return
        yield self._measure("pack", lambda _, n: codec.pack(blocks[n], packed[n]), tick, 0)
        unpacking = self._measure("unpack", lambda _, n: codec.unpack(packed[n], raw), tick, 1)
        self.unpack_rate = unpacking.bytes_per_second
        yield unpacking

    def _measure(
        self, what: str, move: Callable[[int, int], object], tick: Tick, index: int
    ) -> Link:
        name = f"{what}, {counted(1, 'thread')}"

        def move_one(thread: int, block: int) -> None:
            move(thread, block)

        block_seconds = links.single_seconds(move_one, _NUM_BLOCKS)
        part = links.tick_part(tick, name, index, 2)
        num_moved, seconds = links.move_blocks(
            move_one, cycle(range(_NUM_BLOCKS)), 1, self.seconds, part
        )
        return Link(name, 1, num_moved * BLOCK_BYTES / seconds, block_seconds)


def _block() -> memoryview:
    """Random bfloat16 values whose exponents are as close together as in KV."""
    exponents = bytes((byte & 0x80) | 0x3C | (byte & 3) for byte in range(256))
    block = bytearray(BLOCK_BYTES)
    block[0::2] = os.urandom(BLOCK_BYTES // 2)
    block[1::2] = os.urandom(BLOCK_BYTES // 2).translate(exponents)
    return memoryview(block)
