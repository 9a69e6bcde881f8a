from __future__ import annotations

from penstock.books.health import MAX_FAULTS, MAX_REST_SECONDS, MIN_REST_SECONDS, Health


def fail_until_rest(health: Health, now: float) -> float:
    for _ in range(MAX_FAULTS):
        if rest := health.fault(now):
            return rest
    raise AssertionError("it never rests")


def test_a_few_faults_are_forgiven() -> None:
    health = Health()
    for _ in range(10):
        for _ in range(MAX_FAULTS - 1):
            assert not health.fault(0.0)
        assert not health.well()
    assert not health.resting


def test_rests_grow_up_to_a_bound_and_end_by_time() -> None:
    health, now, rests = Health(), 0.0, []
    for _ in range(12):
        rests.append(fail_until_rest(health, now))
        health.tick(now + rests[-1] / 2)
        assert health.resting
        now += rests[-1]
        health.tick(now)
        assert not health.resting
    assert rests[:3] == [MIN_REST_SECONDS, 2 * MIN_REST_SECONDS, 4 * MIN_REST_SECONDS]
    assert rests[-1] == MAX_REST_SECONDS


def test_after_a_rest_one_fault_is_enough_and_one_success_heals() -> None:
    health = Health()
    now = fail_until_rest(health, 0.0)
    health.tick(now)
    assert health.fault(now) == 2 * MIN_REST_SECONDS
    assert health.well()
    assert not health.resting
    assert fail_until_rest(health, now) == MIN_REST_SECONDS
