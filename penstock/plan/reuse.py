"""How much KV a trace would reuse with an unbounded cache. Pure; one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.sim.trace import Trace, TraceRequest
from penstock.types import BlockKey


@dataclass(frozen=True, slots=True)
class ReuseStats:
    """Over all requests of a trace. Blocks have the trace's own block size."""

    name: str
    num_requests: int
    requests_per_second: float | None  # None if all arrive at once
    mean_prompt_tokens: float
    p50_tokens: int  # prompt and answer
    p90_tokens: int
    max_tokens: int
    reuse_share: float  # share of prompt tokens that an unbounded cache would hit
    block_tokens: int
    num_distinct_blocks: int  # in an unbounded cache at the end
    num_live_blocks: int  # peak number of blocks seen before and read again later


def analyse(trace: Trace) -> ReuseStats:
    if not trace.requests:
        raise ConfigError(
            f"the trace {trace.name} has no requests: expected at least one; give another trace"
        )
    first: dict[BlockKey, int] = {}
    last: dict[BlockKey, int] = {}
    num_reused_tokens = 0
    for index, request in enumerate(trace.requests):
        is_leading = True
        num_left = request.num_input_tokens
        for key in request.prompt_blocks:
            # A prefix cache cannot use a block after a missing one.
            is_leading = is_leading and first.get(key, index) < index
            if is_leading:
                num_reused_tokens += min(trace.block_tokens, num_left)
            num_left -= trace.block_tokens
            if first.setdefault(key, index) < index:
                last[key] = index
        for key in request.output_blocks:
            first.setdefault(key, index)
    lengths = sorted(_num_tokens(request) for request in trace.requests)
    num_prompt_tokens = sum(request.num_input_tokens for request in trace.requests)
    seconds = trace.requests[-1].arrival_seconds - trace.requests[0].arrival_seconds
    num_requests = len(trace.requests)
    return ReuseStats(
        name=trace.name,
        num_requests=num_requests,
        requests_per_second=(num_requests - 1) / seconds if seconds > 0 else None,
        mean_prompt_tokens=num_prompt_tokens / num_requests,
        p50_tokens=_percentile(lengths, 0.5),
        p90_tokens=_percentile(lengths, 0.9),
        max_tokens=lengths[-1],
        reuse_share=num_reused_tokens / max(1, num_prompt_tokens),
        block_tokens=trace.block_tokens,
        num_distinct_blocks=len(first),
        num_live_blocks=_most_at_once([(first[key], end) for key, end in last.items()]),
    )


def _num_tokens(request: TraceRequest) -> int:
    return request.num_input_tokens + request.num_output_tokens


def _percentile(ordered: Sequence[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _most_at_once(spans: Sequence[tuple[int, int]]) -> int:
    """The most spans, each from a first use to a last one, that overlap at a time."""
    starts, ends = sorted(start for start, _ in spans), sorted(end for _, end in spans)
    most = num_ended = 0
    for num_begun, start in enumerate(starts, 1):
        while ends[num_ended] < start:
            num_ended += 1
        most = max(most, num_begun - num_ended)
    return most
