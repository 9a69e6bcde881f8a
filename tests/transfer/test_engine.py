from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from tools import TIMEOUT_SECONDS
from transfers import LOAD, SAVE, outcomes, transfer

from penstock.clock import ManualClock
from penstock.transfer.engine import TransferEngine
from penstock.transfer.io import Mover, MoveResult
from penstock.transfer.lanes import LaneSpec
from penstock.types import Direction, Tier, Transfer, TransferId, Verdict


class GatedMover(Mover):
    """Notes what it is given, and lets nothing end before the gate opens."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.gate = threading.Event()
        self.begun: list[TransferId] = []
        self._begins = threading.Semaphore(0)
        if is_open:
            self.gate.set()

    def close(self) -> None:
        pass

    def move(self, transfer: Transfer) -> MoveResult:
        self.begun.append(transfer.id)
        self._begins.release()
        self.gate.wait()
        return MoveResult([Verdict.OK] * len(transfer.keys))

    def await_begin(self) -> None:
        assert self._begins.acquire(timeout=TIMEOUT_SECONDS), "no transfer was begun"


class Script(Mover):
    """A mover that does for each transfer what a test says."""

    def __init__(self, move: Callable[[Transfer], MoveResult]) -> None:
        self.move = move

    def close(self) -> None:
        pass


Engines = Callable[..., TransferEngine]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def engines(clock: ManualClock) -> Iterator[Engines]:
    """Makes engines; at the end every gate is opened and every thread must stop."""
    made: list[TransferEngine] = []
    movers: list[Mover] = []

    def make(
        mover: Mover, *, threads: int = 1, max_queued: int = 4, **others: Mover
    ) -> TransferEngine:
        lanes = {Tier.DISK: LaneSpec(mover, threads)}
        lanes |= {Tier[name.upper()]: LaneSpec(other, threads) for name, other in others.items()}
        movers.extend(lane.mover for lane in lanes.values())
        made.append(TransferEngine(lanes, clock, max_queued=max_queued))
        return made[-1]

    yield make
    for mover in movers:
        if isinstance(mover, GatedMover):
            mover.gate.set()
    for engine in made:
        assert engine.close(TIMEOUT_SECONDS)


def occupy(engine: TransferEngine, mover: GatedMover, link: Tier = Tier.DISK) -> Transfer:
    """Keep the lane's only thread busy until the gate opens."""
    first = transfer(SAVE, link)
    assert engine.submit(first)
    mover.await_begin()
    return first


def test_a_transfer_is_run_and_reported_once(engines: Engines) -> None:
    engine = engines(GatedMover(is_open=True))
    order = transfer(num=3)
    assert engine.submit(order)
    (outcome,) = outcomes(engine, 1).values()
    assert outcome.transfer_id == order.id
    assert outcome.verdicts == (Verdict.OK,) * 3
    assert outcome.seconds >= 0
    assert engine.poll() == []


def test_what_the_mover_says_of_each_block_is_passed_on(engines: Engines) -> None:
    verdicts = [Verdict.OK, Verdict.CORRUPT, Verdict.MISSING]
    engine = engines(Script(lambda transfer: MoveResult(verdicts, "words")))
    engine.submit(transfer(num=3))
    (outcome,) = outcomes(engine, 1).values()
    assert outcome.verdicts == tuple(verdicts)
    assert outcome.error == "words"


@pytest.mark.parametrize("direction", [LOAD, SAVE])
def test_queues_are_bounded(engines: Engines, direction: Direction) -> None:
    mover = GatedMover()
    engine = engines(mover, max_queued=4)
    first = occupy(engine, mover)
    queued = [transfer(direction) for _ in range(4)]
    for number, order in enumerate(queued):
        assert engine.has_room(Tier.DISK, direction)
        assert engine.depth(Tier.DISK, direction) == number
        assert engine.submit(order)
    assert not engine.has_room(Tier.DISK, direction)
    refused = transfer(direction)
    assert not engine.submit(refused)
    assert engine.depth(Tier.DISK, direction) == 4
    other = SAVE if direction is LOAD else LOAD
    assert engine.has_room(Tier.DISK, other)  # a queue for each direction
    mover.gate.set()
    found = outcomes(engine, 5)
    assert set(found) == {first.id, *(order.id for order in queued)}
    assert engine.has_room(Tier.DISK, direction)
    assert engine.poll() == []


