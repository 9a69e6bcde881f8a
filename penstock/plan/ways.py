"""The ways to run a model on these GPUs, what each gives, and which one comes first. Pure.

The rule: what cannot run comes last. Of what can, the ways that keep the time per token that is
acceptable come first, the one with the most tokens per second at the top. If none keeps it, the
one whose tokens come soonest does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.plan.decode_cost import DecodeCost, decode_cost, decode_step, most_within
from penstock.plan.fit import Demand, Fit, Hardware, Layout, fit, layouts
from penstock.shapes.gpu_rates import GpuRates, RatesOf
from penstock.shapes.shape import ModelShape
from penstock.types import Tier
from penstock.units import format_bytes

# Unless the user says otherwise: five tokens a second, about as fast as people read.
ACCEPTABLE_TOKEN_SECONDS = 0.2
# One machine's GPUs. A model is split further only if it does not fit otherwise.
_SPLIT_WITHIN_MACHINE = 8
# While others wait, each session decodes for so long; loads then take half of the link's time.
_LEAST_TURN_SECONDS = 0.5


class Mode(StrEnum):
    WHOLE = "whole"  # all that decode at once fit on the GPUs
    TURNS = "turns"  # as many as fit decode, the others wait in DRAM
    COLD = "cold"  # all decode at once, part of their KV is read from DRAM at every token


class ServingEngine(StrEnum):
    VLLM = "vllm"
    SERVE = "serve"


@dataclass(frozen=True, slots=True)
class Way:
    mode: Mode
    layout: Layout
    engines: tuple[ServingEngine, ...]  # empty: none can, and `obstacle` says why
    obstacle: str
    num_running: int  # sessions that decode at once, on all servers
    seats_each: int  # how many one server may let decode at once: peaks may go beyond the demand
    token_seconds: float  # from one token of a running session to its next
    tokens_per_second: float  # of all together
    session_tokens_per_second: float  # of each active session, waiting for its turn included
    cold_bytes: int  # read from DRAM for every token, on one server
    keeps_target: bool
    turn_seconds: float | None  # for `penstock serve`, where sessions take turns
    part: Demand  # what one server gets
    found: Fit  # of one server
    cost: DecodeCost  # of one server
    rates: GpuRates  # of one server

    @property
    def can_run(self) -> bool:
        return bool(self.engines)


def target_of(demand: Demand) -> float:
    given = demand.max_token_seconds
    return ACCEPTABLE_TOKEN_SECONDS if given is None else given


def find_ways(
    shape: ModelShape, weight_bytes: int, hardware: Hardware, demand: Demand, rates_of: RatesOf
) -> list[Way]:
    """Of each mode, in each layout that has room for the weights; the best first."""
    found = [
        way
        for layout in layouts(shape, hardware)
        for way in _in_layout(shape, weight_bytes, hardware, demand, layout, rates_of)
    ]
    return sorted(found, key=_rank, reverse=True)


def best_of_each_mode(ways: Sequence[Way]) -> list[Way]:
    """What people compare: of each mode the best layout that uses as many GPUs as the best way."""
    seen: dict[Mode, Way] = {}
    for way in ways:
        if way.layout.num_gpus == ways[0].layout.num_gpus:
            seen.setdefault(way.mode, way)
    return list(seen.values())


def _rank(way: Way) -> tuple[float | bool, ...]:
    first = way.tokens_per_second if way.keeps_target else -way.token_seconds
    second = -way.token_seconds if way.keeps_target else way.tokens_per_second
    is_near = way.layout.gpus_each <= _SPLIT_WITHIN_MACHINE
    room = way.found.sessions_on_device * way.layout.num_servers
    return (way.can_run, is_near, way.keeps_target, first, second, room, -way.layout.num_gpus)


def _in_layout(
    shape: ModelShape,
    weight_bytes: int,
    hardware: Hardware,
    demand: Demand,
    layout: Layout,
    rates_of: RatesOf,
) -> Iterator[Way]:
    part, rates = demand.split(layout.num_servers), rates_of(layout.gpus_each)
    found = fit(shape, weight_bytes, hardware.part(layout), part)
    if found.pool_bytes <= 0:
        return
    cost = decode_cost(shape, found, part, rates)

    def make(mode: Mode, most: int, obstacle: str = "") -> Way:
        """At most `most` at once on each server, fewer if a token would take too long."""

        def seconds(num: int) -> float:
            return decode_step(shape, found, rates, num).seconds

        target = target_of(demand)
        running = most_within(target, most, seconds)
        # With so few nothing is read from DRAM: that is another way.
        if running == 0 or (mode is Mode.COLD and running <= found.sessions_on_device):
            running = most
        seats = running
        if mode is Mode.WHOLE:
            room = min(part.num_sessions, found.sessions_on_device)
            seats = max(running, most_within(target, room, seconds))
        now = decode_step(shape, found, rates, running)
        token_seconds = now.seconds
        num_running = min(demand.num_active, running * layout.num_servers)
        per_second = num_running / token_seconds
        if mode is Mode.WHOLE and num_running < demand.num_active:
            mode = Mode.TURNS
        link = rates.links[Tier.HOST].rate.bytes_per_second
        return Way(
            mode=mode,
            layout=layout,
            engines=() if obstacle else tuple(_engines(shape, mode, layout)),
            obstacle=obstacle or _no_engine(shape, mode, layout),
            num_running=num_running,
            seats_each=seats,
            token_seconds=token_seconds,
            tokens_per_second=per_second,
            session_tokens_per_second=per_second / demand.num_active,
            cold_bytes=now.cold_bytes,
            keeps_target=token_seconds <= target,
            turn_seconds=max(_LEAST_TURN_SECONDS, 2 * running * found.own_bytes / link)
            if mode is Mode.TURNS
            else None,
            part=part,
            found=found,
            cost=cost,
            rates=rates,
        )

    on_device = found.sessions_on_device
    if on_device:
        yield make(Mode.WHOLE, min(part.num_active, on_device))
    if part.num_active > on_device:
        kept = found.count(found.pool_bytes + found.host_bytes)
        obstacle = "" if kept else _too_little_dram(found)
        yield make(Mode.COLD, min(part.num_active, max(1, kept)), obstacle)


def _engines(shape: ModelShape, mode: Mode, layout: Layout) -> Iterator[ServingEngine]:
    if mode is not Mode.COLD:
        yield ServingEngine.VLLM
    if layout.gpus_each == 1 and shape.bits == 16:
        yield ServingEngine.SERVE


def _no_engine(shape: ModelShape, mode: Mode, layout: Layout) -> str:
    if any(True for _ in _engines(shape, mode, layout)):
        return ""
    if shape.bits != 16:
        return "only `penstock serve` reads KV from DRAM at every token, and it does not keep fp8"
    return "only `penstock serve` reads KV from DRAM at every token, and it runs on one GPU"


def _too_little_dram(found: Fit) -> str:
    return (
        f"one session of {format_bytes(found.session_bytes)} is more than "
        f"{format_bytes(found.pool_bytes)} on the GPU and {format_bytes(found.host_bytes)} of DRAM"
    )
