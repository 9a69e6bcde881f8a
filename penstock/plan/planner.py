"""Makes a plan: sizes, what fits, what it costs, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.costs.rates import LinkRate, PrefillRate, break_even_tokens
from penstock.errors import ConfigError
from penstock.plan.decode_cost import DecodeCost, decode_cost
from penstock.plan.fit import Demand, Fit, Hardware, Layout, fit, layouts, packings
from penstock.plan.settings import PlanSettings, make_settings
from penstock.plan.verdict import PlanVerdict, judge
from penstock.plan.ways import Way, find_ways
from penstock.shapes.gpu_rates import GpuRates, RatesOf, rates_from_table
from penstock.shapes.packing import Packing, packed_rates
from penstock.shapes.shape import ModelShape
from penstock.types import Tier


@dataclass(frozen=True, slots=True)
class PlannedModel:
    name: str  # as the user named it
    served: str  # the name that `penstock serve` and vLLM take
    shape: ModelShape
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    model: PlannedModel
    hardware: Hardware
    demand: Demand
    ways: tuple[Way, ...]  # best first; empty if the weights do not fit
    layout: Layout  # of the best way; `fit` and `cost` cover all its servers, `rates` one
    rates: GpuRates  # in bytes of KV before it is packed
    packings: Mapping[Tier, Packing]
    fit: Fit
    cost: DecodeCost
    break_evens: Mapping[Tier, int | None]  # tokens; None: never; empty: prefill rate unknown
    load_seconds: Mapping[Tier, float]  # for one whole session
    compute_seconds: float | None
    verdict: PlanVerdict
    settings: PlanSettings

    @property
    def pasted(self) -> PlanSettings:
        """The old name of `settings`. It stays for one release."""
        return self.settings


def make_plan(
    model: PlannedModel, hardware: Hardware, demand: Demand, rates_of: RatesOf | None = None
) -> Plan:
    """Plan `model` on `hardware`. Without `rates_of`, rates come from the catalog."""
    _check(hardware)
    shape = model.shape
    link_rates_of = rates_of or (lambda num_gpus: rates_from_table(hardware.gpu, num_gpus, shape))

    def packed_rates_of(num_gpus: int) -> GpuRates:
        return packed_rates(link_rates_of(num_gpus), packings(shape, hardware, num_gpus))

    ways = find_ways(shape, model.weight_bytes, hardware, demand, packed_rates_of)
    if ways:
        best = ways[0]
        layout, rates, found, cost = best.layout, best.rates, best.found, best.cost
    else:
        layout = max(layouts(shape, hardware), key=lambda each: (each.gpus_each, each.num_servers))
        layout = Layout(1, layout.gpus_each)
        rates = packed_rates_of(layout.gpus_each)
        found = fit(shape, model.weight_bytes, hardware.part(layout), demand)
        cost = decode_cost(shape, found, demand, rates)
    to_device = {tier: _through_host(tier, rates) for tier in rates.links}
    load_seconds = {tier: link.seconds(found.session_bytes) for tier, link in to_device.items()}
    break_evens: dict[Tier, int | None] = {}
    compute_seconds = None
    if rates.prefill is not None:
        compute_seconds = rates.prefill.seconds(demand.context_tokens)
        break_evens = {
            tier: _break_even(link, rates.prefill, shape, layout.gpus_each)
            for tier, link in to_device.items()
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
        packings=packings(shape, hardware, layout.gpus_each),
        fit=together,
        cost=cost.times(layout.num_servers, demand.num_active),
        break_evens=break_evens,
        load_seconds=load_seconds,
        compute_seconds=compute_seconds,
        verdict=verdict,
        settings=make_settings(verdict, model.served, shape, hardware, ways),
    )


def _check(hardware: Hardware) -> None:
    if hardware.num_gpus < 1:
        raise ConfigError(f"num_gpus is {hardware.num_gpus}: expected at least 1")
    split = hardware.tensor_parallel
    if split is not None and not 1 <= split <= hardware.num_gpus:
        raise ConfigError(
            f"tensor_parallel is {split}: expected 1 to {hardware.num_gpus}, the number of GPUs"
        )
    if not 0 < hardware.memory_utilization <= 1:
        raise ConfigError(
            f"memory_utilization is {hardware.memory_utilization}: expected above 0, up to 1"
        )
    for name in ("host_bytes", "disk_bytes", "device_kv_bytes"):
        value = getattr(hardware, name)
        if value is not None and value < 0:
            raise ConfigError(f"{name} is {value}: expected 0 or more")


def _break_even(
    link: LinkRate, prefill: PrefillRate, shape: ModelShape, num_gpus: int
) -> int | None:
    """The prompt length from which loading is faster. None: never.

    States come with every load, like a latency. Below a window all layers need every token; beyond
    it the window has a fixed size too.
    """

    def from_tokens(token_bytes: int, fixed_bytes: int) -> int | None:
        latency = link.latency_seconds + fixed_bytes / link.bytes_per_second
        fixed = LinkRate(link.bytes_per_second, latency)
        return break_even_tokens(fixed, prefill, max(1, token_bytes))

    one = shape.kv_bytes(1, num_gpus=num_gpus)
    token_bytes = shape.kv_bytes(2, num_gpus=num_gpus) - one
    least = from_tokens(token_bytes, one - token_bytes)
    window = min((group.span for group in shape.partial_groups if group.span), default=None)
    if window is None or (least is not None and least <= window):
        return least
    checkpoint_bytes = shape.checkpoint_bytes(num_gpus=num_gpus)
    least = from_tokens(shape.growing_bytes(1, num_gpus=num_gpus), checkpoint_bytes)
    return None if least is None else max(window, least)


def _through_host(tier: Tier, rates: GpuRates) -> LinkRate:
    """Loads from lower tiers pass through DRAM at the same time: the slowest link limits them."""
    link, host = rates.links[tier].rate, rates.links[Tier.HOST].rate
    return LinkRate(
        min(link.bytes_per_second, host.bytes_per_second),
        max(link.latency_seconds, host.latency_seconds),
    )
