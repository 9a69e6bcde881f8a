"""What this machine's links carry, measured, and how fast it would prefill, estimated.

A probe yields the links it has measured, one by one. Beside those for memory here stand those for
the disk in `disk_link` and for remote stores in `remote_link`; one for CUDA will, behind the same
protocol.
Nothing here knows of terminals.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from threading import Event
from typing import Protocol

import xxhash

from penstock.costs.rates import LinkRate
from penstock.errors import ConfigError
from penstock.stores.host import HostArena
from penstock.types import BlockSpec, Slot
from penstock.units import MiB, format_bytes

BLOCK_BYTES = 2 * MiB
_NUM_SINGLES = 9
_CHECKSUM_BYTES = 64 * MiB
_MATRIX_SIZE = 1024

Tick = Callable[[str, float], None]
"""What is being measured, and the share of its time that has passed, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Link:
    """One way that blocks can take, and how fast they take it."""

    name: str
    num_threads: int
    bytes_per_second: float  # of all threads together
    block_seconds: float  # a single block, nothing else under way
    loads: bool = False  # whether it leads towards the device: only there does waiting count
    note: str = ""
    block_bytes: int = BLOCK_BYTES

    @property
    def rate(self) -> LinkRate:
        """What a single block takes beyond its share of the full rate is the latency."""
        latency_seconds = self.block_seconds - self.block_bytes / self.bytes_per_second
        return LinkRate(self.bytes_per_second, max(0.0, latency_seconds))


class LinkProbe(Protocol):
    def measure(self, tick: Tick) -> Iterator[Link]:
        """Raises StoreError where the link fails. Leaves nothing behind, whatever happens."""
        ...


def measure_links(probes: Sequence[LinkProbe], tick: Tick) -> tuple[Link, ...]:
    """Every link of every probe, in turn. The ticks count over all of them."""
    links: list[Link] = []
    for index, probe in enumerate(probes):

        def tick_all(name: str, share: float, index: int = index) -> None:
            tick(name, (index + share) / len(probes))

        links += probe.measure(tick_all)
    return tuple(links)


@dataclass(frozen=True, slots=True)
class CopyProbe:
    """Memory to memory, as between HOST and a device that the processor can address."""

    size_bytes: int
    seconds: float  # of each measurement
    max_threads: int

    def __post_init__(self) -> None:
        check_size(self.size_bytes)
        available = _available_memory_bytes()
        if available is not None and 2 * self.size_bytes > available:
            raise ConfigError(
                f"--size is {format_bytes(self.size_bytes)}, and copying takes it twice: expected "
                f"at most half of the {format_bytes(available)} of memory at hand; lower --size"
            )

    def measure(self, tick: Tick) -> Iterator[Link]:
        source, target = new_arena(self.size_bytes), new_arena(self.size_bytes)
        for arena in (source, target):
            fill(arena)

        def move(_thread: int, block: int) -> None:
            offset = block * BLOCK_BYTES
            ctypes.memmove(target.address + offset, source.address + offset, BLOCK_BYTES)

        num_blocks = source.num_slots
        block_seconds = single_seconds(move, num_blocks)
        counts = [num for num in thread_counts(self.max_threads) if num <= num_blocks]
        for index, num_threads in enumerate(counts):
            name = f"memory copy, {threads_label(num_threads)}"
            part = tick_part(tick, name, index, len(counts))
            num_moved, seconds = walk(
                move, cycle(range(num_blocks)), num_threads, self.seconds, part
            )
            rate = num_moved * BLOCK_BYTES / seconds
            yield Link(name, num_threads, rate, block_seconds, loads=True)


@dataclass(frozen=True, slots=True)
class ChecksumProbe:
    """XXH3-128, which every block passes on its way to and from a lower tier."""

    seconds: float

    def measure(self, tick: Tick) -> Iterator[Link]:
        arena = new_arena(_CHECKSUM_BYTES)
        fill(arena)

        def move(_thread: int, block: int) -> None:
            xxhash.xxh3_128_digest(arena.view(Slot(block)))

        name = f"checksum, {threads_label(1)}"
        block_seconds = single_seconds(move, arena.num_slots)
        part = tick_part(tick, name, 0, 1)
        num_moved, seconds = walk(move, cycle(range(arena.num_slots)), 1, self.seconds, part)
        yield Link(name, 1, num_moved * BLOCK_BYTES / seconds, block_seconds)


