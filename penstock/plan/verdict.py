"""Whether to offload, and how: one verdict with its reasons. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.plan.fit import Demand, Fit, Hardware
from penstock.plan.ways import Mode, Way, target_of
from penstock.shapes.shape import ModelShape
from penstock.types import Tier
from penstock.units import counted, format_bytes, format_seconds

# Share of prompt tokens. Below it, cached KV is hardly ever read again.
LITTLE_REUSE = 0.05


class PlanKind(StrEnum):
    DOES_NOT_FIT = "does-not-fit"
    CONTEXT_TOO_LONG = "context-too-long"
    DO_NOT_OFFLOAD = "do-not-offload"
    DEVICE_IS_ENOUGH = "device-is-enough"
    FOR_REUSE = "tier-for-reuse"
    NEVER_COLD = "tier-never-cold"
    TURNS = "tier-in-turns"
    TAIL_PIN = "tier-with-tail-pin"

    @property
    def tiers(self) -> bool:
        return self in (
            PlanKind.FOR_REUSE,
            PlanKind.NEVER_COLD,
            PlanKind.TURNS,
            PlanKind.TAIL_PIN,
        )

    @property
    def runs(self) -> bool:
        """Whether the plan can run, so that there are settings for it."""
        return self not in (PlanKind.DOES_NOT_FIT, PlanKind.CONTEXT_TOO_LONG)


TITLES = {
    PlanKind.DOES_NOT_FIT: "It does not fit on these GPUs",
    PlanKind.CONTEXT_TOO_LONG: "The context is longer than the model allows",
    PlanKind.DO_NOT_OFFLOAD: "Do not offload",
    PlanKind.DEVICE_IS_ENOUGH: "The GPU's memory is enough",
    PlanKind.FOR_REUSE: "Offload for reuse: DRAM keeps prompts that come again",
    PlanKind.NEVER_COLD: "Offload whole sessions: active ones on the GPU, idle ones in DRAM",
    PlanKind.TURNS: "Offload whole sessions: they take turns on the GPU",
    PlanKind.TAIL_PIN: (
        "Offload with tail-pin: the middle of each session in DRAM, its ends on the GPU"
    ),
}


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    kind: PlanKind
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return TITLES[self.kind]


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
    """Choose a verdict. `ways` has the best first; `found` covers all servers of its layout.

    If the prefill rate is unknown, `break_evens` is empty and `compute_seconds` is None.
    """
    if not ways:
        return PlanVerdict(PlanKind.DOES_NOT_FIT, (_no_room(shape, hardware, found),))
    limit = shape.max_context_tokens
    if limit is not None and demand.context_tokens > limit:
        return PlanVerdict(PlanKind.CONTEXT_TOO_LONG, (_beyond_the_model(demand, limit),))
    best = ways[0]
    if not best.can_run:
        return PlanVerdict(PlanKind.DOES_NOT_FIT, (_no_session(shape, hardware, found, best),))
    kind, reasons = _choose(demand, found, best, break_evens, load_seconds, compute_seconds)
    reasons.insert(0, _headline(demand, best))
    return PlanVerdict(
        kind, tuple(reasons), tuple(_warnings(kind, hardware, demand, found, ways, break_evens))
    )


def _headline(demand: Demand, best: Way) -> str:
    pace = f"a token every {format_seconds(best.token_seconds)}"
    if demand.num_active == 1:
        return f"The one active session gets {pace}."
    many = f"All {demand.num_active:,}"
    if best.num_running < demand.num_active:
        many = f"{best.num_running:,} of {demand.num_active:,}"
    total = f"{format_count(best.tokens_per_second)} tokens/s in total"
    return f"{many} active sessions decode at once. Each gets {pace}: {total}."


def format_count(value: float) -> str:
    """Tokens per second; small numbers keep their fraction."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _choose(
    demand: Demand,
    found: Fit,
    best: Way,
    break_evens: Mapping[Tier, int | None],
    load_seconds: Mapping[Tier, float],
    compute_seconds: float | None,
) -> tuple[PlanKind, list[str]]:
    context, reuse = demand.context_tokens, demand.reuse_share
    on_device = found.sessions_on_device
    if best.mode is Mode.COLD:
        return PlanKind.TAIL_PIN, _tail_pin(demand, found, best)
    if compute_seconds is not None:
        least = break_evens[Tier.HOST]
        if least is None or context < least:
            faster = "never faster" if least is None else f"faster only from {least:,} tokens"
            return PlanKind.DO_NOT_OFFLOAD, [
                f"Prompts are short: computing {context:,} tokens takes "
                f"{format_seconds(compute_seconds)}. Loading from DRAM is {faster}."
            ]
    if demand.num_sessions <= on_device:
        fits = "The session fits" if demand.num_sessions == 1 else "All sessions fit"
        fits += (
            f" on the GPU, which has room for {counted(on_device, 'session')} of {context:,} "
            "tokens."
        )
        if reuse is not None and reuse < LITTLE_REUSE:
            return PlanKind.DO_NOT_OFFLOAD, [
                f"Little reuse: {reuse:.1%} of prompt tokens were computed before.",
                fits,
            ]
        if reuse is None:
            advice = "To see whether DRAM helps reuse, give --reuse or --trace."
            return PlanKind.DEVICE_IS_ENOUGH, [fits, advice]
        if 0 < found.live_bytes <= found.pool_bytes:
            kept = f"KV that is read again, at most {format_bytes(found.live_bytes)}, fits too."
            return PlanKind.DEVICE_IS_ENOUGH, [fits, kept]
        reasons = [
            f"{reuse:.0%} of prompt tokens were computed before. DRAM keeps them when the GPU "
            "needs its memory for other sessions.",
            *_loads(context, load_seconds, compute_seconds),
        ]
        return PlanKind.FOR_REUSE, reasons
    kept = (
        f"The plan is for {counted(demand.num_sessions, 'session')} of "
        f"{format_bytes(found.session_bytes)}. The GPU's memory holds {on_device:,}; with "
        f"{format_bytes(found.host_bytes)} of DRAM, {found.sessions_with_host:,} fit."
    )
    reasons = [kept, *_loads(context, load_seconds, compute_seconds)]
    if best.mode is Mode.WHOLE:
        reasons.append("All active sessions fit on the GPU: no token waits for DRAM.")
        return PlanKind.NEVER_COLD, reasons
    reasons.append(
        f"{_why_turns(demand, best)}, so sessions wait in DRAM for their turn. On average, each "
        f"active session gets {format_count(best.session_tokens_per_second)} tokens/s."
    )
    return PlanKind.TURNS, reasons


