"""Advice on the tiers, of any host: what is found, what moves, what is lost. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.units import format_bytes, format_rate, format_seconds
from penstock.watch.advice import MANY, MIN_LOOKUPS, Advice, Rule, Urgency, block_bytes, hit_rate
from penstock.watch.samples import Samples

_FULL = 0.95  # of a tier's slots
_LOW_HITS = 0.3
_LOOKUP_SECONDS = 0.1  # of the 0.25 that a request waits by default


def _corruption(seen: Samples) -> Iterator[Advice]:
    changes = {
        "disk": "run `penstock store check` on its folder; if it goes on, replace the disk",
        "remote": "run `penstock store check` on its URL, and see who else writes there",
        "host": "test the machine's memory; until then set host.verify=true, which vLLM does not "
        "have",
    }
    for tier, count in seen.by("penstock_corrupt_blocks_total", "tier").items():
        if count:
            yield Advice(
                Urgency.ACT,
                "corruption",
                f"{count:,.0f} blocks from {tier} failed verification, and were computed again",
                changes.get(tier, "see the log for where they came from"),
                (("corrupt_blocks", count),),
            )


def _health(seen: Samples) -> Iterator[Advice]:
    for tier in seen.by("penstock_tier_resting", "tier"):
        for direction in ("load", "save"):
            is_resting = seen.total("penstock_tier_resting", tier=tier, direction=direction)
            rests = seen.total("penstock_tier_rests_total", tier=tier, direction=direction)
            numbers = (("rests", rests),)
            if is_resting:
                yield Advice(
                    Urgency.ACT,
                    "health",
                    f"{tier} fails to {direction} and is left alone; rests so far: {rests:,.0f}",
                    "see the log for its own error; what lies there is computed until it answers",
                    numbers,
                )
            elif rests:
                yield Advice(
                    Urgency.CONSIDER,
                    "health",
                    f"{tier} failed to {direction} so often that it was left alone {rests:,.0f} "
                    "times; now it answers",
                    "see the log for its own error",
                    numbers,
                )


def _dropped_saves(seen: Samples) -> Iterator[Advice]:
    changes = {
        "host": "DRAM had no room or the link no time: raise host.size, or "
        "transfer.max_pending_save_bytes",
        "disk": "blocks come faster than the disk writes: more disk.threads, a faster disk, or a "
        "higher disk.write_per_day",
        "remote": 'blocks come faster than the store takes them: remote.admit="second-use", more '
        "remote.threads, or a higher remote.write_per_day",
    }
    for tier, dropped in seen.by("penstock_dropped_blocks_total", "tier").items():
        saved = seen.total("penstock_blocks_total", target=tier, direction="save")
        share = dropped / (dropped + saved) if dropped else 0.0
        if share > MANY:
            yield Advice(
                Urgency.ACT if share > 0.1 else Urgency.CONSIDER,
                "saves",
                f"{dropped:,.0f} saves to {tier} were dropped, {share:.0%} of them",
                changes.get(tier, "give it more room, or save less"),
                (("dropped_blocks", dropped), ("share", share)),
            )


def _lost_loads(seen: Samples) -> Iterator[Advice]:
    loaded = seen.total("penstock_blocks_total", direction="load")
    changes = {
        "expired": "the tier is slower than transfer.load_deadline_seconds allows: a faster one, "
        "or more threads (disk.threads, remote.threads)",
        "missing": "others remove blocks there: give it room, or set a remote.ttl_seconds",
        "failed": "see the log for the tier's own error",
    }
    for verdict, change in changes.items():
        name = "penstock_lost_blocks_total"
        for source in seen.by(name, "source", direction="load", verdict=verdict):
            lost = seen.total(name, direction="load", verdict=verdict, source=source)
            share = lost / (loaded + lost) if lost else 0.0
            if share > MANY:
                yield Advice(
                    Urgency.CONSIDER,
                    "loads",
                    f"{lost:,.0f} blocks from {source} did not arrive ({verdict}), {share:.1%} of "
                    "all that were to be loaded",
                    change,
                    (("lost_blocks", lost), ("share", share)),
                )


def _hits(seen: Samples) -> Iterator[Advice]:
    lookups, rate = seen.total("penstock_lookups_total"), hit_rate(seen)
    if rate is None or lookups < MIN_LOOKUPS:
        yield Advice(
            Urgency.CONSIDER,
            "hits",
            f"{lookups:,.0f} prompts were looked up: too few to judge hits by",
            "ask again when there has been traffic",
        )
        return
    if rate >= _LOW_HITS:
        yield Advice(
            Urgency.WELL,
            "hits",
            f"{rate:.0%} of blocks looked up were found",
            "",
            (("rate", rate),),
        )
        return
    finding = f"{rate:.0%} of blocks looked up were found"
    scanned = seen.by("penstock_recovered_ratio", "tier")
    reading = [tier for tier, share in scanned.items() if share < 1]
    evicted = seen.total("penstock_evicted_blocks_total", tier="host")
    if reading:
        tier = reading[0]
        change = f"{tier} has read {scanned[tier]:.0%} of its index since the start: wait"
        yield Advice(Urgency.CONSIDER, "hits", finding, change, (("rate", rate),))
    elif evicted:
        yield _too_small(seen, rate, finding, evicted)
    else:
        change = (
            "nothing was evicted from DRAM, so more of it gains nothing: prompts share too little. "
            "Put what changes (dates, names) behind what stays the same; tenants share nothing"
        )
        yield Advice(Urgency.CONSIDER, "hits", finding, change, (("rate", rate),))


def _too_small(seen: Samples, rate: float, finding: str, evicted: float) -> Advice:
    capacity = seen.total("penstock_capacity_blocks", tier="host")
    missed = seen.total("penstock_miss_blocks_total")
    # Nothing would have been evicted with all of these, and no more can be gained than was missed.
    useful = min(evicted, missed)
    size = block_bytes(seen)
    numbers = [("rate", rate), ("evicted_blocks", evicted), ("missed_blocks", missed)]
    more = f"{useful:,.0f} blocks"
    if size is not None and capacity:
        more = format_bytes(useful * size)
        numbers += [("more_bytes", useful * size), ("host_bytes", capacity * size)]
        more = f"{more} more than its {format_bytes(capacity * size)}"
    return Advice(
        Urgency.CONSIDER,
        "hits",
        f"{finding}; DRAM evicted {evicted:,.0f} blocks, and {missed:,.0f} were missed",
        f"DRAM is too small, by up to {more}: raise host.size step by step and look again, or put "
        "a disk below it",
        tuple(numbers),
    )


def _from_below(seen: Samples) -> Iterator[Advice]:
    """Most hits lie below a DRAM that is full: each costs a slow hop first."""
    hits = seen.by("penstock_hit_blocks_total", "tier")
    total, host = sum(hits.values()), hits.get("host", 0.0)
    capacity = seen.total("penstock_capacity_blocks", tier="host")
    used = seen.total("penstock_used_blocks", tier="host")
    if seen.total("penstock_lookups_total") < MIN_LOOKUPS or not (total and capacity):
        return
    if host / total < 0.5 and used >= _FULL * capacity:
        lower = max((tier for tier in hits if tier != "host"), key=lambda tier: hits[tier])
        yield Advice(
            Urgency.CONSIDER,
            "tiers",
            f"{1 - host / total:.0%} of hits come from below DRAM, most from {lower}, and DRAM is "
            "full",
            "raise host.size, so that what is read often lies there",
            (("host_share", host / total), ("used_share", used / capacity)),
        )


def _slow_loads(seen: Samples) -> Iterator[Advice]:
    choices = seen.by("penstock_load_decisions_total", "choice")
    total, computed = sum(choices.values()), choices.get("compute", 0.0)
    if total < MIN_LOOKUPS:
        return
    saved = seen.total("penstock_saved_seconds_total")
    if computed / total <= 0.5:
        yield Advice(
            Urgency.WELL,
            "loading",
            f"{total - computed:,.0f} of {total:,.0f} matches were loaded, which saved about "
            f"{format_seconds(saved)} of computing",
            "",
            (("decisions", total), ("saved_seconds", saved)),
        )
        return
    rates = ", ".join(f"{tier} {format_rate(rate)}" for tier, rate in _load_rates(seen).items())
    yield Advice(
        Urgency.CONSIDER,
        "loading",
        f"{computed / total:.0%} of {total:,.0f} matches were computed, because loading is slower"
        f"{f' (a thread loads from {rates})' if rates else ''}",
        "a faster tier or more DRAM; where prompts are short, leave out the tiers below DRAM "
        "(`penstock plan` tells the length from which each pays)",
        (("decisions", total), ("computed_share", computed / total)),
    )


def _load_rates(seen: Samples) -> dict[str, float]:
    """Bytes per second of one transfer, by the tier it came from."""
    rates = {}
    for source in seen.by("penstock_bytes_total", "source", direction="load"):
        seconds = seen.total("penstock_transfer_seconds_total", source=source, direction="load")
        num_bytes = seen.total("penstock_bytes_total", source=source, direction="load")
        if seconds and num_bytes:
            rates[source] = num_bytes / seconds
    return rates


def _leases(seen: Samples) -> Iterator[Advice]:
    capacity = seen.total("penstock_capacity_blocks", tier="host")
    leased = seen.total("penstock_leased_blocks", tier="host")
    if capacity and leased / capacity > 0.8:
        yield Advice(
            Urgency.CONSIDER,
            "room",
            f"{leased / capacity:.0%} of DRAM is held by sessions that run: little is left to keep "
            "anything else",
            "raise host.size",
            (("leased_share", leased / capacity),),
        )


def _remote_lookups(seen: Samples) -> Iterator[Advice]:
    name = "penstock_remote_lookup_seconds"
    answered = seen.total(f"{name}_count", result="ok")
    failed = seen.total(f"{name}_count", result="failed")
    if answered + failed < MIN_LOOKUPS:
        return
    mean = seen.total(f"{name}_sum", result="ok") / max(1.0, answered)
    share = failed / (answered + failed)
    if share > MANY or mean > _LOOKUP_SECONDS:
        yield Advice(
            Urgency.CONSIDER,
            "remote",
            f"the shared store answers lookups in {format_seconds(mean)}, and {share:.1%} not at "
            "all",
            "bring it nearer, or give it more; a request waits remote.lookup_deadline_seconds at "
            "the most",
            (("mean_seconds", mean), ("failed_share", share)),
        )


RULES: tuple[Rule, ...] = (
    _corruption,
    _health,
    _dropped_saves,
    _lost_loads,
    _hits,
    _from_below,
    _slow_loads,
    _leases,
    _remote_lookups,
)
