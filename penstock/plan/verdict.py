"""Whether to offload, and how: one verdict with its reasons, number by number. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.plan.fit import Demand, Fit, Hardware
from penstock.plan.ways import Mode, Way, target_of
from penstock.shapes.shape import ModelShape
from penstock.types import Tier
from penstock.units import format_bytes, format_seconds

# Of all prompt tokens: below this, what is kept is hardly ever read.
LITTLE_REUSE = 0.05


class Kind(StrEnum):
    DOES_NOT_FIT = "does-not-fit"
    NOT_SUPPORTED = "not-supported"
    CONTEXT_TOO_LONG = "context-too-long"
    DO_NOT_OFFLOAD = "do-not-offload"
    DEVICE_IS_ENOUGH = "device-is-enough"
    FOR_REUSE = "tier-for-reuse"
    NEVER_COLD = "tier-never-cold"
    TURNS = "tier-in-turns"
    TAIL_PIN = "tier-with-tail-pin"

    @property
    def tiers(self) -> bool:
        return self in (Kind.FOR_REUSE, Kind.NEVER_COLD, Kind.TURNS, Kind.TAIL_PIN)

    @property
    def runs(self) -> bool:
        """Whether there is anything to run, and settings to paste."""
        return self not in (Kind.DOES_NOT_FIT, Kind.NOT_SUPPORTED, Kind.CONTEXT_TOO_LONG)


TITLES = {
    Kind.DOES_NOT_FIT: "It does not fit on these GPUs",
    Kind.NOT_SUPPORTED: "Penstock does not take this model's KV",
    Kind.CONTEXT_TOO_LONG: "The model does not take so long a context",
    Kind.DO_NOT_OFFLOAD: "Do not offload",
    Kind.DEVICE_IS_ENOUGH: "The GPU's memory is enough",
    Kind.FOR_REUSE: "Tier, for what is read again",
    Kind.NEVER_COLD: "Tier whole sessions: those that decode are on the GPU, the others in DRAM",
    Kind.TURNS: "Tier whole sessions, and let them take turns on the GPU",
    Kind.TAIL_PIN: "Tier with tail-pin: the middle of sessions lies in DRAM, their ends on the GPU",
}


@dataclass(frozen=True, slots=True)
class PlanVerdict:
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
    ways: Sequence[Way],
    found: Fit,
    break_evens: Mapping[Tier, int | None],
    load_seconds: Mapping[Tier, float],
    compute_seconds: float | None,
) -> PlanVerdict:
    """`ways` with the best first, and `found` of all servers in that one's layout.

    `break_evens` and `compute_seconds` say nothing where prefill's rate is not known.
    """
    if not ways:
        return PlanVerdict(Kind.DOES_NOT_FIT, (_no_room(shape, hardware, found),))
    if reason := unsupported(shape):
        return PlanVerdict(
            Kind.NOT_SUPPORTED,
            (
                f"{reason}: a prefix could not be restored whole, so the engine and the vLLM "
                "connector refuse it; the figures above are for planning alone",
            ),
        )
    limit = shape.max_context_tokens
    if limit is not None and demand.context_tokens > limit:
        return PlanVerdict(Kind.CONTEXT_TOO_LONG, (_beyond_the_model(demand, limit),))
    best = ways[0]
    if not best.can_run:
        return PlanVerdict(Kind.DOES_NOT_FIT, (_no_session(shape, hardware, found, best),))
    kind, reasons = _choose(demand, found, best, break_evens, load_seconds, compute_seconds)
    reasons.insert(0, _headline(demand, best))
    return PlanVerdict(
        kind, tuple(reasons), tuple(_warnings(kind, hardware, demand, found, ways, break_evens))
    )


def _headline(demand: Demand, best: Way) -> str:
    pace = f"a token every {format_seconds(best.token_seconds)}"
    if demand.num_active == 1:
        return f"the one session that decodes gets {pace}"
    many = f"all {demand.num_active:,}"
    if best.num_running < demand.num_active:
        many = f"{best.num_running:,} of {demand.num_active:,}"
    together = f"{format_count(best.tokens_per_second)} tokens/s in all"
    return f"{many} that decode do so at once, each with {pace}: {together}"


def format_count(value: float) -> str:
    """Of tokens per second: small ones with their fraction."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _sessions(num: int) -> str:
    return f"{num:,} session{'' if num == 1 else 's'}"


