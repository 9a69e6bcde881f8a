"""A mover that waits for nothing: it has no threads, and is always fed some transfers ahead."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from tools import TIMEOUT_SECONDS
from transfers import LOAD, SAVE, outcomes, transfer

from penstock.clock import ManualClock
from penstock.transfer.engine import TransferEngine
from penstock.transfer.io import Mover, MoveResult
from penstock.transfer.lanes import LaneSpec
from penstock.transfer.pool import DaemonPool
from penstock.types import Direction, Tier, Transfer, TransferId, Verdict

AHEAD = 3


class Stream(Mover):
    """Notes what it is given, and where; ends it when told to."""

    max_ahead = AHEAD

    def __init__(self) -> None:
        self.begun: list[TransferId] = []
        self.threads: set[int] = set()
        self.is_closed = False
        self._open: dict[TransferId, tuple[Transfer, Future[MoveResult]]] = {}

    def move(self, transfer: Transfer) -> Future[MoveResult]:
        self.begun.append(transfer.id)
        self.threads.add(threading.get_ident())
        future: Future[MoveResult] = Future()
        self._open[transfer.id] = (transfer, future)
        return future

    def end(self, transfer_id: TransferId) -> None:
        transfer, future = self._open.pop(transfer_id)
        future.set_result(MoveResult([Verdict.OK] * len(transfer.keys)))

    def fail(self, transfer_id: TransferId) -> None:
        self._open.pop(transfer_id)[1].set_exception(RuntimeError("the device fell off the bus"))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def engine(stream: Stream, clock: ManualClock) -> Iterator[TransferEngine]:
    engine = engine_of(stream, clock)
    yield engine
    for transfer_id in stream.begun:
        if transfer_id in stream._open:
            stream.end(transfer_id)


def engine_of(mover: Mover, clock: ManualClock, max_queued: int = 64) -> TransferEngine:
    return TransferEngine({Tier.HOST: LaneSpec(mover, 0)}, clock, max_queued=max_queued)


def submit(engine: TransferEngine, *directions: Direction) -> list[TransferId]:
    orders = [transfer(direction, Tier.HOST) for direction in directions]
    for order in orders:
        assert engine.submit(order)
    return [order.id for order in orders]


def test_some_of_each_direction_are_begun_by_whoever_asks(
    engine: TransferEngine, stream: Stream
) -> None:
    loads = submit(engine, *[LOAD] * (AHEAD + 2))
    saves = submit(engine, *[SAVE] * (AHEAD + 1))
    assert stream.begun == loads[:AHEAD] + saves[:AHEAD]
    assert stream.threads == {threading.get_ident()}
    assert (engine.depth(Tier.HOST, LOAD), engine.depth(Tier.HOST, SAVE)) == (2, 1)


def test_the_next_one_is_begun_by_the_end_of_another_of_its_direction(
    engine: TransferEngine, stream: Stream
) -> None:
    loads = submit(engine, *[LOAD] * (AHEAD + 2))
    saves = submit(engine, *[SAVE] * (AHEAD + 1))
    stream.end(loads[1])
    assert stream.begun[2 * AHEAD :] == [loads[AHEAD]]
    stream.fail(saves[0])
    assert stream.begun[2 * AHEAD :] == [loads[AHEAD], saves[AHEAD]]
    found = outcomes(engine, 2)
    assert found[loads[1]].verdicts == (Verdict.OK,)
    assert found[saves[0]].verdicts == (Verdict.FAILED,)
    assert "fell off the bus" in found[saves[0]].error


def test_what_is_not_begun_can_be_cancelled(engine: TransferEngine, stream: Stream) -> None:
    loads = submit(engine, *[LOAD] * (AHEAD + 2))
    engine.cancel(loads[0])
    engine.cancel(loads[AHEAD])
    assert [outcome.transfer_id for outcome in engine.poll()] == [loads[AHEAD]]
    stream.end(loads[0])
    assert stream.begun[AHEAD:] == [loads[AHEAD + 1]]


def test_what_waited_past_its_deadline_is_not_begun(
    engine: TransferEngine, stream: Stream, clock: ManualClock
) -> None:
    loads = submit(engine, *[LOAD] * AHEAD)
    late = transfer(LOAD, Tier.HOST, deadline=clock.now() + 1)
    assert engine.submit(late)
    in_time = submit(engine, LOAD)
    clock.advance(2)
    stream.end(loads[0])
    assert stream.begun[AHEAD:] == in_time
    assert outcomes(engine, 2)[late.id].verdicts == (Verdict.EXPIRED,)


def test_an_error_at_the_beginning_costs_that_transfer_alone(clock: ManualClock) -> None:
    class Picky(Stream):
        def move(self, transfer: Transfer) -> Future[MoveResult]:
            if len(self.begun) == 1:
                self.begun.append(transfer.id)
                raise RuntimeError("no")
            return super().move(transfer)

    stream = Picky()
    engine = engine_of(stream, clock)
    loads = submit(engine, *[LOAD] * (AHEAD + 1))
    assert stream.begun == loads  # the one that failed is not ahead of anything
    for number in (0, *range(2, AHEAD + 1)):
        stream.end(loads[number])
    assert outcomes(engine, AHEAD + 1)[loads[1]].verdicts == (Verdict.FAILED,)
    assert engine.close()


def test_transfers_that_end_at_once_do_not_pile_up_on_the_stack(clock: ManualClock) -> None:
    class AtOnce(Stream):
        def move(self, transfer: Transfer) -> Future[MoveResult]:
            future = super().move(transfer)
            if transfer.id != first:
                self.end(transfer.id)
            return future

    stream = AtOnce()
    stream.max_ahead = 1
    engine = engine_of(stream, clock, max_queued=5000)
    orders = [transfer(SAVE, Tier.HOST) for _ in range(5000)]
    first = orders[0].id
    for order in orders:
        assert engine.submit(order)
    stream.end(first)
    assert len(outcomes(engine, 5000)) == 5000
    assert engine.close()


def test_closing_gives_up_queued_loads_and_ends_queued_saves(
    engine: TransferEngine, stream: Stream
) -> None:
    loads = submit(engine, *[LOAD] * (AHEAD + 1))
    saves = submit(engine, *[SAVE] * (AHEAD + 1))
    assert not engine.close(0.01)
    assert not stream.is_closed
    assert not engine.has_room(Tier.HOST, LOAD)
    for transfer_id in [*loads[:AHEAD], *saves]:
        stream.end(transfer_id)
    found = outcomes(engine, 2 * AHEAD + 2)
    assert found[loads[AHEAD]].verdicts == (Verdict.CANCELLED,)
    assert all(found[transfer_id].verdicts == (Verdict.OK,) for transfer_id in saves)
    assert engine.close(TIMEOUT_SECONDS)
    assert stream.is_closed


def test_nothing_is_lost_or_repeated_between_threads(clock: ManualClock) -> None:
    """Asked for here, ended there, and never more ahead than wanted."""

    class Busy(Stream):
        def __init__(self) -> None:
            super().__init__()
            self.waiters = DaemonPool(4, "test-waiter")
            self.lock = threading.Lock()
            self.num_ahead = dict.fromkeys(Direction, 0)
            self.most = 0

        def move(self, transfer: Transfer) -> Future[MoveResult]:
            with self.lock:
                self.num_ahead[transfer.direction] += 1
                self.most = max(self.most, *self.num_ahead.values())

            def finish() -> MoveResult:
                with self.lock:
                    self.num_ahead[transfer.direction] -= 1
                if rng.random() < 0.1:
                    raise RuntimeError("now and then")
                return MoveResult([Verdict.OK])

            return self.waiters.submit(finish)

    rng = random.Random(5)
    stream = Busy()
    engine = engine_of(stream, clock, max_queued=10_000)
    orders = [transfer(rng.choice((LOAD, SAVE)), Tier.HOST) for _ in range(3000)]
    for order in orders:
        assert engine.submit(order)
    found = outcomes(engine, 3000)
    assert set(found) == {order.id for order in orders}
    assert stream.most <= AHEAD
    assert engine.close(TIMEOUT_SECONDS)
    stream.waiters.close()
