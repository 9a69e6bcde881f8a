"""What crosses between the processes: plain data, and reports that add up over workers."""

from __future__ import annotations

import pickle
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.vllm.dispatch import Dispatch
from penstock.connectors.vllm.orders import Load, Orders, Reports
from penstock.stores.host import ArenaHandle
from penstock.transfer.delegate import DelegatingEngine
from penstock.types import BlockKey, Outcome, Slot, Tier, Transfer, TransferId, Verdict

OK, MISSING, FAILED = Verdict.OK, Verdict.MISSING, Verdict.FAILED
KEY = BlockKey(b"k" * 32)
ONE, TWO, THREE = TransferId(1), TransferId(2), TransferId(3)


def test_two_workers_reports_add_up() -> None:
    mine = Reports([Outcome(ONE, (OK, OK), 0.5), Outcome(TWO, (OK,), 0.1)], {7: 0.25, 8: 0.5})
    yours = Reports(
        [Outcome(ONE, (OK, MISSING), 0.25, "gone"), Outcome(THREE, (FAILED,), 0.0, "no")],
        {7: 0.75, 9: 0.125},
    )
    joined = mine.join(yours)
    assert joined is mine
    assert joined.outcomes == [
        Outcome(ONE, (OK, OK), 0.5),
        Outcome(TWO, (OK,), 0.1),
        Outcome(ONE, (OK, MISSING), 0.25, "gone"),
        Outcome(THREE, (FAILED,), 0.0, "no"),
    ]
    assert joined.step_seconds == {7: 0.75, 8: 0.5, 9: 0.125}


@given(st.lists(st.lists(st.sampled_from(Verdict), min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_block_is_ok_only_where_all_say_so_whoever_comes_first(
    verdicts: list[list[Verdict]],
) -> None:
    for order in (verdicts, verdicts[::-1]):
        total = Reports()
        for mine in order:
            total.join(Reports([Outcome(ONE, tuple(mine), 0.0)]))
        engine = DelegatingEngine(Mock(poll=list), Mock(), num_workers=len(verdicts))
        slots = (Slot(1), Slot(2), Slot(3))
        engine.submit(Transfer(ONE, Tier.DEVICE, Tier.HOST, (KEY,) * 3, slots, slots))
        engine.take_unsent()
        dispatch = Dispatch(engine, Mock(), ())
        for number, outcome in enumerate(total.outcomes):
            assert not engine.poll(), f"{number} of {len(verdicts)} have reported"
            dispatch.reported(outcome)
        (ended,) = engine.poll()
        for position, verdict in enumerate(ended.verdicts):
            said = {mine[position] for mine in verdicts}
            assert verdict in said
            assert (verdict is OK) == (said == {OK})


def test_reports_with_nothing_in_them_need_not_be_sent() -> None:
    assert not Reports()
    assert Reports([Outcome(ONE, (OK,), 0.0)])
    assert Reports([], {1: 0.5})


def test_orders_and_reports_are_plain_data() -> None:
    move = Transfer(ONE, Tier.HOST, Tier.DEVICE, (KEY,), (Slot(1),), (Slot(2),), 3.5)
    orders = Orders(
        5,
        ArenaHandle("/proc/1/fd/3", 4, 100, 4096),
        saves_before=[move],
        fence=[TWO],
        loads=[Load("request", move)],
        complete={"request": (Slot(2),)},
        saves_after=[move],
        is_timed=True,
    )
    assert pickle.loads(pickle.dumps(orders)) == orders
    reports = Reports([Outcome(ONE, (OK,), 0.5, "")], {5: 0.1})
    assert pickle.loads(pickle.dumps(reports)) == reports
