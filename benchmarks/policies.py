"""Hit rates of every policy on traces, with one tier, compared with LRU and the offline optimum.

    python -m benchmarks.policies TRACE [TRACE ...] [--blocks 1000,4000,16000] [--generated]

Each trace is replayed as a whole, and its second half alone, without what was learned from the
first. `--generated` adds the generated workloads, with room for a tenth, a third and all of the
blocks that are used more than once.
"Of the way" is the share of the distance from LRU to the optimum that a policy covers, the mean
over the sizes: 0% is LRU, 100% is the optimum, below 0% is worse than LRU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.policies import POLICIES
from penstock.sim.formats import read_trace
from penstock.sim.optimum import optimum
from penstock.sim.replay import new_ledger, replay
from penstock.sim.trace import Trace, TraceRequest
from penstock.sim.workloads import WORKLOADS, generate


def compare(name: str, requests: Sequence[TraceRequest], sizes: Sequence[int]) -> None:
    print(f"\n## {name}\n")
    print("| policy | " + " | ".join(f"{size:,}" for size in sizes) + " | of the way | s |")
    print("|---" * (len(sizes) + 3) + "|")
    best = [optimum(requests, size).hit_rate for size in sizes]
    # As in published figures, a prompt's first block counts as its most recent one.
    base = [replay(requests, new_ledger("lru", n), tails_first=True).hit_rate for n in sizes]
    show("LRU, heads last", base, base, best, 0.0)
    for policy in POLICIES:
        started = time.perf_counter()
        rates = [replay(requests, new_ledger(policy, size)).hit_rate for size in sizes]
        show(policy, rates, base, best, time.perf_counter() - started)
    show("optimum", best, base, best, 0.0)


def show(
    name: str, rates: Sequence[float], base: Sequence[float], best: Sequence[float], seconds: float
) -> None:
    gaps = [
        (rate - low) / (high - low)
        for rate, low, high in zip(rates, base, best, strict=True)
        if high > low
    ]
    closed = f"{sum(gaps) / len(gaps):.0%}" if gaps else "-"
    cells = " | ".join(f"{rate:.3f}" for rate in rates)
    print(f"| {name} | {cells} | {closed} | {seconds / len(rates):.1f} |", flush=True)


def sizes_of(trace: Trace) -> list[int]:
    """A tenth, a third, and all of the blocks that are used more than once."""
    seen: dict[bytes, int] = {}
    for request in trace.requests:
        for key in request.prompt_blocks:
            seen[key] = seen.get(key, 0) + 1
    again = sum(count > 1 for count in seen.values())
    return [max(10, again // part) for part in (10, 3, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--blocks", default="1000,4000,16000")
    parser.add_argument("--generated", action="store_true")
    options = parser.parse_args()
    sizes = [int(number) for number in options.blocks.split(",")]
    for path in options.traces:
        trace = read_trace(path)
        half = len(trace.requests) // 2
        compare(path.stem, trace.requests, sizes)
        compare(f"{path.stem}, the second half", trace.requests[half:], sizes)
    if options.generated:
        for name in WORKLOADS:
            trace = generate(name, num_requests=4_000, seed=1)
            compare(name, trace.requests, sizes_of(trace))


if __name__ == "__main__":
    main()
