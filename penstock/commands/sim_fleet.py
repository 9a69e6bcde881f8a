"""`penstock sim --instances`: a fleet of instances behind a router."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from penstock.commands import Tick, new_table, stdout_console
from penstock.commands.sim_tables import Sizes, codec_note
from penstock.costs.rates import LinkRate
from penstock.errors import ConfigError
from penstock.sim.fleet import FleetConfig, Roles
from penstock.sim.fleet_report import fleet_facts
from penstock.sim.instance import REMOTE_LINK, InstanceConfig
from penstock.sim.routers import ROUTERS, CacheAwareRules, check_router
from penstock.sim.settings import Room, SimulatedHardware, num_blocks_of, plan_points
from penstock.sim.sweep import FleetPoint, Point, sweep_fleets
from penstock.sim.trace import Trace
from penstock.types import Tier
from penstock.units import counted, format_bytes, format_seconds

_GB = 1e9
_OPTIONS = {
    "--router": "routers",
    "--roles": "roles",
    "--remote-gib": "remote_gib",
    "--remote-blocks": "remote_blocks",
    "--clients": "clients",
}


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The options of a fleet, as given. `check` raises ConfigError if one is wrong."""

    instances: int
    per_node: int = 1
    routers: tuple[str, ...] = ("cache-aware",)
    roles: Roles | None = None
    rules: CacheAwareRules = field(default_factory=CacheAwareRules)
    clients: int | None = None
    remote_gib: float | None = None
    remote_blocks: int | None = None
    remote_gb_per_second: float | None = None

    @classmethod
    def read(
        cls,
        instances: int | None,
        per_node: int,
        routers: Sequence[str] | None,
        roles: str | None,
        **more: Any,
    ) -> FleetOptions | None:
        """Parse options. None if there is no fleet."""
        if instances is None:
            given = {"routers": routers, "roles": roles, **more}
            for option, name in _OPTIONS.items():
                if given.get(name) is not None:
                    raise ConfigError(
                        f"{option} is given, but no --instances: it is for a fleet; add --instances"
                    )
            return None
        names = [name.strip() for each in routers or ROUTERS for name in each.split(",")]
        names = list(dict.fromkeys(names))
        for name in names:
            check_router(name)
        for option, value in (("--instances", instances), ("--instances-per-node", per_node)):
            if value < 1:
                raise ConfigError(f"{option} is {value}: expected 1 or more")
        return cls(instances, per_node, tuple(names), _roles(roles), **more)

    def check(self, room: Room, hardware: SimulatedHardware) -> None:
        if not room.is_timed:
            raise ConfigError(
                "--instances is given, but no device pool: a fleet is simulated in time; give "
                "--device-gib or --device-blocks"
            )
        if self.remote_gib is not None and self.remote_blocks is not None:
            raise ConfigError("both --remote-gib and --remote-blocks are given: give one of them")
        for option, size in (
            ("--remote-gib", self.remote_gib),
            ("--remote-blocks", self.remote_blocks),
            ("--remote-gb-per-second", self.remote_gb_per_second),
        ):
            if size is not None and not 0 < size < math.inf:
                raise ConfigError(f"{option} is {size:g}: expected a number above 0")
        if self.has_store and not all(room.host):
            raise ConfigError(
                "a remote store is given, but no host tier: KV on its way to the store passes "
                "through DRAM; give --host-gib or --host-blocks too"
            )
        # Sizes do not matter here, only whether a tier is there.
        rates, _, _ = hardware.rates()
        some = InstanceConfig(
            1,
            1,
            rates,
            num_device_blocks=1,
            num_host_blocks=int(all(room.host)),
            num_remote_blocks=int(self.has_store),
        )
        self.fleets(some)

    @property
    def has_store(self) -> bool:
        return self.remote_gib is not None or self.remote_blocks is not None

    def fleets(self, instance: InstanceConfig) -> list[FleetConfig]:
        """One for each router; with roles, also the same instances without."""
        return [
            FleetConfig(
                instance, self.instances, router, self.per_node, roles, self.rules, self.clients
            )
            for router, roles in product(self.routers, dict.fromkeys((None, self.roles)))
        ]

    def with_store(self, instance: InstanceConfig, hardware: SimulatedHardware) -> InstanceConfig:
        if not self.has_store:
            return instance
        packing = hardware.packings(instance.block_tokens)[Tier.REMOTE]
        size, unit = (self.remote_gib, "GiB")
        if self.remote_blocks is not None:
            size, unit = self.remote_blocks, "blocks"
        assert size is not None
        link = REMOTE_LINK
        if self.remote_gb_per_second is not None:
            rate = LinkRate(self.remote_gb_per_second * _GB, link.load.latency_seconds)
            link = replace(link, load=rate, save=rate)
        return replace(
            instance,
            num_remote_blocks=num_blocks_of(
                "--remote-gib", size, unit, packing.slot_bytes(instance.block_bytes)
            ),
            remote_link=link,
            remote_ratio=packing.ratio,
        )

    def facts(self) -> dict[str, Any]:
        return {
            "num_instances": self.instances,
            "num_per_node": self.per_node,
            "num_nodes": self.instances // self.per_node,
            "num_clients": self.clients,
            "cache_threshold": self.rules.cache_threshold,
            "balance_abs_threshold": self.rules.balance_abs_threshold,
            "balance_rel_threshold": self.rules.balance_rel_threshold,
            "remote_gb_per_second": None
            if not self.has_store
            else self.remote_gb_per_second or REMOTE_LINK.load.bytes_per_second / _GB,
        }


