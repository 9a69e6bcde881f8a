"""Prometheus metrics, made from events alone: attach `Metrics` as an observer and expose it.

Ours are named `penstock_*`. Beside them stand the names that operators' dashboards already use
for vLLM and its kin; those are computed from the same counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from penstock.events import (
    Decided,
    Event,
    Finished,
    FirstToken,
    LookedUp,
    Lost,
    Moved,
    Preempted,
    Recovered,
    Refused,
    Removed,
    Sequences,
    TicketDone,
    TierRested,
    TierRevived,
    Usage,
)
from penstock.types import Direction, Tier, Verdict

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LONG_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0)
_HOP = ("source", "target", "direction")


class Metrics:
    """An observer. Use one registry for one process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        r = self.registry
        self._blocks = Counter("penstock_blocks", "Blocks moved.", _HOP, registry=r)
        self._bytes = Counter("penstock_bytes", "Bytes moved.", _HOP, registry=r)
        self._seconds = Counter(
            "penstock_transfer_seconds", "Seconds that transfers ran.", _HOP, registry=r
        )
        self._lost = Counter(
            "penstock_lost_blocks",
            "Blocks that did not arrive, by what became of them.",
            (*_HOP, "verdict"),
            registry=r,
        )
        self._corrupt = Counter(
            "penstock_corrupt_blocks", "Blocks that failed verification.", ("tier",), registry=r
        )
        self._dropped = Counter(
            "penstock_dropped_blocks",
            "Saves refused by back-pressure or for want of room.",
            ("tier",),
            registry=r,
        )
        self._lookups = Counter("penstock_lookups", "Prompts looked up.", registry=r)
        self._asked = Counter("penstock_lookup_blocks", "Blocks looked up.", registry=r)
        self._hits = Counter("penstock_hit_blocks", "Blocks found, by tier.", ("tier",), registry=r)
        self._misses = Counter("penstock_miss_blocks", "Blocks found in no tier.", registry=r)
        self._evicted = Counter(
            "penstock_evicted_blocks", "Idle blocks that made room.", ("tier",), registry=r
        )
        self._tickets = Histogram(
            "penstock_ticket_seconds",
            "Seconds from a load's or save's start to its end.",
            ("direction",),
            buckets=_SECONDS,
            registry=r,
        )
        self._used = Gauge("penstock_used_blocks", "Slots in use.", ("tier",), registry=r)
        self._slots = Gauge("penstock_capacity_blocks", "Slots there are.", ("tier",), registry=r)
        self._leased = Gauge("penstock_leased_blocks", "Slots leased.", ("tier",), registry=r)
        self._queued = Gauge(
            "penstock_queued_transfers",
            "Transfers waiting for the link to a tier.",
            ("tier", "direction"),
            registry=r,
        )
        self._resting = Gauge(
            "penstock_tier_resting", "1 while a failing tier is left alone.", ("tier",), registry=r
        )
        self._faults = Counter(
            "penstock_tier_rests", "Times a failing tier was left alone.", ("tier",), registry=r
        )
        self._scanned = Gauge(
            "penstock_recovered_ratio", "Share of a tier's index read.", ("tier",), registry=r
        )
        self._requests = _Requests(r)
        self._familiar = _Familiar()
        r.register(self._familiar)

    def __call__(self, event: Event) -> None:
        self._familiar.count(event)
        self._requests.count(event)
        match event:
            case Moved(source, target, direction, num_blocks, num_bytes, seconds):
                hop = (source.label, target.label, direction.value)
                self._blocks.labels(*hop).inc(num_blocks)
                self._bytes.labels(*hop).inc(num_bytes)
                self._seconds.labels(*hop).inc(seconds)
            case Lost(source, target, direction, verdict, num_blocks):
                self._lost.labels(source.label, target.label, direction.value, verdict.label).inc(
                    num_blocks
                )
                if verdict is Verdict.CORRUPT:
                    self._corrupt.labels(source.label).inc(num_blocks)
                if verdict is Verdict.DROPPED and direction is Direction.SAVE:
                    self._dropped.labels(target.label).inc(num_blocks)
            case LookedUp(num_asked, hits):
                self._lookups.inc()
                self._asked.inc(num_asked)
                for tier, count in hits:
                    self._hits.labels(tier.label).inc(count)
                self._misses.inc(num_asked - event.num_hits)
            case Removed(tier, keys, evicted=True):
                self._evicted.labels(tier.label).inc(len(keys))
            case TicketDone(direction, _, _, seconds):
                self._tickets.labels(direction.value).observe(seconds)
            case Usage(tier, num_used, num_slots, num_leased, num_loads, num_saves):
                self._used.labels(tier.label).set(num_used)
                self._slots.labels(tier.label).set(num_slots)
                self._leased.labels(tier.label).set(num_leased)
                self._queued.labels(tier.label, "load").set(num_loads)
                self._queued.labels(tier.label, "save").set(num_saves)
            case TierRested(tier):
                self._resting.labels(tier.label).set(1)
                self._faults.labels(tier.label).inc()
            case TierRevived(tier):
                self._resting.labels(tier.label).set(0)
            case Recovered(tier, num_scanned, num_slots):
                self._scanned.labels(tier.label).set(num_scanned / max(1, num_slots))

    def expose(self) -> bytes:
        """The registry in Prometheus's text format."""
        return generate_latest(self.registry)


