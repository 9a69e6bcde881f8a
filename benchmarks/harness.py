"""Rows with a limit. Rounds of ours and of the limit alternate, so noise affects both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from penstock.stores.host import HostArena
from penstock.types import BlockKey, BlockSpec, Slot

MIB = 1 << 20
# Llama-3.1-8B at 16 tokens is 2 MiB; SmolLM2-135M at 64 tokens 1.4 MiB, at 16 tokens 0.36 MiB.
BLOCK_SIZES = {"0.36 MiB": 368_640, "1.4 MiB": 1_474_560, "2 MiB": 2 * MIB}


@dataclass(frozen=True, slots=True)
class Row:
    """One result. `ratio` compares it with the limit: 1 is the limit itself, more is better."""

    name: str
    ours: float
    unit: str
    limit: float | None = None
    limit_name: str = ""
    aim: str = ""
    ratio: float | None = None


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(
    name: str,
    num_bytes: int,
    ours: Callable[[], float],
    limit: Callable[[], float],
    limit_name: str,
    *,
    rounds: int = 7,
    aim: str = "≥ 0.9",
) -> Row:
    """Time both alternately. Each returns the seconds for `num_bytes`; medians are compared."""
    ours(), limit()  # warm up: pages, files, threads
    pairs = []
    for index in range(rounds):
        first = ours() if index % 2 else limit()
        second = limit() if index % 2 else ours()
        pairs.append((first, second) if index % 2 else (second, first))
    our_rate = num_bytes / median(pair[0] for pair in pairs) / 1e9
    limit_rate = num_bytes / median(pair[1] for pair in pairs) / 1e9
    return Row(name, our_rate, "GB/s", limit_rate, limit_name, aim, our_rate / limit_rate)


def in_threads(num_threads: int, work: Callable[[int], object]) -> float:
    """Seconds to run `work(0)` … `work(num_threads - 1)` in parallel threads."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return seconds_of(run)


def block_spec(block_bytes: int) -> BlockSpec:
    return BlockSpec(bytes(32), block_bytes, 16)


def filled_arena(spec: BlockSpec, num_slots: int, headroom_bytes: int = 0) -> HostArena:
    """An arena whose slots all differ. They are not constant, because zeros are faster to copy."""
    size_bytes = num_slots * (spec.stride_bytes + headroom_bytes)
    arena = HostArena(spec, size_bytes, headroom_bytes=headroom_bytes)
    pattern = bytes((i * 131 + i // 251) % 256 for i in range(4096))
    for number in range(num_slots):
        view = arena.view(Slot(number))
        view[:] = (pattern * (len(view) // 4096 + 1))[: len(view)]
        view[:8] = number.to_bytes(8, "little")
    return arena


def fresh_keys(num: int, round_number: int) -> list[BlockKey]:
    return [
        BlockKey((round_number << 32 | index).to_bytes(8, "little") * 4) for index in range(num)
    ]


def slots_up_to(num: int) -> list[Slot]:
    return [Slot(index) for index in range(num)]