def _why_turns(demand: Demand, best: Way) -> str:
    if best.seats_each < best.found.sessions_on_device:
        target = format_seconds(target_of(demand))
        return f"If all active sessions decoded at once, a token would take more than {target}"
    return "Not all active sessions fit on the GPU"


def _tail_pin(demand: Demand, found: Fit, best: Way) -> list[str]:
    cold = format_bytes(best.cold_bytes * best.layout.num_servers)
    reasons = [
        f"Every step reads {cold} of KV from DRAM, with the same result as on the GPU: "
        f"{format_seconds(best.token_seconds)} per token.",
        "The shared prefix and the tail, where new tokens are appended, stay on the GPU. Plain LRU "
        "would move the tail to DRAM.",
    ]
    if not found.sessions_on_device:
        alone = format_bytes(found.pool_bytes // best.layout.num_servers)
        reasons.insert(
            0,
            f"One session of {format_bytes(found.session_bytes)} is larger than the {alone} that "
            "one GPU has for KV: there is no other way to run it.",
        )
    return reasons


def _loads(
    context: int, load_seconds: Mapping[Tier, float], compute_seconds: float | None
) -> Iterator[str]:
    loaded = format_seconds(load_seconds[Tier.HOST])
    computed = ""
    if compute_seconds is not None:
        computed = f"; computing it takes {format_seconds(compute_seconds)}"
    yield f"Loading a session of {context:,} tokens from DRAM takes {loaded}{computed}."


def _warnings(
    kind: PlanKind,
    hardware: Hardware,
    demand: Demand,
    found: Fit,
    ways: Sequence[Way],
    break_evens: Mapping[Tier, int | None],
) -> Iterator[str]:
    best, target = ways[0], target_of(demand)
    if not best.keeps_target:
        whose = "requested" if demand.max_token_seconds else "assumed"
        yield (
            f"The {whose} limit of {format_seconds(target)} per token cannot be met: the best way "
            f"takes {format_seconds(best.token_seconds)}. Use shorter contexts, more GPUs or "
            "faster ones."
        )
    if kind.tiers and found.host_bytes < found.least_host_bytes:
        yield (
            f"With {format_bytes(found.host_bytes)} of DRAM, only {found.sessions_with_host:,} of "
            f"{counted(demand.num_sessions, 'session')} fit. All of them need at least "
            f"{format_bytes(found.least_host_bytes)}; "
            f"{format_bytes(found.recommended_host_bytes)} is recommended."
        )
    if best.layout.num_gpus < hardware.num_gpus:
        yield (
            f"Only {best.layout.num_gpus:,} of {hardware.num_gpus:,} GPUs are used: more would "
            "not help this load, or the model's heads cannot be split over them."
        )
    if kind.tiers and hardware.disk_bytes and break_evens:
        least = break_evens.get(Tier.DISK)
        if least is None or demand.context_tokens < least:
            faster = "never" if least is None else f"only from {least:,} tokens"
            yield (
                f"The disk is faster than computing {faster}. At {demand.context_tokens:,} tokens "
                "it helps after a restart, but does not save time."
            )


def _beyond_the_model(demand: Demand, limit: int) -> str:
    return (
        f"{demand.context_tokens:,} tokens are more than the {limit:,} in the model's config "
        f"(max_position_embeddings), so engines refuse them. Plan with --context {limit}, choose a "
        "model with a longer context, or give a config.json whose rope_scaling reaches that length."
    )


def _no_room(shape: ModelShape, hardware: Hardware, found: Fit) -> str:
    return (
        f"{format_bytes(found.weight_bytes)} of weights leave no room for KV on "
        f"{hardware.num_gpus} x {hardware.gpu.title}. {_use(shape, hardware, found)}, or smaller "
        "weights."
    )


def _no_session(shape: ModelShape, hardware: Hardware, found: Fit, best: Way) -> str:
    use = _use(shape, hardware, found)
    return f"{best.obstacle}. {use}, smaller weights, more DRAM, or shorter contexts."


def _use(shape: ModelShape, hardware: Hardware, found: Fit) -> str:
    one = found.weight_bytes + found.session_bytes
    if (needed := hardware.num_gpus_needed(shape, one)) is None:
        return "Use larger GPUs"
    return f"Use {needed} GPUs"
