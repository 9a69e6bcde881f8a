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
