"""Advice on the tiers: hits, transfers and sizes, for any client. Pure.

Problems that a failing tier explains are not blamed on sizes: see `fault_rules`.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.units import format_bytes, format_rate, format_seconds
from penstock.watch.advice import (
    MANY,
    MIN_LOOKUPS,
    Advice,
    Rule,
    Urgency,
    block_bytes,
    hit_rate,
    reused_share,
)
from penstock.watch.fault_rules import below, faulty, listed
from penstock.watch.samples import Samples

_FULL = 0.95  # of a tier's slots
_LOW_HITS = 0.3


def _dropped_saves(seen: Samples) -> Iterator[Advice]:
    changes = {
        "host": "DRAM had no room or the link no time: raise host.size or "
        "transfer.max_pending_save_bytes",
        "disk": "blocks arrive faster than the disk writes: use more disk.threads, a faster disk, "
        "or a higher disk.write_per_day",
        "remote": "blocks arrive faster than the store accepts them: set "
        'remote.admit="second-use", or raise remote.threads or remote.write_per_day',
    }
    for tier, dropped in seen.by("penstock_dropped_blocks_total", "tier").items():
        saved = seen.total("penstock_blocks_total", target=tier, direction="save")
        share = dropped / (dropped + saved) if dropped else 0.0
        change = changes.get(tier, "make it larger, or save less")
        if at_fault := [each for each in faulty(seen, "save") if each in (tier, *below(tier))]:
            change = (
                f"{listed(at_fault)} failed to save in this time, and waiting blocks leave no room "
                "for others: fix that first"
            )
        if share > MANY:
            yield Advice(
                Urgency.ACT if share > 0.1 else Urgency.CONSIDER,
                "saves",
                f"{dropped:,.0f} of {dropped + saved:,.0f} saves to {tier} were dropped",
                change,
                (("dropped_blocks", dropped), ("share", share)),
            )


def _hits(seen: Samples) -> Iterator[Advice]:
    lookups, rate = seen.total("penstock_lookups_total"), hit_rate(seen)
    reused = reused_share(seen)
    if rate is None or lookups < MIN_LOOKUPS:
        yield _too_few(seen, lookups, reused)
        return
    evicted = seen.total("penstock_evicted_blocks_total", tier="host")
    finding = f"{rate:.0%} of blocks looked up were found"
    numbers = [("rate", rate)]
    if reused is not None:
        # Blocks on the device are not looked up, so few hits may mean that most are there.
        finding = f"{reused:.0%} of prompt tokens were reused; below the device {finding}"
        numbers.append(("reused_share", reused))
    is_reused = reused is not None and reused >= _LOW_HITS and not evicted
    if rate >= _LOW_HITS or is_reused:
        yield Advice(Urgency.WELL, "hits", finding, "", tuple(numbers))
        return
    scanned = seen.by("penstock_recovered_ratio", "tier")
    reading = [tier for tier, share in scanned.items() if share < 1]
    if at_fault := faulty(seen, "load"):
        change = (
            f"{listed(at_fault)} failed to load in this time, and its blocks count as missed: fix "
            "that first, then check again (--seconds 60)"
        )
        yield Advice(Urgency.CONSIDER, "hits", finding, change, tuple(numbers))
    elif reading:
        tier = reading[0]
        change = f"{tier} has read {scanned[tier]:.0%} of its index since the start: wait"
        yield Advice(Urgency.CONSIDER, "hits", finding, change, tuple(numbers))
    elif evicted:
        yield _too_small(seen, numbers, finding, evicted)
    else:
        change = (
            "nothing was evicted from DRAM, so more DRAM does not help: prompts have too little in "
            "common. Put what changes (dates, names) after what stays the same. Tenants do not "
            "share blocks"
        )
        yield Advice(Urgency.CONSIDER, "hits", finding, change, tuple(numbers))


def _too_few(seen: Samples, lookups: float, reused: float | None) -> Advice:
    """If the device has whole prompts, nothing is looked up below it."""
    prompts = seen.total("penstock_first_token_seconds_count")
    if prompts >= MIN_LOOKUPS and reused is not None and reused >= _LOW_HITS:
        finding = f"{reused:.0%} of prompt tokens were reused, nearly all of them on the device"
        return Advice(Urgency.WELL, "hits", finding, "", (("reused_share", reused),))
    were = "prompt was" if lookups == 1 else "prompts were"
    return Advice(
        Urgency.CONSIDER,
        "hits",
        f"{lookups:,.0f} {were} looked up below the device: too few to judge hits",
        "check again when there has been more traffic",
    )


def _too_small(
    seen: Samples, numbers: list[tuple[str, float]], finding: str, evicted: float
) -> Advice:
    capacity = seen.total("penstock_capacity_blocks", tier="host")
    missed = seen.total("penstock_miss_blocks_total")
    # That much more would have prevented all evictions; but it cannot gain more than the misses.
    useful = min(evicted, missed)
    size = block_bytes(seen)
    numbers = [*numbers, ("evicted_blocks", evicted), ("missed_blocks", missed)]
    more = f"{useful:,.0f} blocks"
    if size is not None and capacity:
        more = format_bytes(useful * size)
        numbers += [("more_bytes", useful * size), ("host_bytes", capacity * size)]
        more = f"{more} more than its {format_bytes(capacity * size)}"
    return Advice(
        Urgency.CONSIDER,
        "hits",
        f"{finding}; DRAM evicted {evicted:,.0f} blocks, and {missed:,.0f} were missed",
        f"DRAM is too small, by up to {more}: raise host.size step by step and check again, or add "
        "a disk",
        tuple(numbers),
    )


def _from_below(seen: Samples) -> Iterator[Advice]:
    """Most hits are below a DRAM that is full, so each needs a slow transfer first."""
    hits = seen.by("penstock_hit_blocks_total", "tier")
    total, host = sum(hits.values()), hits.get("host", 0.0)
    capacity = seen.total("penstock_capacity_blocks", tier="host")
    used = seen.total("penstock_used_blocks", tier="host")
    if seen.total("penstock_lookups_total") < MIN_LOOKUPS or not (total and capacity):
        return
    if host / total < 0.5 and used >= _FULL * capacity:
        lower = max((tier for tier in hits if tier != "host"), key=lambda tier: hits[tier])
        if lower in faulty(seen, "load"):
            return
        yield Advice(
            Urgency.CONSIDER,
            "tiers",
            f"{1 - host / total:.0%} of hits come from below DRAM, most from {lower}, and DRAM is "
            "full",
            "raise host.size, so that frequently used blocks fit",
            (("host_share", host / total), ("used_share", used / capacity)),
        )


def _slow_loads(seen: Samples) -> Iterator[Advice]:
    choices = seen.by("penstock_load_decisions_total", "choice")
    total, computed = sum(choices.values()), choices.get("compute", 0.0)
    if total < MIN_LOOKUPS:
        return
    saved = seen.total("penstock_saved_seconds_total")
    if computed / total <= 0.5:
        # Without measured rates nothing was estimated, which does not mean that nothing was saved.
        gain = f", which saved about {format_seconds(saved)} of computing" if saved else ""
        yield Advice(
            Urgency.WELL,
            "loading",
            f"{total - computed:,.0f} of {total:,.0f} matches were loaded{gain}",
            "",
            (("decisions", total), ("saved_seconds", saved)),
        )
        return
    rates = ", ".join(f"{tier} {format_rate(rate)}" for tier, rate in _load_rates(seen).items())
    change = (
        "use a faster tier or more DRAM; if prompts are short, remove the tiers below DRAM "
        "(`penstock plan` shows from which length each is worth it)"
    )
    if at_fault := faulty(seen, "load"):
        change = f"{listed(at_fault)} failed to load in this time, which makes it slow: fix it"
    yield Advice(
        Urgency.CONSIDER,
        "loading",
        f"{computed / total:.0%} of {total:,.0f} matches were recomputed, because loading is slower"
        f"{f' (per thread: {rates})' if rates else ''}",
        change,
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
            f"{leased / capacity:.0%} of DRAM is held by running sessions: little room is left for "
            "anything else",
            "raise host.size",
            (("leased_share", leased / capacity),),
        )


RULES: tuple[Rule, ...] = (
    _dropped_saves,
    _hits,
    _from_below,
    _slow_loads,
    _leases,
)
