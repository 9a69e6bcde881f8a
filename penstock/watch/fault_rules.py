"""Advice on what is broken: tiers that fail, blocks that are damaged or do not arrive. Pure.

These come before all advice on sizes: a tier at fault explains misses, dropped saves and slow
loads, and no memory mends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.units import format_seconds
from penstock.watch.advice import MANY, MIN_LOOKUPS, Advice, Rule, Urgency
from penstock.watch.samples import Samples

_TIERS = ("host", "disk", "remote")
_LOOKUP_SECONDS = 0.1  # of the 0.25 that a request waits by default
_MIN_FAILURES = 3  # one may be chance
_MOST = 0.5
_MANY_SAVES = 0.1
_LOOKUPS = "penstock_remote_lookup_seconds_count"
_LOST = "penstock_lost_blocks_total"
_WHAT_FAILS = {
    ("disk", "save"): "a disk that is full, read-only or gone",
    ("disk", "load"): "a disk or folder that is gone or unreadable",
    ("remote", "save"): "a store that is down, full or refuses to write",
    ("remote", "load"): "a store that is down or cannot be reached",
}


def faulty(seen: Samples, direction: str) -> list[str]:
    """Tiers that failed in that direction so often that hits or saves were lost to it."""
    return [tier for tier in _TIERS if _is_faulty(seen, tier, direction)]


def _is_faulty(seen: Samples, tier: str, direction: str) -> bool:
    where = {"tier": tier, "direction": direction}
    if seen.total("penstock_tier_resting", **where) or seen.total(
        "penstock_tier_rests_total", **where
    ):
        return True
    if direction == "load":
        return _is_unanswered(seen, tier)
    failed, share = _saves_that_failed(seen, tier)
    return failed >= _MIN_FAILURES and share > _MANY_SAVES


def _is_unanswered(seen: Samples, tier: str) -> bool:
    """Most lookups of a shared store came to nothing."""
    failed = seen.total(_LOOKUPS, tier=tier, result="failed")
    answered = seen.total(_LOOKUPS, tier=tier, result="ok")
    return failed >= _MIN_FAILURES and failed > _MOST * (failed + answered)


def _saves_that_failed(seen: Samples, tier: str) -> tuple[float, float]:
    """How many, and which share of those that were tried."""
    failed = seen.total(_LOST, direction="save", target=tier, verdict="failed")
    saved = seen.total("penstock_blocks_total", direction="save", target=tier)
    return failed, failed / (failed + saved) if failed else 0.0


def below(tier: str) -> Sequence[str]:
    return _TIERS[_TIERS.index(tier) + 1 :] if tier in _TIERS else ()


def listed(tiers: Sequence[str]) -> str:
    return " and ".join(tiers)


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
    names = seen.by("penstock_tier_resting", "tier") | seen.by("penstock_tier_rests_total", "tier")
    for tier in names:
        for direction in ("load", "save"):
            is_resting = seen.total("penstock_tier_resting", tier=tier, direction=direction)
            rests = seen.total("penstock_tier_rests_total", tier=tier, direction=direction)
            look = f"see the log for its own error ({_WHAT_FAILS.get((tier, direction), 'why')})"
            if is_resting:
                yield Advice(
                    Urgency.ACT,
                    "health",
                    f"{tier} fails to {direction} and is left alone; rests so far: {rests:,.0f}",
                    f"{look}: {_meanwhile(seen, tier, direction)}",
                    (("rests", rests),),
                )
            elif rests:
                yield Advice(
                    Urgency.CONSIDER,
                    "health",
                    f"{tier} failed to {direction} so often that it was left alone {rests:,.0f} "
                    "times; now it answers",
                    look,
                    (("rests", rests),),
                )


def _meanwhile(seen: Samples, tier: str, direction: str) -> str:
    """What a failing direction means for requests; it depends on the other one."""
    if direction == "load":
        return "what lies there is computed until it answers"
    is_loading = not seen.total("penstock_tier_resting", tier=tier, direction="load")
    kept = ", while what lies there is still loaded" if is_loading else ""
    return f"nothing new is kept there until it is mended{kept}"


def _unanswered(seen: Samples) -> Iterator[Advice]:
    failed = seen.total(_LOOKUPS, result="failed")
    answered = seen.total(_LOOKUPS, result="ok")
    share = failed / max(1.0, failed + answered)
    if _is_unanswered(seen, "remote"):
        yield Advice(
            Urgency.ACT,
            "remote",
            f"the shared store did not answer {failed:,.0f} of {failed + answered:,.0f} lookups",
            "see whether it runs and can be reached from here (`penstock probe --remote URL`); "
            "until then what lies there is computed",
            (("failed_lookups", failed), ("failed_share", share)),
        )
        return
    if answered + failed < MIN_LOOKUPS or faulty(seen, "load"):
        return  # too few, or explained by what `_health` says
    mean = seen.total("penstock_remote_lookup_seconds_sum", result="ok") / max(1.0, answered)
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


def _failed_saves(seen: Samples) -> Iterator[Advice]:
    for tier in seen.by(_LOST, "target", direction="save"):
        failed, share = _saves_that_failed(seen, tier)
        if share > MANY:
            yield Advice(
                Urgency.ACT if share > _MANY_SAVES else Urgency.CONSIDER,
                "saves",
                f"{failed:,.0f} saves to {tier} failed, {share:.0%} of those that were tried",
                "see the log for its own error "
                f"({_WHAT_FAILS.get((tier, 'save'), 'why')}): what was to be kept there is lost "
                "when it leaves the tiers above",
                (("failed_blocks", failed), ("share", share)),
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
        for source in seen.by(_LOST, "source", direction="load", verdict=verdict):
            lost = seen.total(_LOST, direction="load", verdict=verdict, source=source)
            share = lost / (loaded + lost) if lost else 0.0
            is_faulty = source in faulty(seen, "load")
            if share > MANY:
                yield Advice(
                    Urgency.CONSIDER,
                    "loads",
                    f"{lost:,.0f} blocks from {source} did not arrive ({verdict}), {share:.1%} of "
                    "all that were to be loaded",
                    f"{source} fails to load: mend that first" if is_faulty else change,
                    (("lost_blocks", lost), ("share", share)),
                )


RULES: tuple[Rule, ...] = (_corruption, _health, _unanswered, _failed_saves, _lost_loads)
