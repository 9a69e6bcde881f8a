from __future__ import annotations

import pytest

from penstock.engine.admission import Admission, Busy, TooLong
from penstock.engine.fairness import FairQueue


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
    with pytest.raises(Busy, match="4 requests are waiting, and no more than 4 may") as refusal:
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
    stamps = [("many", fair.stamp("many", 100)) for _ in range(5)]
    stamps.append(("few", fair.stamp("few", 100)))
    order = [name for name, _ in sorted(stamps, key=lambda pair: pair[1])]
    assert order.index("few") <= 1


def test_one_tenant_alone_is_served_in_order() -> None:
    fair = FairQueue()
    stamps = [fair.stamp("", 10 + i % 3) for i in range(10)]
    assert stamps == sorted(set(stamps))


def test_nobody_saves_up_turns() -> None:
    fair = FairQueue()
    for _ in range(10):
        fair.started(fair.stamp("busy", 100))
    assert fair.stamp("idle", 100) >= 900
    assert fair.stamp("busy", 100) == 1000
