"""What crosses between the processes: plain data, and reports that add up over workers."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.vllm.orders import Load, Orders, Reports
from penstock.stores.host import ArenaHandle
from penstock.transfer.delegate import Report
from penstock.types import BlockKey, Slot, Tier, Transfer, TransferId, Verdict

OK, MISSING, FAILED = Verdict.OK, Verdict.MISSING, Verdict.FAILED
ONE, TWO, THREE = TransferId(1), TransferId(2), TransferId(3)


def test_two_workers_reports_add_up() -> None:
    mine = Reports({ONE: Report((OK, OK), 0.5), TWO: Report((OK,), 0.1)}, {7: 0.25, 8: 0.5})
    yours = Reports(
        {ONE: Report((OK, MISSING), 0.25, "gone"), THREE: Report((FAILED,), 0.0, "no")},
        {7: 0.75, 9: 0.125},
    )
    joined = mine.join(yours)
    assert joined is mine
    assert joined.transfers == {
        ONE: Report((OK, MISSING), 0.5, "gone", 2),  # side by side: the slower counts
        TWO: Report((OK,), 0.1, "", 1),
        THREE: Report((FAILED,), 0.0, "no", 1),
    }
    assert joined.step_seconds == {7: 0.75, 8: 0.5, 9: 0.125}


@given(st.lists(st.lists(st.sampled_from(Verdict), min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_block_is_ok_only_where_all_say_so_whoever_comes_first(
    verdicts: list[list[Verdict]],
) -> None:
    for order in (verdicts, verdicts[::-1]):
        total = Reports()
        for mine in order:
            total.join(Reports({ONE: Report(tuple(mine), 0.0)}))
        report = total.transfers[ONE]
        assert report.num_workers == len(verdicts)
        for position, verdict in enumerate(report.verdicts):
            said = {mine[position] for mine in verdicts}
            assert verdict in said
            assert (verdict is OK) == (said == {OK})


def test_reports_with_nothing_in_them_need_not_be_sent() -> None:
    assert not Reports()
    assert Reports({ONE: Report((OK,), 0.0)})
    assert Reports({}, {1: 0.5})


def test_orders_and_reports_are_plain_data() -> None:
    key = BlockKey(b"k" * 32)
    move = Transfer(ONE, Tier.HOST, Tier.DEVICE, (key,), (Slot(1),), (Slot(2),), 3.5)
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
    reports = Reports({ONE: Report((OK,), 0.5, "", 2)}, {5: 0.1})
    assert pickle.loads(pickle.dumps(reports)) == reports
