"""A summary of a server's metrics, for the dashboard, the terminal and scripts.

Pure: samples in, plain numbers out. Rates cover the last seconds, shares and quantiles the last
minutes, totals the time since the server's start. None means that there is no data.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from penstock.watch.advice import (
    Urgency,
    block_bytes,
    hit_rate,
    reused_share,
    tokens_of_steps,
)
from penstock.watch.adviser import advise
from penstock.watch.history import History, SampleSpan
from penstock.watch.quantiles import quantile
from penstock.watch.samples import Samples

TIERS = ("device", "host", "disk", "remote")


@dataclass(frozen=True, slots=True)
class TierView:
    name: str
    used_blocks: float
    capacity_blocks: float
    used_bytes: float | None
    capacity_bytes: float | None
    leased_blocks: float
    hit_share: float | None  # of the blocks looked up below the device
    queued_loads: float
    queued_saves: float
    resting: tuple[str, ...]  # directions that are not used for a while, because they failed
    recovered_share: float | None  # of its index, after a restart
    used_tokens: float | None = None
    capacity_tokens: float | None = None
    codec: str | None = None  # how it packs KV; None: unknown, or the device
    unfit_blocks: float = 0.0  # not kept, because they do not fit the codec
    lossy_blocks: float = 0.0  # loaded from it, if its codec is lossy


@dataclass(frozen=True, slots=True)
class FlowView:
    source: str
    target: str
    direction: str
    bytes_per_second: float
    total_bytes: float


@dataclass(frozen=True, slots=True)
class Spread:
    count: float
    p50: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class AdviceView:
    urgency: str
    topic: str
    finding: str
    change: str


@dataclass(frozen=True, slots=True)
class View:
    recent_seconds: float  # the length of "the last minutes"
    is_since_start: bool  # then "recent" means since the server's start
    tiers: tuple[TierView, ...]
    flows: tuple[FlowView, ...]
    hit_rate: float | None
    hit_rate_since_start: float | None
    prompt_tokens: dict[str, float]  # recent, by where their KV came from
    prompt_tokens_since_start: dict[str, float]
    reused_share: float | None  # of recent prompt tokens, found on the device or loaded
    reused_share_since_start: float | None
    tokens_saved: float  # prompt tokens not computed, since the start
    # Estimated, since the start, by loading. Does not include blocks found on the device.
    seconds_saved: float
    first_token_seconds: dict[str, Spread]
    step_seconds: Spread
    token_seconds: Spread
    tokens_per_second: float | None  # computed, for prompts and answers
    sequences: dict[str, float]
    preemptions: float
    recent_preemptions: float
    cold_reads_per_token: float | None
    resident_share: dict[str, float]
    decisions: dict[str, float]  # recent
    requests: dict[str, float]
    refused: dict[str, float]
    corrupt_blocks: dict[str, float]
    dropped_blocks: dict[str, float]
    lost_blocks: dict[str, float]  # by verdict
    lost_loads: dict[str, float]  # those of loads
    lost_saves: dict[str, float]
    retained_blocks: float
    retainable_blocks: float
    lossy_requests: float
    advice: tuple[AdviceView, ...]

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def make_view(history: History, *, since_start: bool = False) -> View:
    """`since_start`: use all data since the server's start instead of the last minutes."""
    now = history.latest or Samples({})
    late, recent = history.rate_span(), history.recent_span()
    if since_start:
        recent = SampleSpan(recent.seconds, now)
    return View(
        recent_seconds=recent.seconds,
        is_since_start=since_start,
        tiers=tuple(_tiers(now, recent.seen)),
        flows=tuple(_flows(now, late)),
        hit_rate=hit_rate(recent.seen),
        hit_rate_since_start=hit_rate(now),
        prompt_tokens=recent.seen.by("penstock_prompt_tokens_total", "source"),
        prompt_tokens_since_start=now.by("penstock_prompt_tokens_total", "source"),
        reused_share=reused_share(recent.seen),
        reused_share_since_start=reused_share(now),
        tokens_saved=now.total("penstock_prompt_tokens_total")
        - now.total("penstock_prompt_tokens_total", source="computed"),
        seconds_saved=now.total("penstock_saved_seconds_total"),
        first_token_seconds={
            kind: _spread(recent.seen, "penstock_first_token_seconds", prompt=kind)
            for kind in now.by("penstock_first_token_seconds_count", "prompt")
        },
        step_seconds=_spread(recent.seen, "penstock_step_seconds"),
        token_seconds=_spread(recent.seen, "penstock_token_seconds"),
        tokens_per_second=_per_second(late, "penstock_step_tokens_total"),
        sequences=now.by("penstock_sequences", "phase"),
        preemptions=now.total("penstock_preemptions_total"),
        recent_preemptions=recent.seen.total("penstock_preemptions_total"),
        cold_reads_per_token=_cold_reads(recent.seen),
        resident_share=now.by("penstock_resident_share", "of"),
        decisions=_some(recent.seen.by("penstock_load_decisions_total", "choice")),
        requests=now.by("penstock_requests_total", "reason"),
        refused=_some(now.by("penstock_refused_requests_total", "reason")),
        corrupt_blocks=_some(now.by("penstock_corrupt_blocks_total", "tier")),
        dropped_blocks=_some(now.by("penstock_dropped_blocks_total", "tier")),
        lost_blocks=_some(now.by("penstock_lost_blocks_total", "verdict")),
        lost_loads=_lost(now, "load"),
        lost_saves=_lost(now, "save"),
        retained_blocks=now.total("penstock_retained_blocks"),
        retainable_blocks=now.total("penstock_retainable_blocks"),
        lossy_requests=now.total("penstock_lossy_requests_total"),
        advice=tuple(_advice(recent.seen)),
    )


