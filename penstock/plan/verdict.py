"""Whether to offload, and how: one verdict with its reasons, number by number. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from penstock.plan.fit import DecodeCost, Demand, Fit, Hardware
from penstock.plan.shape import ModelShape
from penstock.types import Tier
from penstock.units import format_bytes, format_seconds

# Of all prompt tokens: below this, what is kept is hardly ever read.
LITTLE_REUSE = 0.05


class Kind(StrEnum):
    DOES_NOT_FIT = "does-not-fit"
    NOT_SUPPORTED = "not-supported"
    DO_NOT_OFFLOAD = "do-not-offload"
    DEVICE_IS_ENOUGH = "device-is-enough"
    FOR_REUSE = "tier-for-reuse"
    NEVER_COLD = "tier-never-cold"
    TAIL_PIN = "tier-with-tail-pin"

    @property
    def tiers(self) -> bool:
        return self in (Kind.FOR_REUSE, Kind.NEVER_COLD, Kind.TAIL_PIN)


TITLES = {
    Kind.DOES_NOT_FIT: "The weights do not fit",
    Kind.NOT_SUPPORTED: "Penstock does not take this model's KV",
    Kind.DO_NOT_OFFLOAD: "Do not offload",
    Kind.DEVICE_IS_ENOUGH: "The GPU's memory is enough",
    Kind.FOR_REUSE: "Tier, for what is read again",
    Kind.NEVER_COLD: "Tier whole sessions, and never decode from DRAM",
    Kind.TAIL_PIN: "Tier with tail-pin: the middle of sessions lies in DRAM, their ends on the GPU",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return TITLES[self.kind]


def unsupported(shape: ModelShape) -> str:
    """Why neither the engine nor the connector takes such a model; empty where they do."""
    if shape.is_mla:
        return "it keeps compressed latents in place of keys and values (MLA)"
    if shape.num_window_layers:
        return (
            f"{shape.num_window_layers} of its {shape.num_layers} layers keep only a sliding "
            f"window of {shape.window_tokens:,} tokens"
        )
    return ""


def judge(
    shape: ModelShape,
    hardware: Hardware,
    demand: Demand,
    found: Fit,
    cost: DecodeCost,
    break_evens: Mapping[Tier, int | None],
    load_seconds: Mapping[Tier, float],
    compute_seconds: float | None,
) -> Verdict:
    """`break_evens` and `compute_seconds` say nothing where prefill's rate is not known."""
    if found.pool_bytes <= 0:
        return Verdict(Kind.DOES_NOT_FIT, (_no_room(hardware, found),))
    if reason := unsupported(shape):
        return Verdict(
            Kind.NOT_SUPPORTED,
            (
                f"{reason}: a prefix could not be restored whole, so the engine and the vLLM "
                "connector refuse it; the figures above are for planning alone",
            ),
        )
    kind, reasons = _choose(demand, found, cost, break_evens, load_seconds, compute_seconds)
    return Verdict(
        kind, tuple(reasons), tuple(_warnings(kind, hardware, demand, found, cost, break_evens))
    )


