"""Metrics of the tiers: the same for every client."""

from __future__ import annotations

from penstock.codecs.names import is_lossy
from penstock.events import (
    Asked,
    Audited,
    AuditFailed,
    CodecsChosen,
    Damaged,
    Decided,
    Event,
    LookedUp,
    Lost,
    Moved,
    Prefetched,
    Quarantined,
    Recovered,
    Removed,
    Retained,
    TicketDone,
    TierEmptied,
    TierRested,
    TierRevived,
    TierUsage,
)
from penstock.metrics.families import Families
from penstock.types import Direction, Tier, Verdict

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_HOP = ("source", "target", "direction")


class TierMetrics:
    """An observer of the tiers' events."""

    def __init__(self, make: Families) -> None:
        self._blocks = make.counter("penstock_blocks", "Blocks moved.", _HOP)
        self._bytes = make.counter("penstock_bytes", "Bytes moved.", _HOP)
        self._seconds = make.counter(
            "penstock_transfer_seconds", "Total duration of transfers.", _HOP
        )
        self._lost = make.counter(
            "penstock_lost_blocks",
            "Blocks that did not arrive, by verdict.",
            (*_HOP, "verdict"),
        )
        self._corrupt = make.counter(
            "penstock_corrupt_blocks",
            "Blocks, or records of a disk's index, that failed verification.",
            ("tier",),
        )
        self._emptied = make.counter(
            "penstock_tier_losses",
            "Times a tier lost all blocks, for example because its folder was deleted.",
            ("tier",),
        )
        self._dropped = make.counter(
            "penstock_dropped_blocks",
            "Saves dropped by back-pressure or for lack of room.",
            ("tier",),
        )
        self._unfit = make.counter(
            "penstock_unfit_blocks",
            "Blocks not kept because they do not fit the tier's codec.",
            ("tier",),
        )
        self._lossy = make.counter(
            "penstock_lossy_blocks", "Blocks loaded from a tier with a lossy codec.", ("tier",)
        )
        self._lookups = make.counter("penstock_lookups", "Prompts looked up.")
        self._asked = make.counter("penstock_lookup_blocks", "Blocks looked up.")
        self._hits = make.counter("penstock_hit_blocks", "Blocks found, by tier.", ("tier",))
        self._misses = make.counter("penstock_miss_blocks", "Blocks found in no tier.")
        self._questions = make.histogram(
            "penstock_remote_lookup_seconds",
            "Duration of lookups in a shared tier, by result.",
            ("tier", "result"),
            buckets=_SECONDS,
        )
        self._evicted = make.counter(
            "penstock_evicted_blocks", "Idle blocks evicted to make room.", ("tier",)
        )
        self._tickets = make.histogram(
            "penstock_ticket_seconds",
            "Seconds from a load's or save's start to its end.",
            ("direction",),
            buckets=_SECONDS,
        )
        self._used = make.gauge("penstock_used_blocks", "Slots in use.", ("tier",))
        self._slots = make.gauge("penstock_capacity_blocks", "Number of slots.", ("tier",))
        self._used_tokens = make.gauge(
            "penstock_used_tokens", "Tokens whose KV a tier holds.", ("tier",)
        )
        self._capacity_tokens = make.gauge(
            "penstock_capacity_tokens", "Tokens whose KV a tier has room for.", ("tier",)
        )
        self._block_bytes = make.gauge(
            "penstock_block_bytes", "Size of a block, as its tier's codec packs it.", ("tier",)
        )
        self._codec = make.gauge(
            "penstock_tier_codec_info", "1 for the codec that a tier uses.", ("tier", "codec")
        )
        self._leased = make.gauge("penstock_leased_blocks", "Slots leased.", ("tier",))
        self._retained = make.gauge(
            "penstock_retained_blocks", "Blocks in HOST that hints protect from eviction."
        )
        self._max_retained = make.gauge(
            "penstock_retainable_blocks", "Most blocks in HOST that hints may protect."
        )
        self._prefetched = make.counter(
            "penstock_prefetched_blocks",
            "Blocks that hints prefetched to HOST, or that did not arrive.",
            ("result",),
        )
        self._queued = make.gauge(
            "penstock_queued_transfers",
            "Transfers waiting for the link to a tier.",
            ("tier", "direction"),
        )
        self._resting = make.gauge(
            "penstock_tier_resting",
            "1 while a failing tier is left alone.",
            ("tier", "direction"),
        )
        self._faults = make.counter(
            "penstock_tier_rests",
            "Times a failing tier was left unused for a while.",
            ("tier", "direction"),
        )
        self._scanned = make.gauge(
            "penstock_recovered_ratio", "Share of a tier's index read.", ("tier",)
        )
        self._decisions = make.counter(
            "penstock_load_decisions",
            "Matches that were loaded, partly loaded, or computed because that is faster.",
            ("choice",),
        )
        self._saved_seconds = make.counter(
            "penstock_saved_seconds",
            "Seconds that loading was estimated to save over computing.",
        )
        self._audited = make.counter(
            "penstock_audited_requests",
            "Requests whose KV was compared with what is stored, by check.",
            ("check",),
        )
        self._audited_blocks = make.counter(
            "penstock_audited_blocks", "Blocks that audits compared, by check.", ("check",)
        )
        self._audit_failures = make.counter(
            "penstock_audit_failures", "Audits that found wrong KV, by check.", ("check",)
        )
        self._quarantined = make.gauge(
            "penstock_quarantined", "1 if stored KV is not used because an audit failed."
        )

        self._block_tokens = 0  # unknown
        self._lossy_tiers: set[Tier] = set()

        # Create the series that alerts use now: one that begins with its first event shows no
        # increase(), so the first corrupt block would be missed.
        for tier in Tier:
            if tier is not Tier.DEVICE:
                for counter in (self._corrupt, self._emptied, self._dropped, self._hits):
                    counter.labels(tier.label)
                for counter in (self._unfit, self._lossy):
                    counter.labels(tier.label)
                for direction in Direction:
                    self._faults.labels(tier.label, direction.value)
        for choice in ("load", "part", "compute"):
            self._decisions.labels(choice)
        for check in ("computed", "read_back"):
            for counter in (self._audited, self._audited_blocks, self._audit_failures):
                counter.labels(check)

    def __call__(self, event: Event) -> None:
        match event:
            case Moved(source, target, direction, num_blocks, num_bytes, seconds):
                hop = (source.label, target.label, direction.value)
                self._blocks.labels(*hop).inc(num_blocks)
                self._bytes.labels(*hop).inc(num_bytes)
                self._seconds.labels(*hop).inc(seconds)
                if direction is Direction.LOAD and source in self._lossy_tiers:
                    self._lossy.labels(source.label).inc(num_blocks)
            case Lost(source, target, direction, verdict, num_blocks):
                self._lost.labels(source.label, target.label, direction.value, verdict.label).inc(
                    num_blocks
                )
                if verdict is Verdict.CORRUPT:
                    self._corrupt.labels(source.label).inc(num_blocks)
                if verdict is Verdict.DROPPED and direction is Direction.SAVE:
                    self._dropped.labels(target.label).inc(num_blocks)
                if verdict is Verdict.UNFIT:
                    self._unfit.labels(target.label).inc(num_blocks)
            case Damaged(tier, num_blocks):
                self._corrupt.labels(tier.label).inc(num_blocks)
            case TierEmptied(tier):
                self._emptied.labels(tier.label).inc()
            case LookedUp(num_asked, hits):
                self._lookups.inc()
                self._asked.inc(num_asked)
                for tier, count in hits:
                    self._hits.labels(tier.label).inc(count)
                self._misses.inc(num_asked - event.num_hits)
            case Asked(tier=tier, seconds=seconds, error=error):
                self._questions.labels(tier.label, "failed" if error else "ok").observe(seconds)
            case Removed(tier, keys, evicted=True):
                self._evicted.labels(tier.label).inc(len(keys))
            case TicketDone(direction, _, _, seconds):
                self._tickets.labels(direction.value).observe(seconds)
            case TierUsage(tier, num_used, num_slots, num_leased, num_loads, num_saves):
                self._used.labels(tier.label).set(num_used)
                self._slots.labels(tier.label).set(num_slots)
                self._leased.labels(tier.label).set(num_leased)
                self._queued.labels(tier.label, "load").set(num_loads)
                self._queued.labels(tier.label, "save").set(num_saves)
                if self._block_tokens:
                    self._used_tokens.labels(tier.label).set(num_used * self._block_tokens)
                    self._capacity_tokens.labels(tier.label).set(num_slots * self._block_tokens)
            case CodecsChosen(codecs, raw_block_bytes, block_tokens):
                self._block_tokens = block_tokens
                self._lossy_tiers = {each.tier for each in codecs if is_lossy(each.codec)}
                self._block_bytes.labels(Tier.DEVICE.label).set(raw_block_bytes)
                for each in codecs:
                    self._codec.labels(each.tier.label, each.codec).set(1)
                    self._block_bytes.labels(each.tier.label).set(each.block_bytes)
            case Retained(num_blocks, max_blocks):
                self._retained.set(num_blocks)
                self._max_retained.set(max_blocks)
            case Prefetched(num_blocks, num_lost):
                self._prefetched.labels("ok").inc(num_blocks)
                self._prefetched.labels("lost").inc(num_lost)
            case TierRested(tier, direction):
                self._resting.labels(tier.label, direction.value).set(1)
                self._faults.labels(tier.label, direction.value).inc()
            case TierRevived(tier, direction):
                self._resting.labels(tier.label, direction.value).set(0)
            case Recovered(tier, num_scanned, num_slots):
                self._scanned.labels(tier.label).set(num_scanned / max(1, num_slots))
            case Audited(check, num_blocks):
                self._audited.labels(check).inc()
                self._audited_blocks.labels(check).inc(num_blocks)
            case AuditFailed(check):
                self._audit_failures.labels(check).inc()
            case Quarantined():
                self._quarantined.set(1)
            case Decided(load_seconds=load_seconds, compute_seconds=compute_seconds):
                self._decisions.labels(event.choice).inc()
                if event.num_loaded and load_seconds is not None and compute_seconds is not None:
                    self._saved_seconds.inc(max(0.0, compute_seconds - load_seconds))
