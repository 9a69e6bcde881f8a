"""A worker's side: each load is told to vLLM once, each transfer to the scheduler's side once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import count

import pytest
from tools import TIMEOUT_SECONDS, key_of, spec

from penstock.connectors.vllm.orders import Load, Orders, Reports
from penstock.connectors.vllm.worker import Results, WorkerSide
from penstock.stores.host import HostArena
from penstock.transfer.copiers import NoCopier, ThreadCopier
from penstock.transfer.io import Moved, Mover
from penstock.transfer.seals import Seals
from penstock.types import Direction, Outcome, Slot, Tier, Transfer, TransferId, Verdict

OK, MISSING, FAILED = Verdict.OK, Verdict.MISSING, Verdict.FAILED
NOTHING = Results(set(), set())
_ids = count(1)
_steps = count(1)


def load(*blocks: int) -> Transfer:
    number = next(_ids)
    places = tuple(map(Slot, blocks))
    keys = tuple(key_of((number, block)) for block in blocks)
    host = tuple(Slot(index) for index in range(len(blocks)))
    return Transfer(TransferId(number), Tier.HOST, Tier.DEVICE, keys, host, places)


def save(*blocks: int) -> Transfer:
    order = load(*blocks)
    return Transfer(
        order.id, Tier.DEVICE, Tier.HOST, order.keys, order.target_slots, order.source_slots
    )


class GatedMover(Mover):
    """Ends loads or saves only while their gate is open; blocks named `missing` do not arrive."""

    def __init__(self) -> None:
        self.gates = {direction: threading.Event() for direction in Direction}
        self.missing: set[int] = set()
        self.moved: list[TransferId] = []

    def move(self, transfer: Transfer) -> Moved:
        self.gates[transfer.direction].wait()
        self.moved.append(transfer.id)
        if transfer.direction is Direction.SAVE:
            return Moved([OK] * len(transfer.keys))
        return Moved([MISSING if b in self.missing else OK for b in transfer.target_slots])

    def close(self) -> None:
        pass


class Desk:
    def __init__(self) -> None:
        self.mover = GatedMover()
        self.copier = ThreadCopier(self.mover, 2)
        self.host = HostArena(spec(), 8 * spec().stride_bytes)
        self.seals = Seals(self.host)
        self.worker = WorkerSide(self.copier, self.seals)

    def open(self) -> None:
        for gate in self.mover.gates.values():
            gate.set()

    def step(self, orders: Orders) -> Results:
        """All hooks of a step, in vLLM's order."""
        orders.step = next(_steps)
        self.worker.begin(orders)
        self.worker.load(orders)
        self.worker.save(orders)
        return self.worker.results()

    def settle(self, *transfers: Transfer) -> None:
        """Wait until these have ended; nobody has been told of it yet."""
        self.open()
        self.copier.fence([transfer.id for transfer in transfers])


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.open()
    desk.worker.close()


def test_a_request_is_ready_once_all_its_blocks_have_arrived(desk: Desk) -> None:
    first, second = load(3, 4), load(5)
    assert desk.step(Orders(0, loads=[Load("r", first)])) == NOTHING
    orders = Orders(0, loads=[Load("r", second)], complete={"r": ()})
    assert desk.step(orders) == NOTHING
    desk.settle(first, second)
    assert desk.step(Orders(0)) == Results({"r"}, set())
    assert desk.step(Orders(0)) == NOTHING, "vLLM must not hear twice"
    reports = desk.worker.take_reports()
    assert {i: r.verdicts for i, r in reports.transfers.items()} == {
        first.id: (OK, OK),
        second.id: (OK,),
    }
    assert desk.worker.take_reports() == Reports()


def test_a_request_waits_for_what_its_load_still_has_to_bring(desk: Desk) -> None:
    order = load(3)
    desk.step(Orders(0, loads=[Load("r", order)]))
    desk.settle(order)
    assert desk.step(Orders(0)) == NOTHING, "more is to come from the disk"
    assert desk.step(Orders(0, complete={"r": (Slot(8), Slot(9))})) == Results({"r"}, {8, 9})


def test_blocks_that_did_not_arrive_are_told_with_the_request(desk: Desk) -> None:
    desk.mover.missing = {4}
    mine, other = load(3, 4, 5), load(6)
    orders = Orders(
        0,
        loads=[Load("r", mine), Load("other", other)],
        complete={"r": (Slot(9),), "other": ()},
    )
    desk.step(orders)
    desk.settle(mine, other)
    assert desk.step(Orders(0)) == Results({"r", "other"}, {4, 9})


