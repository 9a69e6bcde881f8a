"""Tolerances: calibrated at start, or learned from the first audits."""

from __future__ import annotations

import math

import pytest

from penstock.audits.compare import Difference
from penstock.audits.layout import BlockLayout, Stretch
from penstock.audits.tolerance import Tolerance

LAYOUT = BlockLayout(
    tuple(
        Stretch(str(number), 0, dtype, (8,)) for number, dtype in enumerate(["float32"] * 2 + ["?"])
    )
)


def differences(*values: float) -> list[Difference]:
    return [Difference(str(number), "", None, value) for number, value in enumerate(values)]


def test_each_layer_has_its_own_limit_within_bounds() -> None:
    tolerance = Tolerance(LAYOUT)
    tolerance.calibrate([differences(1e-6, 1e-4, 0.01), differences(1e-7, 3e-4, 0.05)])
    assert tolerance.is_calibrated
    assert tolerance.limits == pytest.approx([1e-4, 2.4e-3, 0.4])
    assert tolerance.span == pytest.approx((1e-4, 0.4))
    assert tolerance.exceeded(differences(1e-4, 2e-3, 0.3)) == []
    ((found, limit),) = tolerance.exceeded(differences(2e-4, 2e-3, 0.3))
    assert (found.layer, limit) == ("0", pytest.approx(1e-4))


def test_a_noisy_calibration_does_not_hide_faults() -> None:
    tolerance = Tolerance(LAYOUT)
    tolerance.calibrate([differences(0.5, math.inf, 1.0)])
    assert len(tolerance.exceeded(differences(0.6, 0.6, 0.95))) == 3


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_always_beyond(value: float) -> None:
    assert len(Tolerance(LAYOUT).exceeded(differences(value, value, value))) == 3


def test_it_learns_from_the_first_audits_and_then_no_more() -> None:
    tolerance = Tolerance(LAYOUT)
    coarse = tolerance.limits
    for _ in range(63):
        tolerance.learn(differences(1e-4, 1e-6, 0.0))
        assert tolerance.limits == coarse
    tolerance.learn(differences(1e-6, 1e-6, 0.0))
    assert tolerance.is_calibrated
    fine = tolerance.limits
    assert fine == pytest.approx([8e-4, 1e-4, 0.25])
    tolerance.learn(differences(1e-3, 1e-3, 0.5))
    assert tolerance.limits == fine
