"""How long to wait for KV that another server computes."""

from __future__ import annotations

import pytest

from penstock.costs.patience import (
    IF_UNKNOWN_SECONDS,
    MAX_SECONDS,
    MIN_SECONDS,
    prefill_patience,
)


@pytest.mark.parametrize(
    ("compute_seconds", "waits"),
    [
        (0.0, MIN_SECONDS),
        (4.0, 8.0),
        (1e6, MAX_SECONDS),
        (float("inf"), MAX_SECONDS),
        (None, IF_UNKNOWN_SECONDS),
    ],
)
def test_twice_as_long_as_computing_takes(compute_seconds: float | None, waits: float) -> None:
    assert prefill_patience(compute_seconds) == waits
    assert prefill_patience(compute_seconds, at_most=3.0) == min(waits, 3.0)