def test_a_request_of_which_nothing_could_be_brought_is_ready_at_once(desk: Desk) -> None:
    assert desk.step(Orders(0, complete={"r": (Slot(1),)})) == Results({"r"}, {1})


def test_a_request_may_be_loaded_for_again(desk: Desk) -> None:
    for block in (1, 2):
        order = load(block)
        desk.step(Orders(0, loads=[Load("r", order)], complete={"r": ()}))
        desk.settle(order)
        assert desk.step(Orders(0)) == Results({"r"}, set())


def test_the_fence_comes_after_the_saves_before_and_before_all_else(desk: Desk) -> None:
    earlier = save(1)
    desk.step(Orders(0, saves_after=[earlier]))
    before = save(2)
    orders = Orders(next(_steps), saves_before=[before], fence=[earlier.id, before.id])
    begun = threading.Thread(target=desk.worker.begin, args=(orders,), daemon=True)
    begun.start()
    begun.join(0.05)
    assert begun.is_alive(), "the step began before its blocks were saved"
    desk.mover.gates[Direction.SAVE].set()
    begun.join(TIMEOUT_SECONDS)
    assert not begun.is_alive()
    assert set(desk.mover.moved) == {earlier.id, before.id}


def test_the_hook_that_vllm_calls_once_or_twice_saves_once(desk: Desk) -> None:
    order = save(1)
    orders = Orders(next(_steps), saves_after=[order], is_timed=True)
    desk.open()
    desk.worker.begin(orders)
    desk.worker.save(orders)
    desk.worker.save(orders)
    desk.settle(order)
    desk.worker.results()
    reports = desk.worker.take_reports()
    assert list(reports.transfers) == [order.id]
    assert list(reports.step_seconds) == [orders.step]
    assert desk.mover.moved == [order.id]


def test_only_steps_that_are_asked_for_are_timed(desk: Desk) -> None:
    desk.step(Orders(0))
    assert desk.worker.take_reports() == Reports()
    desk.step(Orders(0, is_timed=True))
    assert len(desk.worker.take_reports().step_seconds) == 1


def test_a_worker_that_cannot_copy_loses_its_blocks_and_holds_nobody_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = WorkerSide(NoCopier())
    brought, kept, last, now = load(3, 4), save(5), save(6), load(7)
    orders = Orders(
        1,
        saves_before=[kept],
        fence=[kept.id],
        loads_now=[now],
        loads=[Load("r", brought)],
        complete={"r": ()},
        saves_after=[last],
    )
    worker.begin(orders)
    worker.load(orders)
    worker.save(orders)
    assert worker.results() == Results({"r"}, {3, 4, 7})
    reports = worker.take_reports()
    assert {i: r.verdicts for i, r in reports.transfers.items()} == {
        brought.id: (FAILED, FAILED),
        kept.id: (FAILED,),
        last.id: (FAILED,),
        now.id: (FAILED,),
    }
    assert "nothing can be copied here" in reports.transfers[kept.id].error
    assert "cannot be started" in caplog.text
    worker.close()


# Loads that the step waits for.


def test_a_step_begins_once_its_own_loads_have_ended(desk: Desk) -> None:
    order = load(3)
    desk.seals.seal(order.keys, order.source_slots)
    orders = Orders(next(_steps), loads_now=[order])
    loaded = threading.Thread(target=desk.worker.load, args=(orders,), daemon=True)
    loaded.start()
    loaded.join(0.05)
    assert loaded.is_alive(), "the step computes what has not been loaded"
    desk.open()
    loaded.join(TIMEOUT_SECONDS)
    assert not loaded.is_alive()
    assert desk.worker.results() == NOTHING, "nobody waits to hear of it"
    assert desk.worker.take_reports().transfers[order.id].verdicts == (OK,)


def test_blocks_that_a_step_waited_for_in_vain_are_bad_and_no_request_is_ready(desk: Desk) -> None:
    desk.open()
    order = load(3, 4)
    desk.seals.seal(order.keys[:1], order.source_slots[:1])  # the other is not what it should be
    assert desk.step(Orders(0, loads_now=[order])) == Results(set(), {4})
    assert desk.step(Orders(0)) == NOTHING
    desk.mover.missing = {7}
    late = load(7, 8)
    desk.seals.seal(late.keys, late.source_slots)
    assert desk.step(Orders(0, loads_now=[late])) == Results(set(), {7})


