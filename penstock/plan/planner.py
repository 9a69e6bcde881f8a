"""The whole plan: sizes, what fits, what it costs, and what to do. Pure: tables and numbers in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.connectors.vllm.settings import VllmSettings
from penstock.costs.rates import LinkRate, break_even_tokens
from penstock.errors import ConfigError
from penstock.plan import paste
from penstock.plan.decode import DecodeCost, decode_cost
from penstock.plan.fit import Demand, Fit, Hardware, Layout, fit, layouts
from penstock.plan.paste import Pasted
from penstock.plan.verdict import Kind, PlanVerdict, format_count, judge
from penstock.plan.ways import Host, Mode, Way, find_ways
from penstock.shapes.gpu_rates import Rates, RatesOf, rates_from_table
from penstock.shapes.shape import ModelShape
from penstock.types import Tier
from penstock.units import format_seconds


@dataclass(frozen=True, slots=True)
class PlannedModel:
    name: str  # as it was asked for
    served: str  # as `serve` and vLLM are to be told
    shape: ModelShape
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    model: PlannedModel
    hardware: Hardware
    demand: Demand
    ways: tuple[Way, ...]  # the best first; none where the weights do not fit
    layout: Layout  # of the best one; `fit` and `cost` are of all its servers, `rates` of one
    rates: Rates
    fit: Fit
    cost: DecodeCost
    break_evens: Mapping[Tier, int | None]  # tokens; None: never; empty: prefill is not known
    load_seconds: Mapping[Tier, float]  # of one whole session
    compute_seconds: float | None
    verdict: PlanVerdict
    pasted: Pasted


def make_plan(
    model: PlannedModel, hardware: Hardware, demand: Demand, rates_of: RatesOf | None = None
) -> Plan:
    """`rates_of` in place of the table's."""
    _check(hardware)
    shape = model.shape
    rates_of = rates_of or (lambda num_gpus: rates_from_table(hardware.gpu, num_gpus, shape))
    ways = find_ways(shape, model.weight_bytes, hardware, demand, rates_of)
    if ways:
        best = ways[0]
        layout, rates, found, cost = best.layout, best.rates, best.found, best.cost
    else:
        layout = max(layouts(shape, hardware), key=lambda each: (each.gpus_each, each.num_servers))
        layout = Layout(1, layout.gpus_each)
        rates = rates_of(layout.gpus_each)
        found = fit(shape, model.weight_bytes, hardware.part(layout), demand)
        cost = decode_cost(shape, found, demand, rates)
    to_device = {tier: _through_host(tier, rates) for tier in rates.links}
    load_seconds = {tier: link.seconds(found.session_bytes) for tier, link in to_device.items()}
    break_evens: dict[Tier, int | None] = {}
    compute_seconds = None
    if rates.prefill is not None:
        prefill, mean_bytes = rates.prefill, found.session_bytes / demand.context_tokens
        compute_seconds = prefill.seconds(demand.context_tokens)
        break_evens = {
            tier: break_even_tokens(link, prefill, mean_bytes) for tier, link in to_device.items()
        }
    together = found.times(layout.num_servers)
    verdict = judge(
        *(shape, hardware, demand, ways, together),
        *(break_evens, load_seconds, compute_seconds),
    )
    return Plan(
        model=model,
        hardware=hardware,
        demand=demand,
        ways=tuple(ways),
        layout=layout,
        rates=rates,
        fit=together,
        cost=cost.times(layout.num_servers, demand.num_active),
        break_evens=break_evens,
        load_seconds=load_seconds,
        compute_seconds=compute_seconds,
        verdict=verdict,
        pasted=_paste(verdict, model, hardware, ways),
    )