def walk(
    move: Callable[[int, int], None],
    blocks: Iterator[int],
    num_threads: int,
    seconds: float,
    tick: Callable[[float], None],
    finish: Callable[[], None] = lambda: None,
) -> tuple[int, float]:
    """Threads take block after block until none is left or the time is up, at least one each.

    Returns how many were moved and the seconds it took, `finish` included.
    """
    go, stop = Event(), Event()

    def work(thread: int) -> int:
        go.wait()
        num_moved = 0
        for block in blocks:
            move(thread, block)
            num_moved += 1
            if stop.is_set():
                break
        return num_moved

    with ThreadPoolExecutor(num_threads) as pool:
        try:
            futures = [pool.submit(work, thread) for thread in range(num_threads)]
            start = time.perf_counter()
            go.set()
            elapsed = 0.0
            while elapsed < seconds and wait(futures, min(0.1, seconds - elapsed)).not_done:
                elapsed = time.perf_counter() - start
                tick(min(1.0, elapsed / seconds))
        finally:
            # Also on Ctrl-C: the threads end after the block they are at.
            stop.set()
            go.set()
        num_moved = sum(future.result() for future in futures)
        finish()
        return num_moved, time.perf_counter() - start


def single_seconds(move: Callable[[int, int], None], num_blocks: int) -> float:
    """The median time of a block by itself, of some that lie far apart."""
    taken = []
    for index in range(_NUM_SINGLES):
        start = time.perf_counter()
        move(0, index * num_blocks // _NUM_SINGLES)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def measure_matrix_product(seconds: float) -> float | None:
    """Operations per second of a product of matrices, all cores; None where numpy is missing."""
    try:
        import numpy as np
    except ImportError:
        return None
    left = np.random.default_rng(0).random((_MATRIX_SIZE, _MATRIX_SIZE), dtype=np.float32)
    right, product = left.T.copy(), np.empty_like(left)
    np.matmul(left, right, out=product)  # the first call starts the threads
    taken: list[float] = []
    while not taken or sum(taken) < seconds:
        start = time.perf_counter()
        np.matmul(left, right, out=product)
        taken.append(time.perf_counter() - start)
    # The best, not the mean: what else runs on the machine can only take from it.
    return 2 * _MATRIX_SIZE**3 / min(taken)


def thread_counts(max_threads: int) -> list[int]:
    """1, 2, 4, ... and `max_threads` itself."""
    counts = [1 << power for power in range(max_threads.bit_length())]
    return counts if counts[-1] == max_threads else [*counts, max_threads]


def threads_label(num_threads: int) -> str:
    return f"{num_threads} thread{'s' if num_threads > 1 else ''}"


def tick_part(tick: Tick, name: str, index: int, num_parts: int) -> Callable[[float], None]:
    return lambda share: tick(name, (index + share) / num_parts)


def new_arena(size_bytes: int) -> HostArena:
    return HostArena(BlockSpec(bytes(32), BLOCK_BYTES, 1), size_bytes)


def fill(arena: HostArena) -> None:
    """Random bytes, other ones in each block: disks are known to compress, and to share."""
    pool = memoryview(os.urandom(2 * BLOCK_BYTES))
    for block in range(arena.num_slots):
        start = block * 4099 % BLOCK_BYTES  # odd, so that not even two pages are alike
        arena.view(Slot(block))[:] = pool[start : start + BLOCK_BYTES]


def check_size(size_bytes: int) -> None:
    if size_bytes < BLOCK_BYTES:
        raise ConfigError(
            f"--size is {format_bytes(size_bytes)}: expected at least one block of "
            f"{format_bytes(BLOCK_BYTES)}; give more"
        )


def _available_memory_bytes() -> int | None:
    """What the kernel says can be taken without swapping; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = (line for line in lines if line.startswith("MemAvailable:"))
    return next((int(line.split()[1]) * 1024 for line in found), None)
