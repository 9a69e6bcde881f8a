"""Prometheus metrics, made from events alone: attach `Metrics` as an observer and expose it.

Ours are named `penstock_*`. Beside them stand the names that operators' dashboards already use
for vLLM and its kin; those are computed from the same counts.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from penstock.events import (
    Event,
    LookedUp,
    Lost,
    Moved,
    Recovered,
    Removed,
    TicketDone,
    TierRested,
    TierRevived,
    Usage,
)
from penstock.metrics.familiar import FamiliarNames
from penstock.metrics.requests import RequestMetrics
from penstock.types import Direction, Verdict

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
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
        self._requests = RequestMetrics(r)
        self._familiar = FamiliarNames()
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
