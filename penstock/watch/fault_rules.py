"""Advice on faults: tiers that fail, blocks that are damaged or do not arrive. Pure.

Faults come before advice on sizes: a failing tier explains misses, dropped saves and slow loads,
and more memory does not fix it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.units import counted, format_seconds
from penstock.watch.advice import MANY, MIN_LOOKUPS, Advice, Rule, Urgency
from penstock.watch.samples import Samples

_TIERS = ("host", "disk", "remote")
_LOOKUP_SECONDS = 0.1  # a request waits 0.25 s by default
_MIN_FAILURES = 3  # one may be chance
_MOST = 0.5
_MANY_SAVES = 0.1
_LOOKUPS = "penstock_remote_lookup_seconds_count"
_LOST = "penstock_lost_blocks_total"
_WHAT_FAILS = {
    ("disk", "save"): "the disk may be full, read-only or missing",
    ("disk", "load"): "the disk or its folder may be missing or unreadable",
    ("remote", "save"): "the store may be down, full or refuse writes",
    ("remote", "load"): "the store may be down or unreachable",
}


def faulty(seen: Samples, direction: str) -> list[str]:
    """Tiers that failed in that direction often enough to lose hits or saves."""
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
    """Whether most lookups in a shared store failed."""
    failed = seen.total(_LOOKUPS, tier=tier, result="failed")
    answered = seen.total(_LOOKUPS, tier=tier, result="ok")
    return failed >= _MIN_FAILURES and failed > _MOST * (failed + answered)


def _saves_that_failed(seen: Samples, tier: str) -> tuple[float, float]:
    """The number of failed saves, and their share of all attempts."""
    failed = seen.total(_LOST, direction="save", target=tier, verdict="failed")
    saved = seen.total("penstock_blocks_total", direction="save", target=tier)
    return failed, failed / (failed + saved) if failed else 0.0


def below(tier: str) -> Sequence[str]:
    return _TIERS[_TIERS.index(tier) + 1 :] if tier in _TIERS else ()


def listed(tiers: Sequence[str]) -> str:
    return " and ".join(tiers)


def _corruption(seen: Samples) -> Iterator[Advice]:
    changes = {
        "disk": "run `penstock store check` on its folder; if it continues, replace the disk",
        "remote": "run `penstock store check` on its URL, and check what else writes there",
        "host": "test the machine's memory; until then set host.verify=true (not available in "
        "vLLM)",
    }
    for tier, count in seen.by("penstock_corrupt_blocks_total", "tier").items():
        if count:
            yield Advice(
                Urgency.ACT,
                "corruption",
                f"{counted(round(count), 'block')} from {tier} failed verification, and had to be "
                "recomputed",
                changes.get(tier, "see the log for their origin"),
                (("corrupt_blocks", count),),
            )


def _health(seen: Samples) -> Iterator[Advice]:
    names = seen.by("penstock_tier_resting", "tier") | seen.by("penstock_tier_rests_total", "tier")
    for tier in names:
        for direction in ("load", "save"):
            is_resting = seen.total("penstock_tier_resting", tier=tier, direction=direction)
            rests = seen.total("penstock_tier_rests_total", tier=tier, direction=direction)
            look = (
                f"see the log for the error ({_WHAT_FAILS.get((tier, direction), 'of any kind')})"
            )
            if is_resting:
                yield Advice(
                    Urgency.ACT,
                    "health",
                    f"{tier} fails to {direction} and is left unused for a while; times so far: "
                    f"{rests:,.0f}",
                    f"{look}; {_meanwhile(seen, tier, direction)}",
                    (("rests", rests),),
                )
            elif rests:
                yield Advice(
                    Urgency.CONSIDER,
                    "health",
                    f"{tier} failed to {direction} and was left unused for a while, times so far: "
                    f"{rests:,.0f}; it works again",
                    look,
                    (("rests", rests),),
                )


def _see_log(tier: str, direction: str) -> str:
    cause = _WHAT_FAILS.get((tier, direction))
    return "see the log for the error" + (f" ({cause})" if cause else "")


def _meanwhile(seen: Samples, tier: str, direction: str) -> str:
    """What a failing direction means for requests."""
    if direction == "load":
        return "until it works again, its blocks are recomputed"
    is_loading = not seen.total("penstock_tier_resting", tier=tier, direction="load")
    kept = "; its blocks can still be loaded" if is_loading else ""
    return f"until it works again, nothing new is saved there{kept}"


def _unanswered(seen: Samples) -> Iterator[Advice]:
    failed = seen.total(_LOOKUPS, result="failed")
    answered = seen.total(_LOOKUPS, result="ok")
    share = failed / max(1.0, failed + answered)
    if _is_unanswered(seen, "remote"):
        yield Advice(
            Urgency.ACT,
            "remote",
            f"the shared store did not answer {failed:,.0f} of {failed + answered:,.0f} lookups",
            "check that it runs and can be reached from here (`penstock probe --remote URL`); "
            "until then its blocks are recomputed",
            (("failed_lookups", failed), ("failed_share", share)),
        )
        return
    if answered + failed < MIN_LOOKUPS or faulty(seen, "load"):
        return  # too few, or explained by `_health`
    mean = seen.total("penstock_remote_lookup_seconds_sum", result="ok") / max(1.0, answered)
    if share > MANY or mean > _LOOKUP_SECONDS:
        yield Advice(
            Urgency.CONSIDER,
            "remote",
            f"the shared store answers lookups in {format_seconds(mean)}, and {share:.1%} not at "
            "all",
            "move it closer, or give it more resources; a request waits at most "
            "remote.lookup_deadline_seconds",
            (("mean_seconds", mean), ("failed_share", share)),
        )


def _failed_saves(seen: Samples) -> Iterator[Advice]:
    for tier in seen.by(_LOST, "target", direction="save"):
        failed, share = _saves_that_failed(seen, tier)
        if share > MANY:
            yield Advice(
                Urgency.ACT if share > _MANY_SAVES else Urgency.CONSIDER,
                "saves",
                f"{counted(round(failed), 'save')} to {tier} failed, {share:.0%} of all attempts",
                f"{_see_log(tier, 'save')}; these blocks are lost once the tiers above evict them",
                (("failed_blocks", failed), ("share", share)),
            )


def _lost_loads(seen: Samples) -> Iterator[Advice]:
    loaded = seen.total("penstock_blocks_total", direction="load")
    changes = {
        "expired": "the tier is slower than transfer.load_deadline_seconds allows: use a faster "
        "one, or more threads (disk.threads, remote.threads)",
        "missing": "something else removes blocks there: give it more space, or set "
        "remote.ttl_seconds",
        "failed": "see the log for the tier's error",
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
                    f"{counted(round(lost), 'block')} from {source} did not arrive ({verdict}), "
                    f"{share:.1%} of all loads",
                    f"{source} fails to load: fix that first" if is_faulty else change,
                    (("lost_blocks", lost), ("share", share)),
                )


def _unfit(seen: Samples) -> Iterator[Advice]:
    for tier, unfit in seen.by("penstock_unfit_blocks_total", "tier").items():
        saved = seen.total("penstock_blocks_total", direction="save", target=tier)
        share = unfit / (unfit + saved) if unfit else 0.0
        if share > MANY:
            yield Advice(
                Urgency.CONSIDER,
                "codec",
                f"{counted(round(unfit), 'block')} did not fit the codec of {tier}, {share:.1%} of "
                "all saves to it",
                f"set {tier}.codec to raw: this model's KV varies too much to be packed, and "
                "blocks that do not fit are computed again",
                (("unfit_blocks", unfit), ("share", share)),
            )


RULES: tuple[Rule, ...] = (
    *(_corruption, _health, _unanswered),
    *(_failed_saves, _lost_loads, _unfit),
)
