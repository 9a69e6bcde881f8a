"""A worker's side: each load is told to vLLM once, each transfer to the scheduler's side once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest
from tools import TIMEOUT_SECONDS, key_of

from penstock.connectors.vllm.orders import Load, Orders, Reports
from penstock.connectors.vllm.promises import Results
from penstock.connectors.vllm.worker_guard import GuardedWorker
from penstock.stores.host import ArenaHandle
from penstock.transfer.copiers import Copier, NoCopier, ThreadCopier
from penstock.transfer.io import Mover, MoveResult
from penstock.types import Direction, Outcome, Slot, Tier, Transfer, TransferId, Verdict

OK, MISSING, FAILED = Verdict.OK, Verdict.MISSING, Verdict.FAILED
NOTHING = Results(set(), set(), set())
ARENA = ArenaHandle("", 8, 8, 8)
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

    def move(self, transfer: Transfer) -> MoveResult:
        self.gates[transfer.direction].wait()
        self.moved.append(transfer.id)
        if transfer.direction is Direction.SAVE:
            return MoveResult([OK] * len(transfer.keys))
        return MoveResult([MISSING if b in self.missing else OK for b in transfer.target_slots])

    def close(self) -> None:
        pass


def run(worker: GuardedWorker, orders: Orders) -> Results:
    worker.begin(orders)
    worker.load(orders)
    worker.save(orders)
    return worker.results(orders)


class Desk:
    def __init__(self) -> None:
        self.mover = GatedMover()
        self.copier = ThreadCopier(self.mover, 2)
        self.worker = GuardedWorker(lambda _: self.copier)

    def open(self) -> None:
        for gate in self.mover.gates.values():
            gate.set()

    def step(self, orders: Orders) -> Results:
        """All hooks of a step, in vLLM's order."""
        if not orders.is_last_resort:
            orders.step, orders.arena = next(_steps), ARENA
        return run(self.worker, orders)

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
    assert desk.step(Orders(0)) == Results({"r"}, set(), set())
    assert desk.step(Orders(0)) == NOTHING, "vLLM must not hear twice"
    reports = desk.worker.take_reports()
    assert {one.transfer_id: one.verdicts for one in reports.outcomes} == {
        first.id: (OK, OK),
        second.id: (OK,),
    }
    assert desk.worker.take_reports() == Reports()


def test_a_request_waits_for_what_its_load_still_has_to_bring(desk: Desk) -> None:
    order = load(3)
    desk.step(Orders(0, loads=[Load("r", order)]))
    desk.settle(order)
    assert desk.step(Orders(0)) == NOTHING, "more is to come from the disk"
    assert desk.step(Orders(0, complete={"r": (Slot(8), Slot(9))})) == Results({"r"}, {8, 9}, {"r"})


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
    assert desk.step(Orders(0)) == Results({"r", "other"}, {4, 9}, {"r"})


def test_a_request_of_which_nothing_could_be_brought_is_ready_at_once(desk: Desk) -> None:
    assert desk.step(Orders(0, complete={"r": (Slot(1),)})) == Results({"r"}, {1}, {"r"})


def test_a_request_may_be_loaded_for_again(desk: Desk) -> None:
    for block in (1, 2):
        order = load(block)
        desk.step(Orders(0, loads=[Load("r", order)], complete={"r": ()}))
        desk.settle(order)
        assert desk.step(Orders(0)) == Results({"r"}, set(), set())


def test_the_fence_comes_after_the_saves_before_and_before_all_else(desk: Desk) -> None:
    earlier = save(1)
    desk.step(Orders(0, saves_after=[earlier]))
    before = save(2)
    orders = Orders(next(_steps), ARENA, saves_before=[before], fence=[earlier.id, before.id])
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
    orders = Orders(next(_steps), ARENA, saves_after=[order], is_timed=True)
    desk.open()
    desk.worker.begin(orders)
    desk.worker.save(orders)
    desk.worker.save(orders)
    desk.settle(order)
    desk.worker.results(orders)
    reports = desk.worker.take_reports()
    assert [one.transfer_id for one in reports.outcomes] == [order.id]
    assert list(reports.step_seconds) == [orders.step]
    assert desk.mover.moved == [order.id]


