"""The results of a sweep as plain values, for `--json`, tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.sim.replay import Replayed
from penstock.sim.sweep import Limit, Point, Swept
from penstock.sim.tally import Simulated
from penstock.sim.trace import Trace
from penstock.types import Direction, Tier

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LINKS = {
    "host_load": (Tier.HOST, Direction.LOAD),
    "host_save": (Tier.HOST, Direction.SAVE),
    "disk_load": (Tier.DISK, Direction.LOAD),
    "disk_save": (Tier.DISK, Direction.SAVE),
}


def facts(traces: Sequence[Trace], swept: Swept) -> dict[str, Any]:
    return {
        "traces": [trace_facts(trace) for trace in traces],
        "points": [
            _point_facts(point, found, limit, traces[point.trace].block_tokens)
            for point, found, limit in zip(swept.points, swept.found, swept.limits, strict=True)
        ],
    }


def trace_facts(trace: Trace) -> dict[str, Any]:
    requests = trace.requests
    return {
        "name": trace.name,
        "block_tokens": trace.block_tokens,
        "num_requests": len(requests),
        "has_segments": trace.has_segments,
        "num_blocks": sum(len(request.prompt_blocks) for request in requests),
        "num_input_tokens": sum(request.num_input_tokens for request in requests),
        "num_output_tokens": sum(request.num_output_tokens for request in requests),
        "seconds": requests[-1].arrival_seconds - requests[0].arrival_seconds if requests else 0.0,
    }


def _point_facts(
    point: Point, found: Simulated | Replayed, limit: Limit, block_tokens: int
) -> dict[str, Any]:
    common: dict[str, Any] = {
        "trace": point.trace,
        "policy": point.policy,
        "num_device_blocks": point.num_device_blocks,
        "num_host_blocks": point.num_host_blocks,
        "num_disk_blocks": point.num_disk_blocks,
        "num_host_tokens": point.num_host_blocks * block_tokens,
        "num_disk_tokens": point.num_disk_blocks * block_tokens,
        "hit_rate": found.hit_rate,
        "optimum_hit_rate": limit.optimum,
        "unbounded_hit_rate": limit.unbounded,
        "num_blocks": found.num_blocks,
    }
    if isinstance(found, Replayed):
        written = {"num_written_blocks": found.num_written, "num_refused_blocks": found.num_refused}
        return common | {"num_hits": found.num_hits} | written
    prefix = {"num_prefix_tokens": sum(found.hits.values()) * block_tokens}
    return common | prefix | timed_facts(found)


def timed_facts(found: Simulated) -> dict[str, Any]:
    carried = {
        name: {
            "num_bytes": found.carried[lane].num_bytes,
            "num_blocks": found.carried[lane].num_blocks,
            "busy_share": found.carried[lane].busy_seconds / found.seconds
            if found.seconds
            else 0.0,
        }
        for name, lane in LINKS.items()
        if lane in found.carried
    }
    reuse = {
        "num_reused_tokens": found.num_reused_tokens,
        "num_mended_tokens": found.num_mended_tokens,
        "num_input_tokens": found.num_input_tokens,
    }
    return reuse | {
        "hit_rate_by_tier": {
            tier.label: found.hit_rate_of(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)
        },
        "first_token_seconds": {
            name: found.first_token_percentile(share) for name, share in PERCENTILES.items()
        },
        "num_requests": found.num_requests,
        "num_served": found.num_served,
        "rejections": found.refusals,
        "seconds": found.seconds,
        "input_tokens_per_second": found.input_tokens_per_second,
        "output_tokens_per_second": found.output_tokens_per_second,
        "requests_per_second": found.num_served / found.seconds if found.seconds else 0.0,
        "device_busy_share": found.busy_seconds / found.seconds if found.seconds else 0.0,
        "num_preemptions": found.num_preemptions,
        "num_recomputed_tokens": found.num_recomputed_tokens,
        "links": carried,
        "flash_bytes_per_day": found.flash_bytes_per_day,
    }
