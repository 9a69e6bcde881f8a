"""`penstock sim --window`, `--state-groups`: traces replayed for models with several groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from penstock.codecs.names import AUTO, RAW
from penstock.commands import new_table, stdout_console
from penstock.errors import ConfigError
from penstock.groups.kinds import Groups
from penstock.shapes.packing import Packing
from penstock.sim.group_replay import GroupsReplayed, groups_of, replay_groups
from penstock.sim.settings import Room, SimulatedHardware
from penstock.sim.trace import Trace
from penstock.types import Tier
from penstock.units import GiB, counted, format_bytes

_BUDGET_SHARE = 0.1  # of the tier, for checkpoints that are kept on speculation


def replay_all(
    traces: Sequence[Trace],
    room: Room,
    policies: Sequence[str],
    hardware: SimulatedHardware,
    *,
    window: int | None,
    num_windows: int,
    num_states: int,
    every_tokens: int | None,
    tick: Callable[[str, float], None],
) -> dict[str, Any]:
    """Replay every trace with every policy and size; returns plain values, as for `--json`."""
    points = []
    num_done, num_all = 0, len(policies) * len(room.host) * sum(len(t.requests) for t in traces)
    for (number, trace), policy, host in product(enumerate(traces), policies, room.host):
        groups = groups_of(
            trace.block_tokens, window=window, num_windows=num_windows, num_states=num_states
        )
        block_bytes = _packing(hardware, trace, num_states).slot_bytes(
            _block_bytes(trace, groups, hardware)
        )
        capacity = int(host) if room.unit == "blocks" else int(host * GiB // block_bytes)
        if not capacity:
            raise ConfigError(
                f"--host-{room.unit.lower()} is {host:g}: expected room for at least one block, "
                f"which has {format_bytes(block_bytes)} for this trace and model"
            )

        def advance(num_requests: int, before: int = num_done, name: str = trace.name) -> None:
            tick(name, (before + num_requests) / max(1, num_all))

        found = replay_groups(
            trace.requests,
            groups,
            block_bytes=block_bytes,
            capacity=capacity,
            policy=policy,
            budget_bytes=int(capacity * block_bytes * _BUDGET_SHARE),
            every_tokens=every_tokens,
            tick=advance,
        )
        num_done += len(trace.requests)
        points.append({"trace": number, "policy": policy, "size": host} | _facts(found))
    return {
        "is_timed": False,
        "model": hardware.model,
        "codec": _packing(hardware, traces[0], num_states).codec,
        "unit": room.unit,
        "window": window,
        "window_groups": num_windows if window else 0,
        "state_groups": num_states,
        "traces": [
            {
                "name": trace.name,
                "block_tokens": trace.block_tokens,
                "num_requests": len(trace.requests),
            }
            for trace in traces
        ],
        "points": points,
    }


def draw_groups(results: dict[str, Any]) -> None:
    console = stdout_console()
    for number, trace in enumerate(results["traces"]):
        console.print(
            f"{trace['name']}: {counted(trace['num_requests'], 'request')}, blocks of "
            f"{counted(trace['block_tokens'], 'token')}"
        )
        size = f"host, {results['unit']}"
        names = ("hits", "bytes kept per token", "of which checkpoints", "checkpoints", "used")
        table = new_table("policy", size, *names, title="Hit rate, and what is kept")
        for point in results["points"]:
            if point["trace"] == number:
                table.add_row(
                    point["policy"],
                    f"{point['size']:,.5g}",
                    f"{point['hit_rate']:.3f}",
                    format_bytes(int(point["bytes_per_token"])),
                    f"{point['checkpoint_share']:.0%}",
                    f"{sum(point['checkpoints'].values()):,}",
                    f"{sum(point['checkpoint_hits'].values()):,}",
                )
        console.print(table)
    console.print(f"Codec of DRAM: {results['codec']}.")
    console.print(
        "Hits: share of the prompts' tokens. Bytes kept per token: all that was written, for each "
        "new token. --json also counts checkpoints by the reason for which they were kept."
    )


def _packing(hardware: SimulatedHardware, trace: Trace, num_states: int) -> Packing:
    """Blocks of all groups have the same size, so states, which are not packed, keep all raw."""
    packing = hardware.packings(trace.block_tokens)[Tier.HOST]
    if num_states and packing.codec != RAW:
        if hardware.host_codec != AUTO:
            raise ConfigError(
                f"--host-codec is {packing.codec}, but states are not packed: leave it out, or "
                "leave out --state-groups"
            )
        return Packing(RAW, 1.0, "KV is not packed: states are not.")
    return packing


def _block_bytes(trace: Trace, groups: Groups, hardware: SimulatedHardware) -> int:
    """Of one block of one group: vLLM makes groups of equally many layers."""
    return trace.block_tokens * hardware.shape.bytes_per_token // len(groups)


def _facts(found: GroupsReplayed) -> dict[str, Any]:
    num_blocks = found.num_full_blocks + found.num_checkpoint_blocks
    return {
        "num_host_blocks": found.capacity,
        "hit_rate": found.hit_rate,
        "num_tokens": found.num_tokens,
        "num_hit_tokens": found.num_hit_tokens,
        "num_bytes": found.num_bytes,
        "bytes_per_token": found.bytes_per_token,
        "checkpoint_share": found.num_checkpoint_blocks / num_blocks if num_blocks else 0.0,
        "checkpoints": {reason.value: count for reason, count in found.checkpoints.items()},
        "checkpoint_hits": {reason.value: count for reason, count in found.hits.items()},
    }