# The books are gone.


def test_at_the_last_all_that_may_wait_are_told(desk: Desk) -> None:
    order = load(1)
    desk.step(Orders(0, loads=[Load("half", order)]))
    desk.settle(order)
    desk.step(Orders(0))
    orders = Orders(-1, complete={"half": (Slot(1), Slot(2)), "new": (Slot(3),)})
    orders.is_last_resort = True
    desk.worker.begin(orders)
    desk.worker.load(orders)
    desk.worker.save(orders)
    assert desk.worker.results() == Results({"half", "new"}, {1, 2, 3})


def test_at_the_last_vllm_does_not_hear_twice(desk: Desk) -> None:
    """The scheduler's process may not know yet that the request is ready."""
    order = load(1)
    desk.step(Orders(0, loads=[Load("r", order)], complete={"r": ()}))
    desk.settle(order)
    assert desk.step(Orders(0)) == Results({"r"}, set())
    for _ in range(2):
        last = Orders(-1, complete={"r": (Slot(1),)}, is_last_resort=True)
        desk.worker.load(last)
        assert desk.worker.results() == NOTHING


@pytest.mark.parametrize("is_told", [True, False], ids=["part of it told", "nothing told yet"])
def test_at_the_last_a_request_that_was_ready_once_before_is_told(
    desk: Desk, is_told: bool
) -> None:
    first, second = load(1), load(2)
    desk.step(Orders(0, loads=[Load("r", first)], complete={"r": ()}))
    desk.settle(first)
    assert desk.step(Orders(0)) == Results({"r"}, set())
    for _ in range(3):  # it runs, is preempted, and waits again
        desk.step(Orders(0))
    if is_told:
        desk.step(Orders(0, loads=[Load("r", second)]))
        desk.settle(second)
    desk.worker.load(Orders(-1, complete={"r": (Slot(2), Slot(3))}, is_last_resort=True))
    assert desk.worker.results() == Results({"r"}, {2, 3})


class Breaking(NoCopier):
    """Takes copies, and breaks when it is asked about them."""

    is_closed = False

    def submit(self, transfers: Sequence[Transfer]) -> None:
        pass

    def poll(self) -> list[Outcome]:
        raise OSError("nobody expected this")

    def close(self) -> None:
        self.is_closed = True


def test_a_worker_that_gives_up_loses_what_was_under_way_and_tells_everybody() -> None:
    copier = Breaking()
    worker = WorkerSide(copier)
    saved, loaded = save(1), load(2)
    orders = Orders(1, saves_before=[saved], loads=[Load("r", loaded)], complete={"r": ()})
    worker.begin(orders)
    worker.load(orders)
    with pytest.raises(OSError, match="nobody expected"):
        worker.results()
    worker.give_up()
    assert copier.is_closed
    assert worker.results() == Results({"r"}, set(loaded.target_slots))
    reports = worker.take_reports().transfers
    assert set(reports) == {saved.id, loaded.id}
    assert all(set(report.verdicts) == {Verdict.FAILED} for report in reports.values())
    another = save(3)
    worker.save(Orders(2, saves_after=[another]))
    assert set(worker.take_reports().transfers) == {another.id}


class _Unfenced(NoCopier):
    """Takes everything, and cannot be waited for."""

    def submit(self, transfers: Sequence[Transfer]) -> None:
        pass

    def fence(self, transfer_ids: Sequence[TransferId]) -> None:
        raise OSError("nobody expected this")


def test_an_error_in_a_load_within_the_step_keeps_nobody_waiting() -> None:
    worker = WorkerSide(_Unfenced())
    now, brought = load(1, 2), load(3)
    orders = Orders(
        1,
        loads_now=[now],
        loads=[Load("r", brought)],
        complete={"r": (), "gone": (Slot(5),)},
    )
    with pytest.raises(OSError, match="nobody expected"):
        worker.load(orders)
    worker.give_up()
    assert worker.results() == Results({"r", "gone"}, {1, 2, 3, 5})
    assert set(worker.take_reports().transfers) == {now.id, brought.id}
