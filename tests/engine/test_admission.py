from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.admission import Admission, Busy, TooLong
from penstock.engine.fairness import FairQueue, QueuePlace


def admission(lower: int | None = 20, max_waiting: int = 4) -> Admission:
    return Admission(16, num_device_blocks=10, num_lower_blocks=lower, max_waiting=max_waiting)


def test_what_the_device_cannot_hold_is_refused_with_the_numbers() -> None:
    book = admission()
    book.check(100, 60, num_waiting=0)
    with pytest.raises(
        TooLong, match=r"is 160 tokens here.* 10 blocks of 16\..*161 tokens \(101 .*60 .*11 blocks"
    ):
        book.check(101, 60, num_waiting=0)


def test_beyond_the_queue_one_is_told_when_to_come_again() -> None:
    book = admission()
    book.check(10, 10, num_waiting=3)
    with pytest.raises(Busy, match="4 requests are waiting, and the limit") as refusal:
        book.check(10, 10, num_waiting=4)
    assert refusal.value.retry_after_seconds == 2.0  # nothing is known of the pace yet
    for number in range(20):
        book.start(str(number), 16)
        book.end(str(number), now=10.0 * number)
    assert 15 < book.retry_seconds(4) <= 20
    assert book.retry_seconds(1000) == 60
    assert book.retry_seconds(0) == 1


def test_what_has_started_fits_all_tiers_together() -> None:
    book = admission()
    for name in "abc":
        assert book.fits(160)
        book.start(name, 160)
    assert book.num_reserved_blocks == 30
    assert not book.fits(1)
    book.start("a", 160)  # it resumes: counted once
    assert book.num_reserved_blocks == 30
    book.end("b", 0.0)
    book.end("b", 0.0)
    book.end("never seen", 0.0)
    assert book.fits(160)
    assert not book.fits(161)


def test_one_may_always_run_and_without_tiers_nothing_is_reserved() -> None:
    small = admission(lower=0)
    assert small.fits(160)
    small.start("a", 160)
    assert not small.fits(16)
    none = admission(lower=None)
    for name in "abc":
        none.start(name, 160)
    assert none.fits(160)


def test_a_tenant_with_a_hundred_prompts_does_not_hold_up_another() -> None:
    fair = FairQueue()
    turns = [fair.join("many", 100) for _ in range(5)]
    turns.append(fair.join("few", 100))
    order = [turn.tenant for turn in sorted(turns, key=lambda turn: turn.stamp)]
    assert order.index("few") <= 1


def test_one_tenant_alone_is_served_in_order() -> None:
    fair = FairQueue()
    stamps = [fair.join("", 10 + i % 3).stamp for i in range(10)]
    assert stamps == sorted(set(stamps))


def test_nobody_saves_up_turns() -> None:
    fair = FairQueue()
    for _ in range(10):
        fair.started(fair.join("busy", 100))
    assert fair.join("idle", 100).stamp >= 900
    assert fair.join("busy", 100).stamp == 1000


def test_work_that_was_given_up_while_it_waited_does_not_count() -> None:
    fair = FairQueue()
    doomed = [fair.join("north", 100) for _ in range(20)]
    others = [fair.join("south", 10) for _ in range(10)]
    behind = fair.join("north", 100)
    for turn in doomed:
        fair.ended(turn, 0)
    assert fair.refresh()
    assert behind.stamp == 0
    assert fair.join("north", 100).stamp == 100
    assert [turn.stamp for turn in others] == [10 * n for n in range(10)]


def test_work_that_ended_early_counts_as_what_was_done() -> None:
    fair = FairQueue()
    first, second = fair.join("north", 1000), fair.join("north", 1000)
    south = [fair.join("south", 100) for _ in range(5)]
    fair.started(first)
    fair.ended(first, 150)
    assert fair.refresh()
    assert second.stamp == 150
    assert [turn.stamp for turn in south] == [0, 100, 200, 300, 400]


def test_what_was_given_back_moves_nobody_before_those_that_have_started() -> None:
    fair = FairQueue()
    first, second = fair.join("north", 1000), fair.join("north", 1000)
    fair.started(first)
    for _ in range(5):
        fair.started(fair.join("south", 100))
    fair.ended(first, 1)
    late = fair.join("east", 100)
    assert fair.refresh()
    assert second.stamp == late.stamp == 400


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 9))))
def test_whatever_starts_and_ends_a_tenants_order_stays_and_nothing_is_remembered(
    acts: list[tuple[str, int, int]],
) -> None:
    fair = FairQueue()
    waiting: list[QueuePlace] = []
    running: list[QueuePlace] = []
    for tenant, work, act in acts:
        if act < 5:
            waiting.append(fair.join(tenant, work))
        elif act < 7 and waiting:
            turn = min(waiting, key=lambda turn: turn.stamp)
            waiting.remove(turn)
            fair.started(turn)
            running.append(turn)
        elif act == 7 and waiting:
            fair.ended(waiting.pop(work % len(waiting)), 0)
        elif running:
            fair.ended(running.pop(work % len(running)), work / 2)
        fair.refresh()
        for name in "abc":
            stamps = [turn.stamp for turn in waiting if turn.tenant == name]
            assert stamps == sorted(stamps)
    for turn in [*waiting, *running]:
        fair.ended(turn, 0)
    for work in (1e9, 0):  # the present passes all of it
        fair.started(fair.join("last", work))
    assert not fair._places
    assert not fair._stale
