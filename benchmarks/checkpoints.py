"""Bytes kept for a model with sliding windows, beside what is needed at least.

    python -m benchmarks.checkpoints [TRACE ...] [--window 1024] [--windows 5] [--requests 500]

The model has five groups of sliding windows for each group of full attention, as Gemma 3 has. A
generated chat, generated agents, and each trace are replayed through a cache that keeps everything
that is chosen. "Needed" is every block of the full groups, and one checkpoint a turn: that at its
end. Blocks that checkpoints share count once in both. The aim is a ratio of at most 1.3. "Densely"
is what keeping every block of every group takes; "hits" compares hit tokens with those of a model
that has full attention alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from penstock.groups.kinds import Group, Groups
from penstock.sim.formats import read_trace
from penstock.sim.group_replay import groups_of, replay_groups
from penstock.sim.trace import Trace
from penstock.sim.workloads import generate
from penstock.types import BlockKey

AIM = 1.3
_BLOCK_BYTES = 1


def num_needed(trace: Trace, groups: Groups) -> int:
    """Distinct blocks of the full groups, and of one checkpoint at the end of each turn."""
    blocks: set[tuple[int, BlockKey]] = set()
    for request in trace.requests:
        num_prompt = request.num_input_tokens // trace.block_tokens
        chain = [*request.prompt_blocks[:num_prompt], *request.output_blocks]
        end = len(chain) * trace.block_tokens
        if not request.output_blocks:
            end = groups.max_hit(request.num_input_tokens)
        for group in groups:
            blocks.update((group.index, chain[index]) for index in _kept(group, chain, end))
    return len(blocks)


def _kept(group: Group, chain: Sequence[BlockKey], end: int) -> range:
    return range(len(chain)) if group.is_full else group.needed(end)


def show(trace: Trace, groups: Groups, every_tokens: int | None) -> None:
    needed = num_needed(trace, groups)
    keys = {k for r in trace.requests for k in (*r.prompt_blocks, *r.output_blocks)}
    capacity = len(keys) * len(groups)
    found, plain = (
        replay_groups(
            trace.requests,
            each,
            block_bytes=_BLOCK_BYTES,
            capacity=capacity,
            policy="lru",
            budget_bytes=capacity // 10,
            every_tokens=every_tokens,
        )
        for each in (groups, Groups(tuple(groups.full)))
    )
    ratio = found.num_bytes / needed
    hits = found.num_hit_tokens / plain.num_hit_tokens if plain.num_hit_tokens else 1.0
    dense = capacity / needed
    kept = found.bytes_per_token / plain.bytes_per_token
    print(
        f"| {trace.name} | {len(trace.requests):,} | {kept:.2f} | {ratio:.2f} | ≤ {AIM} | "
        f"{dense:.2f} | {hits:.3f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--every", type=int, default=8192, help="tokens; 0: none")
    options = parser.parse_args()
    print("| traffic | requests | bytes/token, full = 1 | of needed | aim | densely | hits |")
    print("|---|---|---|---|---|---|---|")
    found = [
        generate(name, num_requests=options.requests, block_tokens=16, seed=1)
        for name in ("chat", "agents", "rag", "batch")
    ]
    found += [read_trace(path) for path in options.traces]
    for trace in found:
        groups = groups_of(trace.block_tokens, window=options.window, num_windows=options.windows)
        show(trace, groups, options.every or None)


if __name__ == "__main__":
    main()
