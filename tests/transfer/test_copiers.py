"""Copies beside a computation that is not ours: never waited for, unless by a fence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pytest
from tools import TIMEOUT_SECONDS, key_of

from penstock.transfer.copiers import Copier, NoCopier, ThreadCopier
from penstock.transfer.io import Mover, MoveResult
from penstock.types import Outcome, Slot, Tier, Transfer, TransferId, Verdict

_ids = count(1)


def transfer(num: int = 1, *, deadline: float | None = None) -> Transfer:
    number = next(_ids)
    places = tuple(Slot(slot) for slot in range(num))
    keys = tuple(key_of((number, slot)) for slot in places)
    return Transfer(TransferId(number), Tier.DEVICE, Tier.HOST, keys, places, places, deadline)


class HeldMover(Mover):
    """Begins everything, and ends each transfer only when the test lets it."""

    def __init__(self) -> None:
        self._gates: dict[TransferId, threading.Event] = {}
        self._lock = threading.Lock()
        self.begun = threading.Semaphore(0)
        self.error: Exception | None = None

    def let_go(self, *transfers: Transfer) -> None:
        for order in transfers:
            self._gate(order.id).set()

    def move(self, transfer: Transfer) -> MoveResult:
        self.begun.release()
        self._gate(transfer.id).wait()
        if self.error is not None:
            raise self.error
        return MoveResult([Verdict.OK] * len(transfer.keys))

    def close(self) -> None:
        pass

    def _gate(self, transfer_id: TransferId) -> threading.Event:
        with self._lock:
            return self._gates.setdefault(transfer_id, threading.Event())


@pytest.fixture
def mover() -> HeldMover:
    return HeldMover()


@pytest.fixture
def copier(mover: HeldMover) -> Iterator[ThreadCopier]:
    copier = ThreadCopier(mover, 4)
    yield copier
    copier.close()


def ends(copier: Copier, num: int) -> dict[TransferId, Outcome]:
    found: dict[TransferId, Outcome] = {}
    while len(found) < num:
        for outcome in copier.poll():
            assert outcome.transfer_id not in found, "reported twice"
            found[outcome.transfer_id] = outcome
    return found


class Fencing:
    """A fence, waited for in a thread of its own."""

    def __init__(self, copier: Copier, *transfers: Transfer) -> None:
        self._ids = [order.id for order in transfers]
        self._copier = copier
        self._thread = threading.Thread(target=self._fence, daemon=True)
        self._thread.start()

    def _fence(self) -> None:
        self._copier.fence(self._ids)

    def holds(self) -> bool:
        self._thread.join(0.05)
        return self._thread.is_alive()

    def must_fall(self) -> None:
        self._thread.join(TIMEOUT_SECONDS)
        assert not self._thread.is_alive(), "the fence never fell"


def test_copies_are_started_and_not_waited_for(copier: ThreadCopier, mover: HeldMover) -> None:
    orders = [transfer(num) for num in (1, 2, 3)]
    copier.submit(orders)
    for _ in orders:
        assert mover.begun.acquire(timeout=TIMEOUT_SECONDS)
    assert copier.poll() == []
    mover.let_go(*orders)
    found = ends(copier, 3)
    assert {i: outcome.verdicts for i, outcome in found.items()} == {
        order.id: (Verdict.OK,) * len(order.keys) for order in orders
    }
    assert copier.poll() == []


def test_a_fence_waits_for_those_it_names_and_for_no_other(
    copier: ThreadCopier, mover: HeldMover
) -> None:
    first, second, other = transfer(), transfer(), transfer()
    copier.submit([first, second, other])
    fencing = Fencing(copier, first, second)
    assert fencing.holds()
    mover.let_go(first)
    assert fencing.holds(), "one of the two is still under way"
    mover.let_go(second)
    fencing.must_fall()
    assert {outcome.transfer_id for outcome in copier.poll()} == {first.id, second.id}, (
        "what ended under the fence is told by the next poll"
    )
    mover.let_go(other)
    ends(copier, 1)


def test_a_fence_of_what_has_ended_or_was_never_told_falls_at_once(
    copier: ThreadCopier, mover: HeldMover
) -> None:
    done, running, stranger = transfer(), transfer(), transfer()
    copier.submit([done, running])
    mover.let_go(done)
    ends(copier, 1)
    copier.fence([done.id, stranger.id])
    copier.fence([])
    mover.let_go(running)
    ends(copier, 1)


def test_a_copy_that_fails_ends_its_fence_too(copier: ThreadCopier, mover: HeldMover) -> None:
    order = transfer(2)
    mover.error = RuntimeError("no such memory")
    mover.let_go(order)
    copier.submit([order])
    copier.fence([order.id])
    (outcome,) = copier.poll()
    assert outcome.verdicts == (Verdict.FAILED,) * 2
    assert "no such memory" in outcome.error


def test_a_copy_past_its_deadline_is_not_begun(copier: ThreadCopier, mover: HeldMover) -> None:
    copier.submit([transfer(deadline=0.0)])
    (outcome,) = ends(copier, 1).values()
    assert outcome.verdicts == (Verdict.EXPIRED,)
    assert not mover.begun.acquire(blocking=False)


def test_what_comes_after_the_end_is_refused(mover: HeldMover) -> None:
    copier = ThreadCopier(mover, 1)
    copier.close()
    with pytest.raises(RuntimeError, match="stopped"):
        copier.submit([transfer()])


def test_steps_are_timed_from_their_start_to_their_stop(copier: ThreadCopier) -> None:
    copier.start_timer(3)
    copier.start_timer(4)
    assert copier.take_times() == {}
    copier.stop_timer(3)
    copier.stop_timer(7)  # never started
    times = copier.take_times()
    assert list(times) == [3]
    assert times[3] >= 0
    assert copier.take_times() == {}
    copier.stop_timer(4)
    assert list(copier.take_times()) == [4]


def test_no_copier_refuses_all_and_holds_nobody_up() -> None:
    copier: Copier = NoCopier()
    order = transfer()
    with pytest.raises(RuntimeError, match="see the log"):
        copier.submit([order])
    copier.fence([order.id])
    copier.start_timer(1)
    copier.stop_timer(1)
    assert copier.poll() == []
    assert copier.take_times() == {}
    copier.close()