def test_only_steps_that_are_asked_for_are_timed(desk: Desk) -> None:
    desk.step(Orders(0))
    assert desk.worker.take_reports() == Reports()
    desk.step(Orders(0, is_timed=True))
    assert len(desk.worker.take_reports().step_seconds) == 1


def refused(_: ArenaHandle) -> Copier:
    raise OSError("no such memory")


@pytest.mark.parametrize("open_copier", [lambda _: NoCopier(), refused], ids=["copy", "open"])
def test_a_worker_that_cannot_copy_loses_its_blocks_and_holds_nobody_up(
    open_copier: Callable[[ArenaHandle], Copier], caplog: pytest.LogCaptureFixture
) -> None:
    worker = GuardedWorker(open_copier)
    brought, kept, last = load(3, 4), save(5), save(6)
    orders = Orders(
        1,
        ARENA,
        saves_before=[kept],
        fence=[kept.id],
        loads=[Load("r", brought)],
        complete={"r": ()},
        saves_after=[last],
    )
    assert run(worker, orders) == Results({"r"}, {3, 4}, {"r"})
    reports = worker.take_reports()
    assert {one.transfer_id: one.verdicts for one in reports.outcomes} == {
        brought.id: (FAILED, FAILED),
        kept.id: (FAILED,),
        last.id: (FAILED,),
    }
    assert all("this worker cannot copy blocks" in one.error for one in reports.outcomes)
    assert "cannot be started" in caplog.text
    worker.close()


class LateError(ThreadCopier):
    """Says that it could not start what it has started."""

    def submit(self, transfers: Sequence[Transfer]) -> None:
        super().submit(transfers)
        raise OSError("nobody expected this")


def test_what_was_begun_and_counts_as_lost_writes_nothing_once_vllm_is_told() -> None:
    mover = GatedMover()
    copier = LateError(mover, 1)
    worker = GuardedWorker(lambda _: copier)
    orders = Orders(1, ARENA, loads=[Load("r", load(3))], complete={"r": ()})
    found: list[Results] = []
    step = threading.Thread(target=lambda: found.append(run(worker, orders)), daemon=True)
    step.start()
    step.join(0.05)
    assert not found, "vLLM computes block 3 while a copy writes to it"
    mover.gates[Direction.LOAD].set()
    step.join(TIMEOUT_SECONDS)
    assert found == [Results({"r"}, {3}, {"r"})]
    worker.close()


def test_an_outcome_that_makes_no_sense_loses_the_blocks(desk: Desk) -> None:
    order = load(3, 4)
    desk.copier.poll = lambda: [Outcome(order.id, (OK,), 0.0)]  # type: ignore[method-assign]
    desk.open()
    assert desk.step(Orders(0, loads=[Load("r", order)], complete={"r": ()})) == Results(
        {"r"}, {3, 4}, {"r"}
    )


# The books are gone.


def test_at_the_last_all_that_may_wait_are_told(desk: Desk) -> None:
    order = load(1)
    desk.step(Orders(0, loads=[Load("half", order)]))
    desk.settle(order)
    desk.step(Orders(0))
    orders = Orders(-1, complete={"half": (Slot(1), Slot(2)), "new": (Slot(3),)})
    orders.is_last_resort = True
    assert desk.step(orders) == Results({"half", "new"}, {1, 2, 3}, {"half", "new"})


def test_at_the_last_a_worker_that_never_heard_where_dram_is_tells_all_that_wait() -> None:
    worker = GuardedWorker(refused)
    orders = Orders(-1, complete={"r": (Slot(1),)}, is_last_resort=True)
    assert run(worker, orders) == Results({"r"}, {1}, {"r"})
    assert run(worker, orders) == NOTHING


