"""The ways to run a model on these GPUs, the performance of each, and their ranking. Pure.

A way is a mode (on the GPU, in turns, or partly from DRAM) in one layout of the GPUs. Ways that
cannot run come last. Among the rest, those within the acceptable time per token come first, most
tokens per second first. If no way is within it, the shortest time per token comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.plan.decode_cost import DecodeCost, decode_cost, decode_step, most_within
from penstock.plan.fit import Demand, Fit, Hardware, Layout, fit, layouts
from penstock.shapes.embedded import embedded_words
from penstock.shapes.gpu_rates import GpuRates, RatesOf
from penstock.shapes.shape import ModelShape
from penstock.types import Tier
from penstock.units import format_bytes

# By default: five tokens per second, about as fast as people read.
ACCEPTABLE_TOKEN_SECONDS = 0.2
# One machine's GPUs. A model is split further only if it does not fit otherwise.
_SPLIT_WITHIN_MACHINE = 8
SERVED_BITS = (8, 16)  # of a value of KV, in `penstock serve`
# The shortest turn. `turn_seconds` is at least twice the time that loading a turn's sessions takes,
# so that loads use no more than half of the link's time.
_LEAST_TURN_SECONDS = 0.5


class Mode(StrEnum):
    WHOLE = "whole"  # all active sessions fit on the GPUs
    TURNS = "turns"  # as many as fit decode; the rest wait in DRAM
    COLD = "cold"  # all decode at once; every token reads part of the KV from DRAM


class ServingEngine(StrEnum):
    VLLM = "vllm"
    SERVE = "serve"


@dataclass(frozen=True, slots=True)
class Way:
    mode: Mode
    layout: Layout
    engines: tuple[ServingEngine, ...]  # those that can run it; if none, `obstacle` says why
    obstacle: str
    num_running: int  # sessions that decode at once, on all servers
    seats_each: int  # the limit for one server; may exceed the demand, to leave room for peaks
    token_seconds: float  # between two tokens of a running session
    tokens_per_second: float  # of all sessions together
    session_tokens_per_second: float  # of each active session, including waiting for its turn
    cold_bytes: int  # read from DRAM in every step, on one server
    keeps_target: bool
    turn_seconds: float | None  # for `penstock serve`, if sessions take turns
    part: Demand  # one server's share of the demand
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
    """Every mode in every layout that has room for the weights, best first."""
    found = [
        way
        for layout in layouts(shape, hardware)
        for way in _in_layout(shape, weight_bytes, hardware, demand, layout, rates_of)
    ]
    return sorted(found, key=_rank, reverse=True)


def best_per_mode(ways: Sequence[Way]) -> list[Way]:
    """For a comparison: the best layout of each mode that uses as many GPUs as the best way."""
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
        """At most `most` sessions at once per server; fewer if a token would take too long."""

        def seconds(num: int) -> float:
            return decode_step(shape, found, rates, num).seconds

        target = target_of(demand)
        running = most_within(target, most, seconds)
        # So few would fit on the GPU: that is another mode.
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
        load_seconds = running * found.own_bytes / rates.links[Tier.HOST].rate.bytes_per_second
        turn_seconds = max(_LEAST_TURN_SECONDS, 2 * load_seconds)
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
            turn_seconds=turn_seconds if mode is Mode.TURNS else None,
            part=part,
            found=found,
            cost=cost,
            rates=rates,
        )

    on_device = found.sessions_on_device
    if on_device:
        yield make(Mode.WHOLE, min(part.num_active, on_device))
    if part.num_active > on_device:
        kept = found.count_with(found.host_bytes)
        obstacle = "" if kept else _too_little_dram(found)
        yield make(Mode.COLD, min(part.num_active, max(1, kept)), obstacle)


def _engines(shape: ModelShape, mode: Mode, layout: Layout) -> Iterator[ServingEngine]:
    if mode is not Mode.COLD:
        yield ServingEngine.VLLM
    if layout.gpus_each == 1 and shape.bits in SERVED_BITS and shape.is_plain:
        yield ServingEngine.SERVE


def _no_engine(shape: ModelShape, mode: Mode, layout: Layout) -> str:
    if any(_engines(shape, mode, layout)):
        return ""
    if not shape.is_plain:
        why = f"does not support {_special(shape)}"
        if embedded_words(shape):
            why = f"keeps more of {_special(shape)} than this plan counts"
    else:
        is_served = shape.bits in SERVED_BITS
        why = "runs on one GPU" if is_served else f"does not support {shape.bits}-bit KV"
    return f"Only `penstock serve` reads KV from DRAM in every step, and it {why}"


def _special(shape: ModelShape) -> str:
    if shape.is_mla:
        return "MLA"
    labels = dict.fromkeys(group.label for group in shape.partial_groups)
    return " or ".join(f"{label} layers" for label in labels)


def _too_little_dram(found: Fit) -> str:
    return (
        f"One session of {format_bytes(found.session_bytes)} does not fit in "
        f"{format_bytes(found.pool_bytes)} on the GPU and {format_bytes(found.host_bytes)} of DRAM"
    )
