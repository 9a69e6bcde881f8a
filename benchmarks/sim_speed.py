"""The simulator's speed: ten million block events through replay with flat memory; whole traces.

    python -m benchmarks.sim_speed [--events 10000000] [--trace FILE]

A block event is one block of one prompt, looked up and then used or written. Requests are generated
during the replay, so memory grows only by the ledger and the policy.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.machine import num_cores
from penstock.policies import POLICIES
from penstock.sim.formats import read_trace
from penstock.sim.replay import new_ledger, replay
from penstock.sim.settings import SimulatedHardware
from penstock.sim.simulator import simulate
from penstock.sim.trace import TraceRequest
from penstock.types import BlockKey

_CAPACITY = 100_000
_BLOCKS = 64  # of one request
_NUM_SESSIONS = 20_000
_LIMIT_SECONDS = 10.0


def requests(num_events: int) -> Iterator[TraceRequest]:
    """Sessions, a few of them popular. Their last blocks change; new sessions replace old ones."""
    rng = random.Random(1)
    for number in range(num_events // _BLOCKS):
        session = int(_NUM_SESSIONS * rng.random() ** 3) + number // 50
        version = number // 5000
        head = [_name(0, session, block) for block in range(_BLOCKS * 3 // 4)]
        tail = [_name(version + 1, session, block) for block in range(_BLOCKS - len(head))]
        yield TraceRequest(0.0, 16 * _BLOCKS, 1, (*head, *tail))


def _name(version: int, session: int, block: int) -> BlockKey:
    # Mix the bits like a hash does: policies use them as fingerprints.
    mixed = ((version << 44 | session << 20 | block) * 0x9E3779B97F4A7C15) & (1 << 128) - 1
    return BlockKey(mixed.to_bytes(16, "little") * 2)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _replay(policy: str, num_events: int) -> None:
    seen: list[int] = []

    def tick(num_requests: int) -> None:
        if num_requests * _BLOCKS >= num_events * (len(seen) + 1) // 4:
            seen.append(_resident_bytes())

    started = time.perf_counter()
    found = replay(requests(num_events), new_ledger(policy, _CAPACITY), tick)
    seconds = time.perf_counter() - started
    memory = " ".join(f"{size >> 20}" for size in seen)
    print(
        f"replay, {policy}: {found.num_blocks:,} block events in {seconds:.1f} s, "
        f"{found.num_blocks / seconds:,.0f} events/s; {found.hit_rate:.3f} hits; MiB resident "
        f"after each quarter: {memory}"
    )


def _whole_trace(path: Path) -> None:
    trace = read_trace(path)
    hardware = SimulatedHardware("llama-3.1-8b", "h200")
    gib = (1 << 30) // (trace.block_tokens * hardware.shape.bytes_per_token)
    for policy in POLICIES:
        started = time.perf_counter()
        replay(trace.requests, new_ledger(policy, 16_000))
        seconds = time.perf_counter() - started
        print(f"{trace.name}, replay, {policy}: {seconds:.2f} s, limit {_LIMIT_SECONDS:.0f} s")
        for speed in (1.0, 0.3):
            config = hardware.instance(trace.block_tokens, policy, 60 * gib, 200 * gib, 1000 * gib)
            started = time.perf_counter()
            timed = simulate(trace, config, speed=speed)
            seconds = time.perf_counter() - started
            print(
                f"{trace.name}, in time at {speed:g} of its speed, {policy}: {seconds:.2f} s, "
                f"limit {_LIMIT_SECONDS:.0f} s; {timed.num_served:,} served, "
                f"{timed.hit_rate:.3f} hits"
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sim_speed", description=__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--policy", default="lru", choices=list(POLICIES))
    parser.add_argument("--trace", type=Path, help="also replay this trace under every policy")
    options = parser.parse_args()
    print(f"one process, {num_cores()} cores")
    _replay(options.policy, options.events)
    if options.trace is not None:
        _whole_trace(options.trace)


if __name__ == "__main__":
    main()
