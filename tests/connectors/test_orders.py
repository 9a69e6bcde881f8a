"""What crosses between the processes: plain data, and reports that add up over workers."""

from __future__ import annotations

import pickle
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.vllm.dispatch import Dispatch
from penstock.connectors.vllm.orders import (
    Load,
    Orders,
    Reports,
    Shard,
    parts_bytes,
    place_parts,
)
from penstock.errors import ConfigError
from penstock.stores.host import ArenaHandle
from penstock.transfer.delegate import DelegatingEngine
from penstock.transfer.paged import PartPlace, equal_parts
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


# Where each worker's part of a block lies.


def shards(*sizes: int, stage: int = 0, replicas: int = 1) -> list[Shard]:
    return [
        Shard(rank, size, 100, "layout", 1, stage=stage, replicas=replicas)
        for rank, size in enumerate(sizes)
    ]


@given(st.integers(1, 8), st.integers(1, 4096))
def test_parts_of_one_size_lie_where_they_always_did(num_workers: int, size: int) -> None:
    places = place_parts(shards(*[size] * num_workers))
    assert places == equal_parts(size, num_workers)
    assert parts_bytes(places) == num_workers * size


def test_stages_of_a_pipeline_may_have_parts_of_different_sizes() -> None:
    places = place_parts([*shards(300, 300), *shards(200, 200, stage=1)])
    assert places == (
        PartPlace(0, 300),
        PartPlace(300, 300),
        PartPlace(600, 200),
        PartPlace(800, 200),
    )
    assert parts_bytes(places) == 1000


def test_packed_parts_lie_side_by_side_too() -> None:
    found = [*shards(300, 300, replicas=2), *shards(200, 200, stage=1)]
    places = place_parts(found, [240, 160, 176])
    assert places == (
        PartPlace(0, 240),
        PartPlace(0, 240, writes=False),
        PartPlace(240, 160),
        PartPlace(400, 176),
    )
    assert parts_bytes(places) == 576


def test_of_workers_with_the_same_bytes_one_writes_and_all_read() -> None:
    places = place_parts(shards(*[656] * 4, replicas=4))
    assert [place.writes for place in places] == [True, False, False, False]
    assert {(place.offset, place.num_bytes) for place in places} == {(0, 656)}
    assert parts_bytes(places) == 656


def test_replicas_are_consecutive_ranks() -> None:
    places = place_parts(shards(*[100] * 4, replicas=2))
    assert [(place.offset, place.writes) for place in places] == [
        (0, True),
        (0, False),
        (100, True),
        (100, False),
    ]
    assert parts_bytes(places) == 200


def test_replicas_in_each_stage_of_a_pipeline() -> None:
    places = place_parts(
        [*shards(300, 300, replicas=2), *shards(200, 200, stage=1, replicas=2)],
    )
    assert [(place.offset, place.writes) for place in places] == [
        (0, True),
        (0, False),
        (300, True),
        (300, False),
    ]
    assert parts_bytes(places) == 500


def test_replicas_with_different_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="200 bytes per block instead of 300"):
        place_parts(shards(300, 200, replicas=2))


@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4])), min_size=1, max_size=3),
)
def test_the_parts_that_are_written_fill_a_block(stages: list[tuple[int, int]]) -> None:
    found: list[Shard] = []
    for stage, (size, replicas) in enumerate(stages):
        found += shards(*[size * 10] * 4, stage=stage, replicas=replicas)
    places = place_parts(found)
    end = 0
    for place in places:
        if place.writes:
            assert place.offset == end
            end += place.num_bytes
    assert parts_bytes(places) == end
    assert all(place.offset + place.num_bytes <= end for place in places)
