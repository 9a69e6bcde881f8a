"""What is kept of a server's metrics, and what was counted since."""

from __future__ import annotations

import pytest

from penstock.watch.history import RATE_SECONDS, RECENT_SECONDS, History
from penstock.watch.samples import Samples


def counted(num: float, **gauges: float) -> Samples:
    values = {("penstock_step_tokens_total", frozenset[tuple[str, str]]()): num}
    values |= {(name, frozenset()): value for name, value in gauges.items()}
    return Samples(values)


def test_without_a_look_there_is_nothing() -> None:
    history = History()
    assert history.latest is None
    assert history.rate_span().seconds == 0
    assert not history.recent_span().seen


def test_one_look_tells_no_rate() -> None:
    history = History()
    history.add(7.0, counted(100))
    for span in (history.rate_span(), history.recent_span()):
        assert span.seconds == 0
        assert span.seen.total("penstock_step_tokens_total") == 0


def test_rates_are_of_the_last_seconds_and_the_rest_of_the_last_minutes() -> None:
    history = History()
    for second in range(1001):
        history.add(float(second), counted(10.0 * second))
    late, recent = history.rate_span(), history.recent_span()
    assert late.seconds == RATE_SECONDS
    assert late.seen.total("penstock_step_tokens_total") == 10 * RATE_SECONDS
    # It reaches back at least so far, and no more than a sample further.
    assert RECENT_SECONDS <= recent.seconds <= RECENT_SECONDS + 5
    assert recent.seen.total("penstock_step_tokens_total") == 10 * recent.seconds


@pytest.mark.parametrize("spacing", [0.1, 1.0, 3.0, 60.0, 3600.0])
def test_it_stays_small_however_often_one_looks(spacing: float) -> None:
    history = History()
    for number in range(2000):
        history.add(number * spacing, counted(number))
    assert len(history._late) <= RATE_SECONDS / spacing + 2
    assert len(history._early) <= RECENT_SECONDS / 5 + 2
    # Who looks seldom still has a rate: that between the last two looks.
    assert history.rate_span().seconds >= min(spacing, RATE_SECONDS)
    assert history.rate_span().seen.total("penstock_step_tokens_total") >= 1


def test_gauges_are_as_they_are_now() -> None:
    history = History()
    history.add(0.0, counted(0, penstock_retained_blocks=100))
    history.add(1.0, counted(0, penstock_retained_blocks=40))
    assert history.recent_span().seen.total("penstock_retained_blocks") == 40
    assert history.latest is not None
    assert history.latest.total("penstock_retained_blocks") == 40


def test_a_server_that_was_started_anew_is_another() -> None:
    history = History()
    history.add(0.0, counted(0))
    history.add(1.0, counted(1000))
    history.add(2.0, counted(10))  # it fell: counted anew
    assert history.recent_span().seconds == 0
    history.add(3.0, counted(1500))  # more than the other one ever had
    assert history.recent_span().seen.total("penstock_step_tokens_total") == 1490
    assert history.rate_span().seconds == 1


def test_a_gauge_that_falls_is_no_new_server() -> None:
    history = History()
    history.add(0.0, counted(0, penstock_sequences=5))
    history.add(1.0, counted(7, penstock_sequences=1))
    assert history.rate_span().seen.total("penstock_step_tokens_total") == 7


def test_a_series_that_comes_or_goes_is_no_new_server() -> None:
    name = "penstock_hit_blocks_total"
    host, disk = (frozenset({("tier", tier)}) for tier in ("host", "disk"))
    history = History()
    history.add(0.0, Samples({(name, host): 5.0}))
    history.add(1.0, Samples({(name, host): 6.0, (name, disk): 3.0}))
    history.add(2.0, Samples({(name, disk): 4.0}))
    span = history.recent_span()
    assert span.seconds == 2
    assert span.seen.total(name, tier="disk") == 4
