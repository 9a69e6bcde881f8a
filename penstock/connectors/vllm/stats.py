"""Events as plain data, sent from the scheduler's process to vLLM's /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.events import (
    Asked,
    Audited,
    AuditFailed,
    CodecsChosen,
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
    TierCodec,
    TierRested,
    TierRevived,
    TierUsage,
)
from penstock.types import BlockKey, Direction, Tier, Verdict

Plain = list[Any]

_Hop = tuple[Tier, Tier, Direction]


class EventLog:
    """An observer that collects the events for metrics until they are taken."""

    def __init__(self) -> None:
        self._moved: dict[_Hop, Moved] = {}
        self._usage: dict[Tier, TierUsage] = {}
        self._retained: Retained | None = None
        self._codecs: CodecsChosen | None = None
        self._others: list[Event] = []

    def __call__(self, event: Event) -> None:
        match event:
            case Moved(source, target, direction):
                hop = (source, target, direction)
                self._moved[hop] = _sum(self._moved.get(hop), event)
            case TierUsage(tier):
                self._usage[tier] = event  # only the latest counts
            case LookedUp() | Lost() | Removed() | TicketDone() | TierRested() | TierRevived():
                self._others.append(event)
            case Retained():
                self._retained = event
            case CodecsChosen():
                self._codecs = event
            case Recovered() | Decided() | Asked() | Prefetched():
                self._others.append(event)
            case Audited() | AuditFailed() | Quarantined():
                self._others.append(event)

    def take(self) -> list[Plain]:
        events: list[Event] = [] if self._codecs is None else [self._codecs]
        events += [*self._moved.values(), *self._usage.values(), *self._others]
        if self._retained is not None:
            events.append(self._retained)
        self._moved, self._usage, self._retained, self._others = {}, {}, None, []
        self._codecs = None
        return [to_plain(event) for event in events]


def _sum(one: Moved | None, other: Moved) -> Moved:
    if one is None:
        return other
    return Moved(
        other.source,
        other.target,
        other.direction,
        one.num_blocks + other.num_blocks,
        one.num_bytes + other.num_bytes,
        one.seconds + other.seconds,
    )


def to_plain(event: Event) -> Plain:
    """An event as a list of numbers, strings and lists. The first item is its kind."""
    match event:
        case Moved(source, target, direction, num_blocks, num_bytes, seconds):
            return ["moved", source, target, direction.value, num_blocks, num_bytes, seconds]
        case Lost(source, target, direction, verdict, num_blocks, error):
            return ["lost", source, target, direction.value, verdict, num_blocks, error]
        case LookedUp(num_asked, hits):
            return ["looked up", num_asked, [[tier, count] for tier, count in hits]]
        case Asked():
            return [
                "asked",
                event.tier,
                event.num_blocks,
                event.num_present,
                event.seconds,
                event.error,
            ]
        case Removed(tier, keys, evicted):
            return ["removed", tier, len(keys), evicted]
        case TierUsage():
            return [
                "usage",
                event.tier,
                event.num_used,
                event.num_slots,
                event.num_leased,
                event.num_queued_loads,
                event.num_queued_saves,
            ]
        case CodecsChosen(codecs, raw_block_bytes, block_tokens):
            return ["codecs", [list(each) for each in codecs], raw_block_bytes, block_tokens]
        case Retained(num_blocks, max_blocks):
            return ["retained", num_blocks, max_blocks]
        case Prefetched(num_blocks, num_lost):
            return ["prefetched", num_blocks, num_lost]
        case TicketDone(direction, num_blocks, num_ok, seconds):
            return ["ticket", direction.value, num_blocks, num_ok, seconds]
        case TierRested(tier, direction, seconds, error):
            return ["rested", tier, direction.value, seconds, error]
        case TierRevived(tier, direction):
            return ["revived", tier, direction.value]
        case Recovered(tier, num_scanned, num_slots, num_blocks):
            return ["recovered", tier, num_scanned, num_slots, num_blocks]
        case Decided(num_matched, num_loaded, load_seconds, compute_seconds):
            return ["decided", num_matched, num_loaded, load_seconds, compute_seconds]
        case Audited(check, num_blocks):
            return ["audited", check, num_blocks]
        case AuditFailed(check, place):
            return ["audit failed", check, place]
        case Quarantined(path):
            return ["quarantined", path]
    raise TypeError(f"{event!r} has no plain form")


def from_plain(plain: Sequence[Any]) -> Event:
    """The event made from `to_plain`. Of removed blocks only the number is restored."""
    return _READERS[plain[0]](*plain[1:])


def summarize(plain: Iterable[Sequence[Any]]) -> dict[str, int | float]:
    """Totals for vLLM's periodic log line."""
    totals: dict[str, int | float] = {}

    def add(name: str, value: float) -> None:
        totals[name] = round(totals.get(name, 0) + value, 3)

    for event in map(from_plain, plain):
        match event:
            case Moved(source, target, _, _, num_bytes, _):
                add(f"penstock {source.label} to {target.label}, MB", num_bytes / 1e6)
            case LookedUp(num_asked):
                add("penstock blocks asked", num_asked)
                add("penstock blocks hit", event.num_hits)
            case Lost(num_blocks=num_blocks):
                add("penstock blocks lost", num_blocks)
    return totals


_READERS: dict[str, Callable[..., Event]] = {
    "moved": lambda source, target, way, *rest: Moved(
        Tier(source), Tier(target), Direction(way), *rest
    ),
    "lost": lambda source, target, way, verdict, *rest: Lost(
        Tier(source), Tier(target), Direction(way), Verdict(verdict), *rest
    ),
    "looked up": lambda num_asked, hits: LookedUp(
        num_asked, tuple((Tier(tier), count) for tier, count in hits)
    ),
    "asked": lambda tier, *rest: Asked(Tier(tier), *rest),
    "removed": lambda tier, count, evicted: Removed(Tier(tier), (BlockKey(b""),) * count, evicted),
    "usage": lambda tier, *rest: TierUsage(Tier(tier), *rest),
    "codecs": lambda codecs, *rest: CodecsChosen(
        tuple(TierCodec(Tier(tier), codec, size) for tier, codec, size in codecs), *rest
    ),
    "retained": Retained,
    "prefetched": Prefetched,
    "ticket": lambda way, *rest: TicketDone(Direction(way), *rest),
    "rested": lambda tier, way, *rest: TierRested(Tier(tier), Direction(way), *rest),
    "revived": lambda tier, way: TierRevived(Tier(tier), Direction(way)),
    "recovered": lambda tier, *rest: Recovered(Tier(tier), *rest),
    "decided": Decided,
    "audited": Audited,
    "audit failed": AuditFailed,
    "quarantined": Quarantined,
}
