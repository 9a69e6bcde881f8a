"""The whole plan: sizes, what fits, what it costs, and what to do. Pure: tables and numbers in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.costs import LinkRate, break_even_tokens
from penstock.errors import ConfigError
from penstock.plan import paste
from penstock.plan.fit import DecodeCost, Demand, Fit, Hardware, decode_cost, fit
from penstock.plan.paste import Pasted
from penstock.plan.rates import Rates, rates_from_table
from penstock.plan.shape import ModelShape
from penstock.plan.verdict import Kind, Verdict, judge
from penstock.types import Tier


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
    rates: Rates
    fit: Fit
    cost: DecodeCost
    break_evens: Mapping[Tier, int | None]  # tokens; None: never; empty: prefill is not known
    load_seconds: Mapping[Tier, float]  # of one whole session
    compute_seconds: float | None
    verdict: Verdict
    pasted: Pasted


def make_plan(
    model: PlannedModel, hardware: Hardware, demand: Demand, rates: Rates | None = None
) -> Plan:
    """`rates` in place of the table's."""
    _check(hardware)
    shape = model.shape
    rates = rates or rates_from_table(hardware.gpu, hardware.num_gpus, shape)
    found = fit(shape, model.weight_bytes, hardware, demand)
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
    verdict = judge(
        shape, hardware, demand, found, cost, break_evens, load_seconds, compute_seconds
    )
    return Plan(
        model=model,
        hardware=hardware,
        demand=demand,
        rates=rates,
        fit=found,
        cost=cost,
        break_evens=break_evens,
        load_seconds=load_seconds,
        compute_seconds=compute_seconds,
        verdict=verdict,
        pasted=_paste(verdict, model, hardware, demand, found, cost),
    )


def _check(hardware: Hardware) -> None:
    if hardware.num_gpus < 1:
        raise ConfigError(f"num_gpus is {hardware.num_gpus}: expected at least 1")
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
    verdict: Verdict,
    model: PlannedModel,
    hardware: Hardware,
    demand: Demand,
    found: Fit,
    cost: DecodeCost,
) -> Pasted:
    kind = verdict.kind
    if kind in (Kind.DOES_NOT_FIT, Kind.NOT_SUPPORTED):
        return paste.nothing(verdict.reasons[0])
    is_fp8 = model.shape.bits == 8
    serve, serve_note = _serve(kind, model, hardware, demand, found, cost)
    if found.sessions_on_device == 0:
        none = "vLLM wants all of a running session's KV on the GPU, and not one session fits"
        return Pasted(serve, serve_note, None, none)
    vllm_note = ""
    if kind is Kind.TAIL_PIN:
        vllm_note = (
            f"vLLM keeps running sessions whole: {found.sessions_on_device:,} at once, the others "
            "wait in DRAM"
        )
    vllm, settings = paste.vllm_options(
        kind, model.served, hardware, demand, found, cost, is_fp8=is_fp8
    )
    return Pasted(serve, serve_note, vllm, vllm_note, settings)


def _serve(
    kind: Kind,
    model: PlannedModel,
    hardware: Hardware,
    demand: Demand,
    found: Fit,
    cost: DecodeCost,
) -> tuple[tuple[str, ...] | None, str]:
    if model.shape.bits != 16:
        return None, "the embedded engine keeps KV in the model's own 16 bits; leave out fp8"
    if hardware.num_gpus == 1:
        return paste.serve_options(kind, model.served, hardware, demand, found, cost), ""
    num_servers = hardware.num_gpus
    alone = replace(
        hardware,
        num_gpus=1,
        host_bytes=None if hardware.host_bytes is None else hardware.host_bytes // num_servers,
        disk_bytes=hardware.disk_bytes // num_servers,
        device_kv_bytes=None,
    )
    if alone.pool_bytes(model.weight_bytes) <= 0:
        return None, "the embedded engine runs on one GPU, and the weights do not fit on one"
    part = demand.split(num_servers)
    found = fit(model.shape, model.weight_bytes, alone, part)
    rates = rates_from_table(hardware.gpu, 1, model.shape)
    cost = decode_cost(model.shape, found, part, rates)
    note = (
        f"one server on each of {num_servers} GPUs (CUDA_VISIBLE_DEVICES), each with its own "
        f"--port and {part.num_sessions:,} of the sessions"
    )
    return paste.serve_options(kind, model.served, alone, part, found, cost), note