def simulate_fleets(
    traces: Sequence[Trace],
    room: Room,
    policies: Sequence[str],
    hardware: SimulatedHardware,
    options: FleetOptions,
    *,
    speed: float,
    num_processes: int,
    tick: Tick,
) -> tuple[dict[str, Any], list[Sizes]]:
    """Simulate every router with every policy and size: plain values, and the sizes of each."""
    points: list[FleetPoint] = []
    sizes: list[Sizes] = []
    for point, size in zip(*plan_points(traces, room, policies, hardware, speed), strict=True):
        for fleet in options.fleets(options.with_store(_instance(point), hardware)):
            points.append(FleetPoint(replace(point, instance=fleet.instance), fleet))
            sizes.append(size)
    found = sweep_fleets(traces, points, num_processes=num_processes, tick=tick)
    return {"fleet": options.facts()} | fleet_facts(traces, points, found), sizes


def draw_fleets(results: dict[str, Any], sizes: Sequence[Sizes], unit: str) -> None:
    console = stdout_console()
    fleet = results["fleet"]
    nodes = counted(fleet["num_nodes"], "node")
    for number, trace in enumerate(results["traces"]):
        pairs = [
            (p, s) for p, s in zip(results["points"], sizes, strict=True) if p["trace"] == number
        ]
        console.print(
            f"{trace['name']}: {counted(trace['num_requests'], 'request')}, "
            f"{counted(trace['num_input_tokens'], 'prompt token')}, "
            f"{format_seconds(trace['seconds'])}, on "
            f"{counted(fleet['num_instances'], 'instance')} and {nodes}"
        )
        console.print(_hits(pairs, unit))
        console.print(_times(pairs, unit))
        console.print(
            f"An unbounded cache that all instances share: {trace['unbounded_token_hit_rate']:.3f}."
        )
        if any(point["router"] == "sticky" for point, _ in pairs):
            what = "by the trace's sessions"
            if not trace["has_sessions"]:
                what = (
                    "by the first block of each prompt that at most half of the requests begin "
                    "with, because the trace names no sessions"
                )
            console.print(f"Sticky: {what}.")
    rates = results["rates"]
    console.print(
        f"{results['model']} on {results['num_gpus']} x {results['gpu']} per instance: prefill "
        f"{rates['prefill_tokens_per_second']:,.0f} tokens/s, a decode step "
        f"{format_seconds(rates['decode_base_seconds'])} plus the time for its context."
    )
    console.print(codec_note(results["codecs"], has_disk=any(size["disk"] for size in sizes)))
    console.print(
        "Hits: share of the prompts' tokens that were not computed. Evicted: blocks of DRAM and "
        "disks. Busiest: the busiest instance's computing time, relative to the mean. Lost: the "
        "share of decoders' time that steps took longer because they also computed prompts."
    )