def _choose(
    demand: Demand,
    found: Fit,
    best: Way,
    break_evens: Mapping[Tier, int | None],
    load_seconds: Mapping[Tier, float],
    compute_seconds: float | None,
) -> tuple[Kind, list[str]]:
    context, reuse = demand.context_tokens, demand.reuse_share
    on_device = found.sessions_on_device
    if best.mode is Mode.COLD:
        return Kind.TAIL_PIN, _tail_pin(demand, found, best)
    if compute_seconds is not None:
        least = break_evens[Tier.HOST]
        if least is None or context < least:
            needed = "at no length" if least is None else f"from {least:,} tokens on"
            return Kind.DO_NOT_OFFLOAD, [
                f"short prompts: {context:,} tokens are computed in "
                f"{format_seconds(compute_seconds)}; loading from DRAM is faster {needed}"
            ]
    if demand.num_sessions <= on_device:
        fits = (
            f"all {_sessions(demand.num_sessions)} fit on the GPU, which has room for "
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
        if 0 < found.live_bytes <= found.pool_bytes:
            kept = f"what is read again, {format_bytes(found.live_bytes)} at the most, fits too"
            return Kind.DEVICE_IS_ENOUGH, [fits, kept]
        reasons = [
            f"{reuse:.0%} of prompt tokens were computed before, and DRAM keeps them when the "
            "GPU's memory has to be used anew",
            *_loads(context, load_seconds, compute_seconds),
        ]
        return Kind.FOR_REUSE, reasons
    kept = (
        f"{_sessions(demand.num_sessions)} of {format_bytes(found.session_bytes)} are wanted; the "
        f"GPU's memory holds {on_device:,}, with {format_bytes(found.host_bytes)} of DRAM it is "
        f"{found.sessions_with_host:,}"
    )
    reasons = [kept, *_loads(context, load_seconds, compute_seconds)]
    if best.mode is Mode.WHOLE:
        reasons.append("all that decode at once fit on the GPU: no token waits for DRAM")
        return Kind.NEVER_COLD, reasons
    reasons.append(
        f"more decode at once than {_why_fewer(demand, best)}: the others wait in DRAM for their "
        f"turn, so that each session gets {_pace(best)} over time"
    )
    return Kind.TURNS, reasons


def _why_fewer(demand: Demand, best: Way) -> str:
    if best.seats_each < best.found.sessions_on_device:
        return f"can within {format_seconds(target_of(demand))} a token"
    return "fit on the GPU"


def _pace(way: Way) -> str:
    return f"{format_count(way.session_tokens_per_second)} tokens/s"


def _tail_pin(demand: Demand, found: Fit, best: Way) -> list[str]:
    cold = format_bytes(best.cold_bytes * best.layout.num_servers)
    reasons = [
        f"every token reads {cold} of KV from DRAM, exactly as it would on the GPU: "
        f"{format_seconds(best.token_seconds)} a token",
        "the beginning that sessions share and the tail that every token is appended to stay on "
        "the GPU; least recently used blocks alone would put the tail in DRAM",
    ]
    if not found.sessions_on_device:
        alone = format_bytes(found.pool_bytes // best.layout.num_servers)
        reasons.insert(
            0,
            f"one session of {format_bytes(found.session_bytes)} is larger than the {alone} that "
            "one GPU has for KV: it runs in no other way",
        )
    return reasons


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
    ways: Sequence[Way],
    break_evens: Mapping[Tier, int | None],
) -> Iterator[str]:
    best, target = ways[0], target_of(demand)
    if not best.keeps_target:
        whose = "was asked for" if demand.max_token_seconds else "is assumed to be acceptable"
        yield (
            f"no way that can run keeps the {format_seconds(target)} a token that {whose}: the "
            f"best takes {format_seconds(best.token_seconds)}; take shorter contexts, more GPUs or "
            "a faster one"
        )
    if kind.tiers and found.host_bytes < found.least_host_bytes:
        yield (
            f"{format_bytes(found.host_bytes)} of DRAM keep {found.sessions_with_host:,} of "
            f"{_sessions(demand.num_sessions)}: {format_bytes(found.least_host_bytes)} is the "
            f"least for all, {format_bytes(found.recommended_host_bytes)} is advised"
        )
    if best.layout.num_gpus < hardware.num_gpus:
        yield (
            f"{best.layout.num_gpus:,} of {hardware.num_gpus:,} GPUs are used: the others would "
            "add nothing for this load, or the model's heads cannot be split so"
        )
    if kind.tiers and hardware.disk_bytes and break_evens:
        least = break_evens.get(Tier.DISK)
        if least is None or demand.context_tokens < least:
            longer = "at no length" if least is None else f"from {least:,} tokens on"
            yield (
                f"the disk is faster than computing {longer}: at {demand.context_tokens:,} it "
                "serves restarts, not speed"
            )


def _beyond_the_model(demand: Demand, limit: int) -> str:
    return (
        f"{demand.context_tokens:,} tokens are more than the {limit:,} of the model's own config "
        f"(max_position_embeddings), and engines refuse them: plan with --context {limit}, choose "
        "a model for longer contexts, or give the config.json of one whose rope_scaling reaches "
        "so far"
    )


def _no_room(shape: ModelShape, hardware: Hardware, found: Fit) -> str:
    return (
        f"{format_bytes(found.weight_bytes)} of weights leave no room for KV on "
        f"{hardware.num_gpus} x {hardware.gpu.title}: {_take(shape, hardware, found)}"
    )


def _no_session(shape: ModelShape, hardware: Hardware, found: Fit, best: Way) -> str:
    return f"{best.obstacle}: {_take(shape, hardware, found)}, more DRAM, or shorter contexts"


def _take(shape: ModelShape, hardware: Hardware, found: Fit) -> str:
    one = found.weight_bytes + found.session_bytes
    if (needed := hardware.num_gpus_needed(shape, one)) is None:
        return "take larger GPUs, or smaller weights"
    return f"take {needed} GPUs, or smaller weights"
