"""Quantiles of a histogram, held against prometheus_client's own and against the real values."""

from __future__ import annotations

import bisect
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from penstock.watch.quantiles import quantile
from penstock.watch.samples import Samples, read_samples

BOUNDS = (0.1, 0.5, 1.0, 5.0)


def observed(values: list[float], bounds: tuple[float, ...] = BOUNDS) -> Samples:
    registry = CollectorRegistry()
    histogram = Histogram("penstock_x_seconds", "x", buckets=bounds, registry=registry)
    for value in values:
        histogram.observe(value)
    return read_samples(generate_latest(registry).decode())


def test_nothing_observed() -> None:
    assert quantile(observed([]), "penstock_x_seconds", 0.5) is None
    assert quantile(Samples({}), "penstock_x_seconds", 0.5) is None


def test_spread_evenly_within_a_bucket() -> None:
    seen = observed([0.3] * 10)
    assert quantile(seen, "penstock_x_seconds", 0.5) == pytest.approx(0.3)
    assert quantile(seen, "penstock_x_seconds", 0.25) == pytest.approx(0.2)
    assert quantile(seen, "penstock_x_seconds", 1.0) == pytest.approx(0.5)


def test_the_first_bucket_begins_at_zero() -> None:
    assert quantile(observed([0.05] * 4), "penstock_x_seconds", 0.5) == pytest.approx(0.05)


def test_above_the_last_bound_no_more_is_known() -> None:
    seen = observed([100.0] * 3)
    assert quantile(seen, "penstock_x_seconds", 0.5) == 5.0
    assert quantile(observed([0.05, 100.0]), "penstock_x_seconds", 0.99) == 5.0


def test_empty_buckets_between() -> None:
    seen = observed([0.05] * 50 + [3.0] * 50)
    assert quantile(seen, "penstock_x_seconds", 0.5) == pytest.approx(0.1)
    assert quantile(seen, "penstock_x_seconds", 0.51) == pytest.approx(1.08)


@given(
    st.lists(st.floats(0.001, 20.0), min_size=1, max_size=200),
    st.floats(0.0, 1.0),
)
def test_it_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    found = quantile(observed(values), "penstock_x_seconds", share)
    assert found is not None
    rank = max(0, math.ceil(share * len(values)) - 1)
    true = sorted(values)[rank]
    place = bisect.bisect_left(BOUNDS, true)
    low = 0.0 if place == 0 else BOUNDS[place - 1]
    high = BOUNDS[min(place, len(BOUNDS) - 1)]
    assert min(low, high) - 1e-9 <= found <= high + 1e-9


def test_more_is_never_less() -> None:
    rng = random.Random(0)
    seen = observed([rng.expovariate(1.0) for _ in range(1000)])
    found = [quantile(seen, "penstock_x_seconds", share / 100) or 0.0 for share in range(101)]
    assert found == sorted(found)


def test_labels_choose_and_the_rest_is_summed() -> None:
    lines = []
    for engine, prompt, below in (("0", "loaded", 10), ("1", "loaded", 30), ("0", "computed", 0)):
        labels = f'engine="{engine}",prompt="{prompt}"'
        lines.append(f'penstock_x_seconds_bucket{{{labels},le="1.0"}} {below}')
        lines.append(f'penstock_x_seconds_bucket{{{labels},le="2.0"}} 40')
        lines.append(f'penstock_x_seconds_bucket{{{labels},le="+Inf"}} 40')
    seen = read_samples("\n".join(lines))
    assert quantile(seen, "penstock_x_seconds", 0.5, prompt="loaded") == pytest.approx(1.0)
    assert quantile(seen, "penstock_x_seconds", 0.5, prompt="computed") == pytest.approx(1.5)
    assert quantile(seen, "penstock_x_seconds", 0.5, prompt="other") is None


def test_bounds_written_in_two_ways_are_one() -> None:
    seen = read_samples(
        'penstock_x_seconds_bucket{engine="0",le="1"} 10\n'
        'penstock_x_seconds_bucket{engine="1",le="1.0"} 10\n'
        'penstock_x_seconds_bucket{engine="0",le="+Inf"} 20\n'
        'penstock_x_seconds_bucket{engine="1",le="+Inf"} 20\n'
    )
    assert quantile(seen, "penstock_x_seconds", 0.25) == pytest.approx(0.5)


def test_bounds_that_are_none_are_passed_over() -> None:
    seen = read_samples(
        'penstock_x_seconds_bucket{le="much"} 10\npenstock_x_seconds_bucket{le="1.0"} 10\n'
    )
    assert quantile(seen, "penstock_x_seconds", 0.5) == pytest.approx(0.5)