def _check(hardware: Hardware) -> None:
    if hardware.num_gpus < 1:
        raise ConfigError(f"num_gpus is {hardware.num_gpus}: expected at least 1")
    split = hardware.tensor_parallel
    if split is not None and not 1 <= split <= hardware.num_gpus:
        raise ConfigError(
            f"tensor_parallel is {split}: expected 1 to the {hardware.num_gpus} GPUs there are"
        )
    if not 0 < hardware.memory_utilization <= 1:
        raise ConfigError(
            f"memory_utilization is {hardware.memory_utilization}: expected a share up to 1"
        )
    for name in ("host_bytes", "disk_bytes", "device_kv_bytes"):
        value = getattr(hardware, name)
        if value is not None and value < 0:
            raise ConfigError(f"{name} is {value}: expected 0 or more")


def _through_host(tier: Tier, rates: Rates) -> LinkRate:
    """Tiers stream side by side and all cross DRAM's link: the slowest sets the pace."""
    link, host = rates.links[tier].rate, rates.links[Tier.HOST].rate
    return LinkRate(
        min(link.bytes_per_second, host.bytes_per_second),
        max(link.latency_seconds, host.latency_seconds),
    )


def _paste(
    verdict: PlanVerdict, model: PlannedModel, hardware: Hardware, ways: Sequence[Way]
) -> Pasted:
    """For each host the best of what it can run."""
    kind = verdict.kind
    if not kind.runs:
        return paste.nothing(verdict.reasons[0])
    serve, serve_note = _serve(kind, model, hardware, _first(ways, Host.SERVE))
    vllm, vllm_note, settings = _vllm(kind, model, hardware, _first(ways, Host.VLLM))
    return Pasted(serve, serve_note, vllm, vllm_note, settings)


def _first(ways: Sequence[Way], host: Host) -> Way | None:
    return next((way for way in ways if host in way.hosts), None)


def _serve(
    kind: Kind, model: PlannedModel, hardware: Hardware, way: Way | None
) -> tuple[tuple[str, ...] | None, str]:
    if model.shape.bits != 16:
        return None, "the embedded engine keeps KV in the model's own 16 bits; leave out fp8"
    if way is None:
        return None, "the embedded engine runs on one GPU, and the weights do not fit on one"
    options = paste.serve_options(_kind_of(kind, way), model.served, hardware, way)
    num_servers = way.layout.num_servers
    if num_servers == 1:
        return options, _in_numbers(way)
    return options, (
        f"{_in_numbers(way)}: one server on each of {num_servers} GPUs (CUDA_VISIBLE_DEVICES), "
        f"each with its own --port and {way.part.num_sessions:,} of the sessions"
    )


def _vllm(
    kind: Kind, model: PlannedModel, hardware: Hardware, way: Way | None
) -> tuple[tuple[str, ...] | None, str, VllmSettings | None]:
    if way is None:
        none = "vLLM wants all of a running session's KV on the GPU, and not one session fits"
        return None, none, None
    vllm, settings = paste.vllm_options(
        _kind_of(kind, way), model.served, hardware, way, is_fp8=model.shape.bits == 8
    )
    note = _in_numbers(way)
    if way.layout.num_servers > 1:
        note += (
            f": {way.layout.num_servers} copies of the model, each over "
            f"{way.layout.gpus_each} of the GPUs, with DRAM, disk and seats of its own as given"
        )
    return vllm, note, settings


def _in_numbers(way: Way) -> str:
    return (
        f"{way.num_running:,} at once, {format_seconds(way.token_seconds)} a token, "
        f"{format_count(way.tokens_per_second)} tokens/s"
    )


def _kind_of(kind: Kind, way: Way) -> Kind:
    """Of a host that has to do it otherwise than the best way does."""
    if kind not in (Kind.TAIL_PIN, Kind.TURNS, Kind.NEVER_COLD):
        return Kind.TAIL_PIN if way.mode is Mode.COLD else kind
    return {Mode.COLD: Kind.TAIL_PIN, Mode.TURNS: Kind.TURNS, Mode.WHOLE: Kind.NEVER_COLD}[way.mode]