def test_at_the_last_vllm_does_not_hear_twice(desk: Desk) -> None:
    """The scheduler's process may not know that the request is ready for a long time: another
    worker's copy may still be under way."""
    order = load(1)
    desk.step(Orders(0, loads=[Load("r", order)], complete={"r": ()}))
    desk.settle(order)
    assert desk.step(Orders(0)) == Results({"r"}, set(), set())
    for _ in range(20):
        desk.step(Orders(0))
    for _ in range(2):
        last = Orders(-1, complete={"r": (Slot(1),)}, is_last_resort=True)
        assert desk.step(last) == NOTHING


@pytest.mark.parametrize("is_told", [True, False], ids=["part of it told", "nothing told yet"])
def test_at_the_last_a_request_that_was_ready_once_before_is_told(
    desk: Desk, is_told: bool
) -> None:
    first, second = load(1), load(2)
    desk.step(Orders(0, loads=[Load("r", first)], complete={"r": ()}))
    desk.settle(first)
    assert desk.step(Orders(0)) == Results({"r"}, set(), set())
    heard = ["r"]  # it runs, is preempted, and waits again
    if is_told:
        desk.step(Orders(0, loads=[Load("r", second)], confirmed=heard))
        desk.settle(second)
        heard = []
    last = Orders(-1, complete={"r": (Slot(2), Slot(3))}, is_last_resort=True, confirmed=heard)
    assert desk.step(last) == Results({"r"}, {2, 3}, {"r"})


# An error of ours.


def test_a_worker_that_gives_up_waits_for_copies_that_run(desk: Desk) -> None:
    order = load(3)
    desk.step(Orders(0, loads=[Load("r", order)], complete={"r": ()}))
    desk.copier._engine.close = lambda: False  # type: ignore[method-assign, assignment, misc]

    def broken() -> dict[int, float]:
        raise OSError("nobody expected this")

    desk.copier.take_times = broken  # type: ignore[method-assign]
    found: list[Results] = []
    step = threading.Thread(target=lambda: found.append(desk.step(Orders(0))), daemon=True)
    step.start()
    step.join(0.05)
    assert not found, "vLLM computes block 3 while a copy writes to it"
    desk.open()
    step.join(TIMEOUT_SECONDS)
    assert found == [Results({"r"}, {3}, {"r"})]


HOOKS = ("submit", "poll", "fence", "start_timer", "stop_timer", "take_times")


class Breaking(NoCopier):
    """Takes copies that never end, and breaks where the test says."""

    def __init__(self, hook: str) -> None:
        self.is_closed = False
        self.breaks_at = hook

    def __getattribute__(self, name: str) -> Any:
        if name in HOOKS and name == self.breaks_at:
            raise OSError("nobody expected this")
        return super().__getattribute__(name)

    def submit(self, transfers: Sequence[Transfer]) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("hook", HOOKS)
def test_after_an_error_anywhere_all_that_was_ordered_is_lost_and_nobody_waits(hook: str) -> None:
    copier = Breaking("")
    worker = GuardedWorker(lambda _: copier)
    early = load(9)
    run(worker, Orders(1, ARENA, loads=[Load("early", early)], complete={"early": ()}))
    assert worker.take_reports() == Reports()
    copier.breaks_at = hook
    before, brought, after = save(1), load(2), save(3)
    orders = Orders(
        2,
        saves_before=[before],
        fence=[before.id],
        loads=[Load("r", brought)],
        complete={"r": (), "gone": (Slot(5),)},
        saves_after=[after],
        is_timed=True,
    )
    found = run(worker, orders)
    assert found.ready >= {"r", "gone"}
    assert found.bad_blocks >= {2, 5}
    if hook != "submit":  # which only loses what it was asked for
        assert found == Results({"r", "gone", "early"}, {2, 5, 9}, {"r", "gone", "early"})
        assert copier.is_closed
    reports = {one.transfer_id: one for one in worker.take_reports().outcomes}
    assert set(reports) - {early.id} == {before.id, brought.id, after.id}
    assert all(set(report.verdicts) == {FAILED} for report in reports.values())
    another = load(3)
    assert run(worker, Orders(3, loads=[Load("s", another)], complete={"s": ()})) == Results(
        {"s"}, {3}, {"s"}
    )
    assert [one.transfer_id for one in worker.take_reports().outcomes] == [another.id]
    worker.close()