def test_loads_go_before_saves_and_each_in_order(engines: Engines) -> None:
    mover = GatedMover()
    engine = engines(mover)
    first = occupy(engine, mover)
    saves = [transfer(SAVE) for _ in range(3)]
    loads = [transfer(LOAD) for _ in range(3)]
    for save, load in zip(saves, loads, strict=True):
        assert engine.submit(save)
        assert engine.submit(load)
    mover.gate.set()
    outcomes(engine, 7)
    assert mover.begun == [order.id for order in (first, *loads, *saves)]


def test_a_queued_transfer_can_be_cancelled(engines: Engines) -> None:
    mover = GatedMover()
    engine = engines(mover)
    first = occupy(engine, mover)
    kept, cancelled = transfer(num=2), transfer(num=2)
    engine.submit(kept)
    engine.submit(cancelled)
    engine.cancel(cancelled.id)
    (outcome,) = outcomes(engine, 1).values()
    assert outcome.transfer_id == cancelled.id
    assert outcome.verdicts == (Verdict.CANCELLED,) * 2
    assert engine.depth(Tier.DISK, LOAD) == 1
    mover.gate.set()
    assert set(outcomes(engine, 2)) == {first.id, kept.id}
    assert cancelled.id not in mover.begun


def test_cancelling_makes_room(engines: Engines) -> None:
    mover = GatedMover()
    engine = engines(mover, max_queued=1)
    occupy(engine, mover)
    order = transfer()
    engine.submit(order)
    assert not engine.has_room(Tier.DISK, LOAD)
    engine.cancel(order.id)
    assert engine.submit(transfer())


def test_a_running_transfer_is_left_to_end(engines: Engines) -> None:
    mover = GatedMover()
    engine = engines(mover)
    first = occupy(engine, mover)
    engine.cancel(first.id)
    assert engine.poll() == []
    mover.gate.set()
    (outcome,) = outcomes(engine, 1).values()
    assert outcome.verdicts == (Verdict.OK,)


def test_cancelling_what_is_unknown_or_over_changes_nothing(engines: Engines) -> None:
    engine = engines(GatedMover(is_open=True))
    order = transfer()
    engine.submit(order)
    outcomes(engine, 1)
    engine.cancel(order.id)
    engine.cancel(TransferId(10**9))
    assert engine.poll() == []


def test_a_queued_transfer_expires(engines: Engines, clock: ManualClock) -> None:
    mover = GatedMover()
    engine = engines(mover)
    first = occupy(engine, mover)
    late = transfer(num=2, deadline=clock.now() + 1.0)
    exact = transfer(deadline=clock.now() + 2.0)
    in_time = transfer(deadline=clock.now() + 2.5)
    for order in (late, exact, in_time):
        engine.submit(order)
    clock.advance(2.0)
    mover.gate.set()
    found = outcomes(engine, 4)
    assert found[late.id].verdicts == (Verdict.EXPIRED,) * 2
    assert found[exact.id].verdicts == (Verdict.EXPIRED,)
    assert found[in_time.id].verdicts == (Verdict.OK,)
    assert mover.begun == [first.id, in_time.id]


def test_a_running_transfer_does_not_expire(engines: Engines, clock: ManualClock) -> None:
    mover = GatedMover()
    engine = engines(mover)
    order = transfer(deadline=clock.now() + 1.0)
    engine.submit(order)
    mover.await_begin()
    clock.advance(100.0)
    mover.gate.set()
    assert outcomes(engine, 1)[order.id].verdicts == (Verdict.OK,)


