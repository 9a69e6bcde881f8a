"""Memory copies, checksums and matrix products on this machine."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import xxhash

from penstock.errors import ConfigError
from penstock.plan.probe import links
from penstock.plan.probe.links import BLOCK_BYTES, Link, Tick
from penstock.types import Slot
from penstock.units import MiB, counted, format_bytes

_CHECKSUM_BYTES = 64 * MiB
_MATRIX_SIZE = 1024


@dataclass(frozen=True, slots=True)
class CopyProbe:
    """Memory to memory, as between DRAM and a device whose memory the CPU can address."""

    size_bytes: int
    seconds: float  # per measurement
    max_threads: int

    def __post_init__(self) -> None:
        links.check_size(self.size_bytes)
        available = _available_memory_bytes()
        if available is not None and 2 * self.size_bytes > available:
            raise ConfigError(
                f"--size is {format_bytes(self.size_bytes)}, and copying needs it twice: expected "
                f"at most half of the {format_bytes(available)} of available memory; lower --size"
            )

    def measure(self, tick: Tick) -> Iterator[Link]:
        source, target = links.new_arena(self.size_bytes), links.new_arena(self.size_bytes)
        for arena in (source, target):
            links.fill(arena)

        def move(_thread: int, block: int) -> None:
            offset = block * BLOCK_BYTES
            ctypes.memmove(target.address + offset, source.address + offset, BLOCK_BYTES)

        num_blocks = source.num_slots
        block_seconds = links.single_seconds(move, num_blocks)
        counts = [num for num in thread_counts(self.max_threads) if num <= num_blocks]
        for index, num_threads in enumerate(counts):
            name = f"memory copy, {counted(num_threads, 'thread')}"
            part = links.tick_part(tick, name, index, len(counts))
            num_moved, seconds = links.move_blocks(
                move, cycle(range(num_blocks)), num_threads, self.seconds, part
            )
            rate = num_moved * BLOCK_BYTES / seconds
            yield Link(name, num_threads, rate, block_seconds, loads=True)


@dataclass(frozen=True, slots=True)
class ChecksumProbe:
    """XXH3-128, computed for every block on its way to and from a lower tier."""

    seconds: float

    def measure(self, tick: Tick) -> Iterator[Link]:
        arena = links.new_arena(_CHECKSUM_BYTES)
        links.fill(arena)

        def move(_thread: int, block: int) -> None:
            xxhash.xxh3_128_digest(arena.view(Slot(block)))

        name = f"checksum, {counted(1, 'thread')}"
        block_seconds = links.single_seconds(move, arena.num_slots)
        part = links.tick_part(tick, name, 0, 1)
        num_moved, seconds = links.move_blocks(
            move, cycle(range(arena.num_slots)), 1, self.seconds, part
        )
        yield Link(name, 1, num_moved * BLOCK_BYTES / seconds, block_seconds)


def measure_matrix_product(seconds: float) -> float | None:
    """Operations per second of a matrix product on all cores; None if numpy is missing."""
    try:
        import numpy as np
    except ImportError:
        return None
    left = np.random.default_rng(0).random((_MATRIX_SIZE, _MATRIX_SIZE), dtype=np.float32)
    right, product = left.T.copy(), np.empty_like(left)
    np.matmul(left, right, out=product)  # the first call starts numpy's threads
    taken: list[float] = []
    while not taken or sum(taken) < seconds:
        start = time.perf_counter()
        np.matmul(left, right, out=product)
        taken.append(time.perf_counter() - start)
    # The fastest run, not the mean: other load on the machine can only slow it down.
    return 2 * _MATRIX_SIZE**3 / min(taken)


def thread_counts(max_threads: int) -> list[int]:
    """1, 2, 4, ... and `max_threads` itself."""
    counts = [1 << power for power in range(max_threads.bit_length())]
    return counts if counts[-1] == max_threads else [*counts, max_threads]


def _available_memory_bytes() -> int | None:
    """Memory that the kernel can give without swapping; None if it does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = (line for line in lines if line.startswith("MemAvailable:"))
    return next((int(line.split()[1]) * 1024 for line in found), None)
