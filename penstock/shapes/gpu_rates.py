"""Estimated rates of a GPU: the vendor's data sheet times a measured share.

The shares are what one H200 (989.4 TFLOP/s, 4.8 TB/s) reached with Llama-3.1-8B in bf16:

    compute  0.70  8,192 tokens took 204 ms (0.74 of the data sheet), 32,768 took 1,184 (0.69)
    memory   0.65  a step at batch 1 took 5.05 ms and read 16.1 GB of weights (0.66)

For other GPUs this is an extrapolation. Two values are assumed, not measured:

    mixtures of experts prefill at half of the dense share, because an expert's products are small
    a step over several GPUs waits for two exchanges per layer, whatever their size

Otherwise, several GPUs are assumed to scale perfectly, each with its own link. That favors
computing as much as loading. Rates from a probe replace these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.costs.rates import LinkRate, PrefillRate
from penstock.errors import ConfigError
from penstock.shapes.catalog import COMMON_DISK, Gpu
from penstock.shapes.shape import ModelShape
from penstock.types import Tier

COMPUTE_SHARE = 0.70
MIXTURE_COMPUTE_SHARE = COMPUTE_SHARE / 2
MEMORY_SHARE = 0.65
EXCHANGE_SECONDS = 30e-6
EXCHANGES_PER_LAYER = 2


@dataclass(frozen=True, slots=True)
class KnownLink:
    rate: LinkRate
    source: str


@dataclass(frozen=True, slots=True)
class GpuRates:
    """Rates of all GPUs of one server together."""

    links: Mapping[Tier, KnownLink]  # towards the device
    cold_bytes_per_second: float  # KV in DRAM, read in place by a step
    memory_bytes_per_second: float
    prefill: PrefillRate | None
    prefill_source: str
    exchange_seconds: float = 0.0  # per step, between GPUs that share a model


RatesOf = Callable[[int], GpuRates]
"""Returns the rates of one server with the given number of GPUs."""


def rates_from_table(gpu: Gpu, num_gpus: int, shape: ModelShape) -> GpuRates:
    link = gpu.link
    host = LinkRate(link.bytes_per_second * num_gpus, link.latency_seconds)
    disk = LinkRate(COMMON_DISK.bytes_per_second, COMMON_DISK.latency_seconds)
    each = f", on each of {num_gpus} GPUs" if num_gpus > 1 else ""
    share, why = COMPUTE_SHARE, "as one H200 reached with a dense model"
    if shape.is_mixture:
        share = MIXTURE_COMPUTE_SHARE
        why = (
            f"with {(shape.num_active_params or 0) / 1e9:,.1f} billion active parameters; assumed "
            f"for a mixture of experts: half of the {COMPUTE_SHARE:.0%} that one H200 reached with "
            "a dense model"
        )
    exchanges = EXCHANGES_PER_LAYER * shape.num_layers if num_gpus > 1 else 0
    return GpuRates(
        links={
            Tier.HOST: KnownLink(host, f"{link.name}{each}: {link.source}"),
            Tier.DISK: KnownLink(disk, COMMON_DISK.source),
        },
        cold_bytes_per_second=link.cold_bytes_per_second * num_gpus,
        memory_bytes_per_second=gpu.memory_bytes_per_second * MEMORY_SHARE * num_gpus,
        prefill=estimate_prefill(shape, gpu.operations_per_second * share * num_gpus),
        prefill_source=(
            f"{share:.0%} of the {gpu.operations_per_second / 1e12:,.0f} TFLOP/s in the data sheet"
            f"{each}, {why}"
        ),
        exchange_seconds=exchanges * EXCHANGE_SECONDS,
    )


def estimate_prefill(shape: ModelShape, operations_per_second: float) -> PrefillRate | None:
    """A rough estimate of prefill at the speed of a matrix product; None without a parameter count.

    Each token is multiplied with all parameters, 2 operations each. Attention multiplies each token
    with those before it, once for the scores and once for the values: 4 operations per pair and
    element of all heads, for half of all pairs. In layers with a window or chunk, that is only a
    window for each token; a state takes no pairs at all.
    """
    if shape.params_per_token is None:
        return None
    width = (shape.num_heads or shape.num_kv_heads) * shape.head_dim
    windows = sum(group.span * group.num_layers for group in shape.partial_groups)
    return PrefillRate(
        tokens_per_second=operations_per_second
        / (2 * shape.params_per_token + 4 * windows * width),
        quadratic_seconds_per_token2=2 * shape.num_full_layers * width / operations_per_second,
    )


def with_prefill(rates: GpuRates, tokens_per_second: float) -> GpuRates:
    """Use the given rate for the matrix products; the time of attention stays an estimate."""
    quadratic = rates.prefill.quadratic_seconds_per_token2 if rates.prefill else 0.0
    return replace(rates, prefill=PrefillRate(tokens_per_second, quadratic), prefill_source="given")


def with_probe(rates: GpuRates, probe: Any, kv_bytes_per_token: int) -> GpuRates:
    """Use the disk and remote rates that `penstock probe --json` measured.

    Its memory copies and its estimated prefill are ignored: they are the CPU's, not the GPU's. A
    prefill rate is used only if it was given to the probe for the same model.
    """
    try:
        found = [(str(link["name"]), _link(link)) for link in probe["links"] if link["loads"]]
        prefill = probe["prefill"]
        is_given = prefill["source"] == "given" and prefill["tokens_per_second"]
        is_same = probe["kv_bytes_per_token"] == kv_bytes_per_token
    except (LookupError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            "the probe file has missing or wrong fields: expected the output of "
            "`penstock probe --json`; run it again"
        ) from None
    links = dict(rates.links)
    for kind, tier in (("disk read", Tier.DISK), ("remote get", Tier.REMOTE)):
        fitting = [rate for name, rate in found if name.startswith(kind)]
        if fitting:
            best = max(fitting, key=lambda rate: rate.bytes_per_second)
            links[tier] = KnownLink(best, "measured by penstock probe")
    rates = replace(rates, links=links)
    return (
        with_prefill(rates, float(prefill["tokens_per_second"])) if is_given and is_same else rates
    )


def _link(link: Mapping[str, Any]) -> LinkRate:
    return LinkRate(float(link["bytes_per_second"]), float(link["latency_seconds"]))
