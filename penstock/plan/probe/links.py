"""What every probe shares: a measured link, and how blocks are moved while it is timed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event
from typing import Protocol

from penstock.costs.rates import LinkRate
from penstock.errors import ConfigError
from penstock.stores.host import HostArena
from penstock.types import BlockSpec, Slot
from penstock.units import MiB, format_bytes

BLOCK_BYTES = 2 * MiB
_NUM_SINGLES = 9

Tick = Callable[[str, float], None]
"""Takes the name of the running measurement and its progress, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Link:
    """A path that blocks take between tiers, and its measured speed."""

    name: str
    num_threads: int
    bytes_per_second: float  # total of all threads
    block_seconds: float  # one block, with nothing else running
    loads: bool = False  # towards the device: only there does a request wait
    note: str = ""
    block_bytes: int = BLOCK_BYTES

    @property
    def rate(self) -> LinkRate:
        """The latency is the time of a single block beyond what the full rate explains."""
        latency_seconds = self.block_seconds - self.block_bytes / self.bytes_per_second
        return LinkRate(self.bytes_per_second, max(0.0, latency_seconds))


class LinkProbe(Protocol):
    def measure(self, tick: Tick) -> Iterator[Link]:
        """Yields each link once measured. Raises StoreError if one fails. Always cleans up."""
        ...


def measure_links(probes: Sequence[LinkProbe], tick: Tick) -> tuple[Link, ...]:
    """Measure every link of every probe, one after another. Ticks cover all probes."""
    links: list[Link] = []
    for index, probe in enumerate(probes):

        def tick_all(name: str, share: float, index: int = index) -> None:
            tick(name, (index + share) / len(probes))

        links += probe.measure(tick_all)
    return tuple(links)


def move_blocks(
    move: Callable[[int, int], None],
    blocks: Iterator[int],
    num_threads: int,
    seconds: float,
    tick: Callable[[float], None],
    finish: Callable[[], None] = lambda: None,
) -> tuple[int, float]:
    """Move blocks on several threads until none is left or the time is up, at least one per thread.

    Returns the number of blocks moved and the seconds it took, including `finish`.
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
            # Also after Ctrl-C: each thread ends after its current block.
            stop.set()
            go.set()
        num_moved = sum(future.result() for future in futures)
        finish()
        return num_moved, time.perf_counter() - start


def single_seconds(move: Callable[[int, int], None], num_blocks: int) -> float:
    """The median time to move one block alone, over blocks that are far apart."""
    taken = []
    for index in range(_NUM_SINGLES):
        start = time.perf_counter()
        move(0, index * num_blocks // _NUM_SINGLES)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def tick_part(tick: Tick, name: str, index: int, num_parts: int) -> Callable[[float], None]:
    return lambda share: tick(name, (index + share) / num_parts)


def new_arena(size_bytes: int) -> HostArena:
    return HostArena(BlockSpec(bytes(32), BLOCK_BYTES, 1), size_bytes)


def fill(arena: HostArena) -> None:
    """Fill with random bytes, different in each block: some disks compress or deduplicate."""
    pool = memoryview(os.urandom(2 * BLOCK_BYTES))
    for block in range(arena.num_slots):
        start = block * 4099 % BLOCK_BYTES  # odd, so that no two pages are equal
        arena.view(Slot(block))[:] = pool[start : start + BLOCK_BYTES]


def check_size(size_bytes: int) -> None:
    if size_bytes < BLOCK_BYTES:
        raise ConfigError(
            f"--size is {format_bytes(size_bytes)}: expected at least one block of "
            f"{format_bytes(BLOCK_BYTES)}; raise --size"
        )
