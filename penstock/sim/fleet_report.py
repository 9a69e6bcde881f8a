"""The results of fleets as plain values, for `--json`, tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.sim.fleet_tally import FleetInstance, FleetSimulated
from penstock.sim.optimum import unbounded
from penstock.sim.report import timed_facts, trace_facts
from penstock.sim.sweep import FleetPoint, only_full
from penstock.sim.trace import Trace
from penstock.types import Direction, Tier


def fleet_facts(
    traces: Sequence[Trace], points: Sequence[FleetPoint], found: Sequence[FleetSimulated]
) -> dict[str, Any]:
    return {
        "traces": [_trace_facts(trace) for trace in traces],
        "points": [_point_facts(*each) for each in zip(points, found, strict=True)],
    }


def _trace_facts(trace: Trace) -> dict[str, Any]:
    facts = trace_facts(trace)
    best = unbounded(only_full(trace).requests)
    num_tokens = facts["num_input_tokens"]
    return facts | {
        "has_sessions": any(request.session for request in trace.requests),
        "unbounded_hit_rate": best.hit_rate,
        "unbounded_token_hit_rate": best.num_hits * trace.block_tokens / num_tokens
        if num_tokens
        else 0.0,
    }


def _point_facts(fleet_point: FleetPoint, found: FleetSimulated) -> dict[str, Any]:
    point, fleet, total = fleet_point.point, fleet_point.fleet, found.total
    roles = fleet.roles
    facts = timed_facts(total)
    facts["hit_rate_by_tier"]["remote"] = total.hit_rate_of(Tier.REMOTE)
    for name, direction in (("remote_load", Direction.LOAD), ("remote_save", Direction.SAVE)):
        carried = total.carried.get((Tier.REMOTE, direction))
        if carried is not None:
            facts["links"][name] = {
                "num_bytes": carried.num_bytes,
                "num_blocks": carried.num_blocks,
                "busy_share": carried.busy_seconds / total.seconds if total.seconds else 0.0,
            }
    # These are sums over all instances and nodes: shares of the time of all of them.
    num_links = {"host": fleet.num_instances, "disk": fleet.num_nodes, "remote": fleet.num_nodes}
    for name, link in facts["links"].items():
        link["busy_share"] /= num_links[name.partition("_")[0]]
    facts["device_busy_share"] /= fleet.num_instances
    return {
        "trace": point.trace,
        "policy": point.policy,
        "router": fleet.router,
        "roles": None
        if roles is None
        else {"prefill": roles.num_prefill, "decode": roles.num_decode},
        "num_device_blocks": point.num_device_blocks,
        "num_host_blocks": point.num_host_blocks,
        "num_disk_blocks": point.num_disk_blocks,
        "num_remote_blocks": fleet.instance.num_remote_blocks,
        "hit_rate": total.hit_rate,
        "token_hit_rate": found.token_hit_rate,
        "num_blocks": total.num_blocks,
        **facts,
        "network_load_bytes": found.network_bytes(Direction.LOAD),
        "network_save_bytes": found.network_bytes(Direction.SAVE),
        "num_evicted_blocks": found.num_evicted,
        "num_store_evicted_blocks": found.num_store_evicted,
        "balance": found.balance,
        "lost_decode_share": found.lost_decode_share,
        "num_handed_blocks": found.num_handed_blocks,
        "num_unhanded_blocks": found.num_unhanded_blocks,
        "instances": [_instance_facts(each) for each in found.instances],
    }


def _instance_facts(found: FleetInstance) -> dict[str, Any]:
    role = "both"
    if not (found.is_prefiller and found.is_decoder):
        role = "prefill" if found.is_prefiller else "decode"
    return {
        "role": role,
        "num_requests": found.num_requests,
        "num_blocks": found.num_blocks,
        "num_hits": found.num_hits,
        "busy_seconds": found.busy_seconds,
    }