class _Requests:
    """What the embedded engine tells of its requests."""

    def __init__(self, r: CollectorRegistry) -> None:
        self._decisions = Counter(
            "penstock_load_decisions",
            "Matches that were loaded, loaded in part, or computed because that is faster.",
            ("choice",),
            registry=r,
        )
        self._saved_seconds = Counter(
            "penstock_saved_seconds",
            "Seconds that loading was estimated to save over computing.",
            registry=r,
        )
        self._finished = Counter(
            "penstock_requests", "Sequences that ended, by how.", ("reason",), registry=r
        )
        self._refused = Counter(
            "penstock_refused_requests", "Sequences not accepted, by why.", ("reason",), registry=r
        )
        self._sequences = Gauge(
            "penstock_sequences", "Sequences in the engine, by phase.", ("phase",), registry=r
        )
        self._preemptions = Counter(
            "penstock_preemptions", "Sequences that gave up their blocks.", registry=r
        )
        self._prompt_tokens = Counter(
            "penstock_prompt_tokens",
            "Prompt tokens, by where their KV came from.",
            ("source",),
            registry=r,
        )
        self._output_tokens = Counter("penstock_output_tokens", "Tokens generated.", registry=r)
        self._recomputed = Counter(
            "penstock_recomputed_tokens", "Tokens computed again after preemption.", registry=r
        )
        self._first_token = Histogram(
            "penstock_first_token_seconds",
            "From a request's arrival to its first token, by whether KV was reused.",
            ("prompt",),
            buckets=_LONG_SECONDS,
            registry=r,
        )
        self._token = Histogram(
            "penstock_token_seconds",
            "Mean time between a request's tokens.",
            buckets=_SECONDS,
            registry=r,
        )
        self._request = Histogram(
            "penstock_request_seconds",
            "From a request's arrival to its end.",
            buckets=_LONG_SECONDS,
            registry=r,
        )

    def count(self, event: Event) -> None:
        match event:
            case Decided(load_seconds=load_seconds, compute_seconds=compute_seconds):
                self._decisions.labels(event.choice).inc()
                if event.num_loaded and load_seconds is not None and compute_seconds is not None:
                    self._saved_seconds.inc(max(0.0, compute_seconds - load_seconds))
            case Sequences(num_waiting, num_loading, num_running):
                self._sequences.labels("waiting").set(num_waiting)
                self._sequences.labels("loading").set(num_loading)
                self._sequences.labels("running").set(num_running)
            case Preempted():
                self._preemptions.inc()
            case Refused(reason):
                self._refused.labels(reason).inc()
            case FirstToken(seconds, num_prompt, num_on_device, num_loaded):
                self._prompt_tokens.labels("device").inc(num_on_device)
                self._prompt_tokens.labels("loaded").inc(num_loaded)
                self._prompt_tokens.labels("computed").inc(num_prompt - num_on_device - num_loaded)
                kind = "loaded" if num_loaded else "resident" if num_on_device else "computed"
                self._first_token.labels(kind).observe(seconds)
            case Finished(reason, _, num_output, num_recomputed, _, seconds, _):
                self._finished.labels(reason).inc()
                self._output_tokens.inc(num_output)
                self._recomputed.inc(num_recomputed)
                self._request.observe(seconds)
                if event.token_seconds is not None:
                    self._token.observe(event.token_seconds)


class _Familiar:
    """The names known from vLLM. Exact names, so that rules written for them keep working."""

    def __init__(self) -> None:
        self._num_saves = self._num_loads = 0
        self._saved_bytes = 0
        self._num_asked = self._num_hits = 0
        self._usage = {Tier.DEVICE: 0.0, Tier.HOST: 0.0}

    def count(self, event: Event) -> None:
        match event:
            case Moved(Tier.DEVICE, Tier.HOST, _, num_blocks, num_bytes, _):
                self._num_saves += num_blocks
                self._saved_bytes += num_bytes
            case Moved(Tier.HOST, Tier.DEVICE, _, num_blocks, _, _):
                self._num_loads += num_blocks
            case LookedUp(num_asked):
                self._num_asked += num_asked
                self._num_hits += event.num_hits
            case Usage(tier, num_used, num_slots) if tier in self._usage:
                self._usage[tier] = num_used / max(1, num_slots)

    def collect(self) -> Iterator[Metric]:
        hit_rate = self._num_hits / self._num_asked if self._num_asked else 0.0
        for name, kind, value, text in (
            ("kv_offload_total", "counter", self._num_saves, "Blocks saved off the device."),
            ("kv_offload_bytes", "unknown", self._saved_bytes, "Bytes saved off the device."),
            ("kv_reload_total", "counter", self._num_loads, "Blocks loaded to the device."),
            ("kv_cache_hit_rate", "gauge", hit_rate, "Share of looked-up blocks found."),
            ("gpu_cache_usage_perc", "gauge", self._usage[Tier.DEVICE], "Device pool in use, 0-1."),
            ("cpu_cache_usage_perc", "gauge", self._usage[Tier.HOST], "HOST in use, 0 to 1."),
        ):
            metric = Metric(name.removesuffix("_total"), text, kind)
            metric.add_sample(name, {}, float(value))
            yield metric
