"""Events on their way to vLLM's /metrics: plain data, and nothing lost that a metric needs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools import keys_of

from penstock.connectors.vllm.stats import EventLog, from_plain, summarize, to_plain
from penstock.events import (
    Decided,
    Event,
    Finished,
    LookedUp,
    Lost,
    Moved,
    Prefetched,
    Recovered,
    Removed,
    Retained,
    Stored,
    TicketDone,
    TierRested,
    TierRevived,
    TierUsage,
)
from penstock.types import Direction, Tier, Verdict

LOAD, SAVE = Direction.LOAD, Direction.SAVE
counts = st.integers(0, 1 << 40)
seconds = st.floats(0, 1e6)
tiers, ways = st.sampled_from(Tier), st.sampled_from(Direction)
events = st.one_of(
    st.builds(LookedUp, counts, st.lists(st.tuples(tiers, counts), max_size=3).map(tuple)),
    st.builds(Moved, tiers, tiers, ways, counts, counts, seconds),
    st.builds(Lost, tiers, tiers, ways, st.sampled_from(Verdict), counts, st.text(max_size=9)),
    st.builds(Removed, tiers, st.integers(0, 9).map(lambda n: tuple(keys_of(n))), st.booleans()),
    st.builds(TierUsage, tiers, counts, counts, counts, counts, counts),
    st.builds(Retained, counts, counts),
    st.builds(Prefetched, counts, counts),
    st.builds(TicketDone, ways, counts, counts, seconds),
    st.builds(TierRested, tiers, ways, seconds, st.text(max_size=9)),
    st.builds(TierRevived, tiers, ways),
    st.builds(Recovered, tiers, counts, counts, counts),
    st.builds(Decided, counts, counts, st.none() | seconds, st.none() | seconds),
)


def crossed(event: Event) -> Event:
    """As it comes out of another process."""
    return from_plain(json.loads(json.dumps(to_plain(event))))


@given(events)
def test_every_event_that_is_sent_arrives_as_it_was(event: Event) -> None:
    arrived = crossed(event)
    if isinstance(event, Removed):
        assert isinstance(arrived, Removed)
        assert len(arrived.keys) == len(event.keys)  # which they were is nobody's business
        event = replace(event, keys=arrived.keys)
    assert arrived == event
    for field in ("tier", "source", "target", "direction", "verdict"):
        if hasattr(event, field):
            assert type(getattr(arrived, field)) is type(getattr(event, field))


@pytest.mark.parametrize(
    "event", [Stored(Tier.HOST, ()), Finished("stop", 1, 1, 0, 0, 1.0, None)], ids=str
)
def test_what_no_metric_needs_is_not_sent(event: Event) -> None:
    log = EventLog()
    log(event)
    assert log.take() == []
    with pytest.raises(TypeError, match="has no plain form"):
        to_plain(event)


@given(st.lists(events, max_size=30))
def test_the_log_hands_each_event_out_once(given_events: list[Event]) -> None:
    log = EventLog()
    for event in given_events:
        log(event)
    plain = log.take()
    assert log.take() == []
    summed = Moved | TierUsage | Retained
    others = [e for e in given_events if not isinstance(e, summed)]
    arrived = [e for e in map(from_plain, plain) if not isinstance(e, summed)]
    assert [type(event) for event in arrived] == [type(event) for event in others]


def test_moves_over_one_hop_are_summed_and_hops_kept_apart() -> None:
    log = EventLog()
    for _ in range(3):
        log(Moved(Tier.HOST, Tier.DEVICE, LOAD, 2, 100, 0.5))
    log(Moved(Tier.DEVICE, Tier.HOST, SAVE, 1, 50, 0.25))
    log(Moved(Tier.HOST, Tier.DISK, SAVE, 1, 50, 0.125))
    assert [from_plain(plain) for plain in log.take()] == [
        Moved(Tier.HOST, Tier.DEVICE, LOAD, 6, 300, 1.5),
        Moved(Tier.DEVICE, Tier.HOST, SAVE, 1, 50, 0.25),
        Moved(Tier.HOST, Tier.DISK, SAVE, 1, 50, 0.125),
    ]
    log(Moved(Tier.HOST, Tier.DEVICE, LOAD, 1, 7, 0.5))
    (plain,) = log.take()
    assert from_plain(plain) == Moved(Tier.HOST, Tier.DEVICE, LOAD, 1, 7, 0.5), "a new sum"


def test_of_a_tiers_usage_only_the_last_counts() -> None:
    log = EventLog()
    host = [TierUsage(Tier.HOST, used, 10, 0, 0, 0) for used in range(5)]
    disk = TierUsage(Tier.DISK, 7, 100, 0, 0, 0)
    for event in (host[0], disk, *host[1:]):
        log(event)
    assert [from_plain(plain) for plain in log.take()] == [host[-1], disk]


def test_a_line_for_the_log() -> None:
    log = EventLog()
    sent: list[Event] = [
        LookedUp(10, ((Tier.HOST, 4), (Tier.DISK, 2))),
        LookedUp(5, ()),
        Moved(Tier.HOST, Tier.DEVICE, LOAD, 1, 1_500_000, 0.5),
        Moved(Tier.HOST, Tier.DEVICE, LOAD, 1, 250_000, 0.5),
        Moved(Tier.HOST, Tier.DISK, SAVE, 1, 2_000_000, 0.5),
        Lost(Tier.DISK, Tier.HOST, LOAD, Verdict.CORRUPT, 3, "checksum"),
        Lost(Tier.HOST, Tier.DEVICE, LOAD, Verdict.MISSING, 1),
        TierUsage(Tier.HOST, 1, 2, 0, 0, 0),
    ]
    for event in sent:
        log(event)
    line: dict[str, Any] = summarize(json.loads(json.dumps(log.take())))
    assert line == {
        "penstock host to device, MB": 1.75,
        "penstock host to disk, MB": 2.0,
        "penstock blocks asked": 15,
        "penstock blocks hit": 6,
        "penstock blocks lost": 4,
    }
    assert summarize([]) == {}