def _tiers(now: Samples, recent: Samples) -> list[TierView]:
    asked = recent.total("penstock_lookup_blocks_total")
    capacities = now.by("penstock_capacity_blocks", "tier")
    recovered = now.by("penstock_recovered_ratio", "tier")
    used_tokens = now.by("penstock_used_tokens", "tier")
    capacity_tokens = now.by("penstock_capacity_tokens", "tier")
    moved = (now.by("penstock_bytes_total", "source"), now.by("penstock_bytes_total", "target"))
    found = []
    for name in TIERS:
        if not (name in capacities or any(name in ends for ends in moved)):
            continue
        used, capacity = now.total("penstock_used_blocks", tier=name), capacities.get(name, 0.0)
        # The blocks of vLLM's pool have another size.
        is_ours = name != "device" or now.total("penstock_step_seconds_count")
        bytes_each = block_bytes(now, name) if is_ours else None
        codecs = now.by("penstock_tier_codec_info", "codec", tier=name)
        resting = now.by("penstock_tier_resting", "direction", tier=name)
        found.append(
            TierView(
                name,
                used,
                capacity,
                None if bytes_each is None else used * bytes_each,
                None if bytes_each is None else capacity * bytes_each,
                now.total("penstock_leased_blocks", tier=name),
                recent.total("penstock_hit_blocks_total", tier=name) / asked if asked else None,
                now.total("penstock_queued_transfers", tier=name, direction="load"),
                now.total("penstock_queued_transfers", tier=name, direction="save"),
                tuple(direction for direction, is_so in resting.items() if is_so),
                recovered.get(name),
                used_tokens.get(name),
                capacity_tokens.get(name),
                next((codec for codec, is_so in codecs.items() if is_so), None),
                now.total("penstock_unfit_blocks_total", tier=name),
                now.total("penstock_lossy_blocks_total", tier=name),
            )
        )
    return found


def _flows(now: Samples, late: SampleSpan) -> list[FlowView]:
    found = []
    for source in TIERS:
        for target in TIERS:
            hop = {"source": source, "target": target}
            for direction, total in now.by("penstock_bytes_total", "direction", **hop).items():
                moved = late.seen.total("penstock_bytes_total", direction=direction, **hop)
                rate = moved / late.seconds if late.seconds else 0.0
                if total:
                    found.append(FlowView(source, target, direction, rate, total))
    return found


def _spread(seen: Samples, name: str, **labels: str) -> Spread:
    return Spread(
        seen.total(f"{name}_count", **labels),
        quantile(seen, name, 0.5, **labels),
        quantile(seen, name, 0.99, **labels),
    )


def _advice(recent: Samples) -> list[AdviceView]:
    return [
        AdviceView(advice.urgency, advice.topic, advice.finding, advice.change)
        for advice in advise(recent)
        # Advice without numbers only says that there is too little data.
        if advice.urgency is not Urgency.WELL and advice.numbers
    ]


def _per_second(span: SampleSpan, name: str) -> float | None:
    return span.seen.total(name) / span.seconds if span.seconds else None


def _cold_reads(seen: Samples) -> float | None:
    """None, not 0, if they are not counted."""
    name = "penstock_cold_blocks_read_total"
    num_tokens = tokens_of_steps(seen)
    is_counted = any(has == name for has, _ in seen.values)
    return seen.total(name) / num_tokens if num_tokens and is_counted else None


def _lost(seen: Samples, direction: str) -> dict[str, float]:
    return _some(seen.by("penstock_lost_blocks_total", "verdict", direction=direction))


def _some(counts: dict[str, float]) -> dict[str, float]:
    """The counts that are not 0."""
    return {name: count for name, count in counts.items() if count}