@pytest.mark.parametrize("error", [ValueError("odd"), OSError(5, "dead"), AssertionError()])
def test_a_mover_that_raises_costs_only_its_blocks(
    engines: Engines, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    bad = transfer(num=3)

    def move(order: Transfer) -> MoveResult:
        if order is bad:
            raise error
        return MoveResult([Verdict.OK] * len(order.keys))

    engine = engines(Script(move))
    good = [transfer(), transfer(SAVE)]
    for order in (good[0], bad, good[1]):
        engine.submit(order)
    found = outcomes(engine, 3)
    assert found[bad.id].verdicts == (Verdict.FAILED,) * 3
    assert found[bad.id].error == repr(error)
    assert all(found[order.id].verdicts == (Verdict.OK,) for order in good)
    assert f"transfer {bad.id} failed" in caplog.text
    engine.submit(again := transfer())  # the thread is still there
    assert outcomes(engine, 1)[again.id].verdicts == (Verdict.OK,)


def test_close_finishes_saves_and_cancels_loads(engines: Engines) -> None:
    mover = GatedMover()
    engine = engines(mover)
    first = occupy(engine, mover)
    saves = [transfer(SAVE) for _ in range(3)]
    loads = [transfer(LOAD, num=2) for _ in range(3)]
    for save, load in zip(saves, loads, strict=True):
        engine.submit(save)
        engine.submit(load)
    assert not engine.close(0.0)  # the gate is shut
    cancelled = outcomes(engine, 3)
    assert {key: outcome.verdicts for key, outcome in cancelled.items()} == {
        load.id: (Verdict.CANCELLED,) * 2 for load in loads
    }
    mover.gate.set()
    assert engine.close(TIMEOUT_SECONDS)
    done = outcomes(engine, 4)
    assert set(done) == {first.id, *(save.id for save in saves)}
    assert all(outcome.verdicts == (Verdict.OK,) for outcome in done.values())
    assert mover.begun == [order.id for order in (first, *saves)]


def test_a_closed_engine_takes_nothing_more(engines: Engines) -> None:
    engine = engines(GatedMover(is_open=True))
    assert engine.close(TIMEOUT_SECONDS)
    for direction in (LOAD, SAVE):
        assert not engine.has_room(Tier.DISK, direction)
        assert not engine.submit(transfer(direction))
    assert engine.poll() == []
    assert engine.close(TIMEOUT_SECONDS)  # closing twice is no harm


def test_a_hung_mover_holds_up_neither_other_lanes_nor_close(engines: Engines) -> None:
    hung, host = GatedMover(), GatedMover(is_open=True)
    engine = engines(hung, host=host)
    stuck = occupy(engine, hung)
    orders = [transfer(direction, Tier.HOST) for direction in (LOAD, SAVE) for _ in range(4)]
    for order in orders:
        while not engine.has_room(Tier.HOST, order.direction):
            host.await_begin()
        assert engine.submit(order)
    assert set(outcomes(engine, 8)) == {order.id for order in orders}
    assert not engine.close(0.05)
    hung.gate.set()
    assert engine.close(TIMEOUT_SECONDS)
    assert set(outcomes(engine, 1)) == {stuck.id}


def test_a_hung_transfer_leaves_the_other_threads_of_its_lane_at_work(engines: Engines) -> None:
    gate, begun = threading.Event(), threading.Event()
    stuck = transfer()

    def move(order: Transfer) -> MoveResult:
        if order is stuck:
            begun.set()
            gate.wait()
        return MoveResult([Verdict.OK] * len(order.keys))

    engine = engines(Script(move), threads=2)
    try:
        engine.submit(stuck)
        assert begun.wait(TIMEOUT_SECONDS)
        others = [transfer(), transfer(SAVE)]
        for order in others:
            engine.submit(order)
        assert set(outcomes(engine, 2)) == {order.id for order in others}
    finally:
        gate.set()
    assert set(outcomes(engine, 1)) == {stuck.id}


def test_many_threads_lose_and_repeat_nothing(engines: Engines) -> None:
    engine = engines(GatedMover(is_open=True), threads=4, max_queued=10_000)
    orders = [transfer(LOAD if number % 3 else SAVE) for number in range(2000)]
    parts = [orders[start::4] for start in range(4)]

    def submit(part: list[Transfer]) -> None:
        for order in part:
            assert engine.submit(order)

    threads = [threading.Thread(target=submit, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    found = outcomes(engine, 2000)
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    assert set(found) == {order.id for order in orders}
    assert engine.poll() == []


def test_wait_ends_by_itself_when_nothing_comes(engines: Engines) -> None:
    engine = engines(GatedMover(is_open=True))
    assert not engine.wait(0.0)
    engine.submit(transfer())
    assert engine.wait(TIMEOUT_SECONDS)
    assert engine.wait(0.0)  # until it is polled
    engine.poll()
    assert not engine.wait(0.0)


def test_a_mover_may_know_what_the_link_took(engines: Engines) -> None:
    """What its thread waited for, say the end of a computation, is not the link's doing."""
    engine = engines(Script(lambda transfer: MoveResult([Verdict.OK], seconds=0.25)))
    assert engine.submit(transfer())
    assert engine.wait(TIMEOUT_SECONDS)
    assert [outcome.seconds for outcome in engine.poll()] == [0.25]