def plot_points(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The points as `picture.sections` draws them: one line for each router."""
    limits = [trace["unbounded_token_hit_rate"] for trace in results["traces"]]
    several = len({point["policy"] for point in results["points"]}) > 1
    return [
        point
        | {
            "policy": _label(point) + (f", {point['policy']}" if several else ""),
            "hit_rate": point["token_hit_rate"],
            "unbounded_hit_rate": limits[point["trace"]],
        }
        for point in results["points"]
    ]


_Pairs = Sequence[tuple[dict[str, Any], Sizes]]


def _label(point: dict[str, Any]) -> str:
    roles = point["roles"]
    apart = f", {roles['prefill']}P {roles['decode']}D" if roles else ""
    return f"{point['router']}{apart}"


def _shown(pairs: _Pairs, unit: str) -> tuple[list[str], list[list[str]]]:
    """Columns that tell rows apart: router, and policy and sizes if there are several."""
    names, columns = ["router"], [[_label(point) for point, _ in pairs]]
    if len({point["policy"] for point, _ in pairs}) > 1:
        names.append("policy")
        columns.append([point["policy"] for point, _ in pairs])
    for tier in ("device", "host", "disk"):
        if len({size[tier] for _, size in pairs}) > 1:
            names.append(f"{tier} {unit}")
            columns.append([f"{size[tier]:,.5g}" for _, size in pairs])
    return names, [list(row) for row in zip(*columns, strict=True)]


def _hits(pairs: _Pairs, unit: str) -> Any:
    names, rows = _shown(pairs, unit)
    has_store = any(point["num_remote_blocks"] for point, _ in pairs)
    network = ["from store", "to store"] if has_store else []
    table = new_table(*names, "hits", *network, "evicted", "busiest", title="Hit rate")
    for (point, _), row in zip(pairs, rows, strict=True):
        moved = [format_bytes(point[f"network_{way}_bytes"]) for way in ("load", "save")]
        table.add_row(
            *row,
            f"{point['token_hit_rate']:.3f}",
            *(moved if has_store else ()),
            f"{point['num_evicted_blocks']:,}",
            f"{point['balance']:.2f}",
        )
    return table


def _times(pairs: _Pairs, unit: str) -> Any:
    names, rows = _shown(pairs, unit)
    columns = ("TTFT P50", "P90", "P99", "out tok/s", "lost", "rejected")
    table = new_table(*names, *columns, title="Times")
    for (point, _), row in zip(pairs, rows, strict=True):
        times = point["first_token_seconds"].values()
        table.add_row(
            *row,
            *("–" if time is None else format_seconds(time) for time in times),
            f"{point['output_tokens_per_second']:,.0f}",
            f"{point['lost_decode_share']:.1%}",
            f"{sum(point['rejections'].values()):,}",
        )
    return table


def write_fleet_plot(
    path: Path, results: dict[str, Any], sizes: Sequence[Sizes], unit: str
) -> None:
    from penstock.sim.picture import sections
    from penstock.sim.plot import page

    fleet = results["fleet"]
    note = (
        f"{results['model']} on {counted(fleet['num_instances'], 'instance')} of "
        f"{results['num_gpus']} x {results['gpu']}, {counted(fleet['num_nodes'], 'node')}, "
        "simulated. Hits are shares of tokens."
    )
    drawn = sections(results["traces"], plot_points(results), sizes, unit)
    path.write_text(page("penstock sim", note, drawn), encoding="utf-8")


def _instance(point: Point) -> InstanceConfig:
    assert point.instance is not None  # `FleetOptions.check` requires a device pool
    return point.instance


def _roles(text: str | None) -> Roles | None:
    if text is None:
        return None
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in ("prefill", "decode") or name in found or not number.isascii():
            break
        if not number.isdigit() or len(number) > 6:
            break
        found[name] = int(number)
    if len(found) != 2 or text.count(",") != 1:
        raise ConfigError(
            f"--roles is {text[:80]!r}: expected prefill=P,decode=D with numbers of instances"
        )
    return Roles(found["prefill"], found["decode"])