def _choose(
    demand: Demand,
    found: Fit,
    cost: DecodeCost,
    break_evens: Mapping[Tier, int | None],
    load_seconds: Mapping[Tier, float],
    compute_seconds: float | None,
) -> tuple[Kind, list[str]]:
    context, reuse = demand.context_tokens, demand.reuse_share
    on_device = found.sessions_on_device
    if compute_seconds is not None:
        least = break_evens[Tier.HOST]
        if least is None or context < least:
            needed = "no length" if least is None else f"{least:,} tokens on"
            return Kind.DO_NOT_OFFLOAD, [
                f"short prompts: {context:,} tokens are computed in "
                f"{format_seconds(compute_seconds)}; loading from DRAM is faster from {needed}"
            ]
    if demand.num_sessions <= on_device:
        fits = (
            f"all {demand.num_sessions:,} sessions fit on the GPU, which has room for "
            f"{on_device:,} of {context:,} tokens"
        )
        if reuse is not None and reuse < LITTLE_REUSE:
            return Kind.DO_NOT_OFFLOAD, [
                f"little reuse: {reuse:.1%} of prompt tokens were computed before",
                fits,
            ]
        if reuse is None:
            advice = "say how much prompts repeat (--reuse, --trace) to see if DRAM pays for that"
            return Kind.DEVICE_IS_ENOUGH, [fits, advice]
        if 0 < demand.live_bytes <= found.pool_bytes:
            kept = f"what is read again, {format_bytes(demand.live_bytes)} at the most, fits too"
            return Kind.DEVICE_IS_ENOUGH, [fits, kept]
        reasons = [
            f"{reuse:.0%} of prompt tokens were computed before, and DRAM keeps them when the "
            "GPU's memory has to be used anew",
            *_loads(context, load_seconds, compute_seconds),
        ]
        return Kind.FOR_REUSE, reasons
    kept = (
        f"{demand.num_sessions:,} sessions of {format_bytes(found.session_bytes)} are wanted; the "
        f"GPU's memory holds {on_device:,}, with {format_bytes(found.host_bytes)} of DRAM it is "
        f"{found.sessions_with_host:,}"
    )
    reasons = [kept, *_loads(context, load_seconds, compute_seconds)]
    if demand.num_active <= on_device:
        reasons.append(
            f"the {demand.num_active:,} that decode at once fit on the GPU: nobody need wait for "
            "DRAM within a step"
        )
        return Kind.NEVER_COLD, reasons
    price = (
        f"all {demand.num_active:,} at once read {format_bytes(cost.cold_bytes)} from DRAM for "
        f"every token: {format_seconds(cost.step_seconds)} a token"
    )
    target = demand.max_token_seconds
    if target is not None and cost.step_seconds > target:
        reasons.append(
            f"latency-critical: {price}, and {format_seconds(target)} are wanted; "
            f"{cost.sessions_within_target or 0:,} sessions at once keep that"
        )
        return Kind.NEVER_COLD, reasons
    limit = "" if target is None else f", within the {format_seconds(target)} that are wanted"
    reasons.append(f"long context, lossless: {price}{limit}")
    reasons.append(
        "the beginning that sessions share and the tail that every token is appended to stay on "
        "the GPU; least recently used blocks alone would put the tail in DRAM"
    )
    return Kind.TAIL_PIN, reasons


def _loads(
    context: int, load_seconds: Mapping[Tier, float], compute_seconds: float | None
) -> Iterator[str]:
    computed = "" if compute_seconds is None else f", computed in {format_seconds(compute_seconds)}"
    loaded = format_seconds(load_seconds[Tier.HOST])
    yield f"a session of {context:,} tokens comes back from DRAM in {loaded}{computed}"


def _warnings(
    kind: Kind,
    hardware: Hardware,
    demand: Demand,
    found: Fit,
    cost: DecodeCost,
    break_evens: Mapping[Tier, int | None],
) -> Iterator[str]:
    target, within = demand.max_token_seconds, cost.sessions_within_target
    fitting = min(demand.num_active, found.sessions_on_device)
    if target is not None and within is not None and within < fitting:
        yield (
            f"{within:,} sessions at once keep {format_seconds(target)} a token; more are slower "
            "even with all of their KV on the GPU"
        )
    if kind.tiers and found.host_bytes < found.least_host_bytes:
        yield (
            f"{format_bytes(found.host_bytes)} of DRAM keep {found.sessions_with_host:,} of "
            f"{demand.num_sessions:,} sessions: {format_bytes(found.least_host_bytes)} is the "
            f"least for all, {format_bytes(found.recommended_host_bytes)} is advised"
        )
    if kind is Kind.TAIL_PIN and found.sessions_on_device:
        yield (
            f"all together then decode {cost.tokens_per_second:,.0f} tokens/s, taking turns "
            f"{found.sessions_on_device:,} at a time {cost.whole_tokens_per_second:,.0f}: tail-pin "
            "is for peaks and for sessions that mostly wait; under steady load let them take turns "
            "(--turn-seconds 0.5 --no-cold-kv)"
        )
    if kind is Kind.TAIL_PIN and hardware.num_gpus > 1:
        yield (
            "decoding from DRAM is `penstock serve`'s, on one GPU each; over several GPUs vLLM "
            f"keeps running sessions whole: {found.sessions_on_device:,} run at once, and the "
            "others wait in DRAM"
        )
    if kind.tiers and hardware.disk_bytes and break_evens:
        least = break_evens.get(Tier.DISK)
        if least is None or demand.context_tokens < least:
            longer = "at no length" if least is None else f"from {least:,} tokens on"
            yield (
                f"the disk is faster than computing {longer}: at {demand.context_tokens:,} it "
                "serves restarts, not speed"
            )


def _no_room(hardware: Hardware, found: Fit) -> str:
    num_needed = hardware.num_gpus_needed(found.weight_bytes + found.session_bytes)
    return (
        f"{format_bytes(found.weight_bytes)} of weights leave no room for KV on "
        f"{hardware.num_gpus} x {hardware.gpu.title}: take {num_needed} GPUs, or smaller weights"
    )
