"""Which blocks leave the device, which come back, and whose turn it is: pure decisions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.params import KvResidency, SamplingParams
from penstock.engine.request import Request
from penstock.engine.residency import ColdReadBudget, ResidencyConfig, ResidencyPolicy
from penstock.engine.table import Addresses, BlockTable, shared_places
from penstock.errors import ConfigError
from penstock.keys import KeyChain, Namespace
from penstock.types import Slot

BLOCK_TOKENS = 4
NAMESPACE = Namespace("m", "w", "d", "l", BLOCK_TOKENS)


def request(name: str, num_blocks: int, num_cold: int = 0, **wishes: Any) -> Request:
    """Its blocks are complete but for the last; from the second on `num_cold` are cold."""
    tokens = tuple(range(num_blocks * BLOCK_TOKENS - 1))
    params = SamplingParams(kv_residency=KvResidency(**wishes))
    made = Request(name, tokens, params, KeyChain(NAMESPACE), sequence=ord(name[0]))
    made.table = BlockTable([Slot(1000 * ord(name[0]) + n) for n in range(num_blocks)])
    made.num_named = num_blocks - 1
    for index in range(1, 1 + num_cold):
        made.table.chill(index, Slot(index))
    return made


def residency(num_blocks: int = 100, **config: Any) -> ResidencyPolicy:
    given = {"prefix_tokens": BLOCK_TOKENS, "tail_tokens": 2 * BLOCK_TOKENS, **config}
    return ResidencyPolicy(ResidencyConfig(**given), BLOCK_TOKENS, 1000, num_blocks)


def leaving(
    policy: ResidencyPolicy,
    running: list[Request],
    count: int,
    shared: set[tuple[str, int]] = frozenset(),
) -> list[tuple[str, int]]:
    num_cold = sum(r.table.num_cold for r in running)
    chosen = policy.victims(
        running, count, num_cold, lambda r, i: (r.id, i) in shared, lambda r, i: True
    )
    return [(victim.id, index) for victim, index in chosen]


def test_the_middle_leaves_from_its_beginning_then_the_prefix_and_the_tail_never() -> None:
    running = [request("a", 8)]
    # 31 tokens: one block of prefix, the last 8 tokens lie in blocks 5, 6 and 7.
    assert leaving(residency(), running, 3) == [("a", 1), ("a", 2), ("a", 3)]
    assert leaving(residency(), running, 99) == [("a", n) for n in (1, 2, 3, 4, 0)]


def test_what_is_shared_leaves_after_what_is_not() -> None:
    running = [request("a", 8), request("b", 8)]
    shared = frozenset({("a", 1), ("b", 1), ("a", 2), ("b", 2)})
    assert leaving(residency(), running, 5, shared)[:4] == [("a", 3), ("a", 4), ("b", 3), ("b", 4)]


def test_whoever_is_beyond_its_budget_gives_first_and_then_whoever_holds_most() -> None:
    running = [request("a", 8), request("b", 12), request("c", 8, device_tokens=8)]
    assert leaving(residency(), running, 1) == [("c", 1)]
    assert leaving(residency(), running, 6)[5] == ("b", 2)
    everyone = residency(session_tokens=16)
    assert leaving(everyone, [request("a", 8), request("b", 12)], 1) == [("b", 1)]


def test_some_must_stay() -> None:
    assert leaving(residency(), [request("a", 8, never_cold=True)], 5) == []
    assert leaving(residency(cold=False), [request("a", 8)], 5) == []


def test_a_request_has_its_own_prefix_and_tail() -> None:
    running = [request("a", 8, prefix_tokens=0, tail_tokens=0)]
    assert leaving(residency(), running, 99) == [("a", n) for n in range(7)]
    running = [request("a", 8, prefix_tokens=1000)]
    assert leaving(residency(), running, 2) == [("a", 7 - 1), ("a", 5)], "from its end on"


def test_beyond_the_bound_only_one_that_is_alone_or_has_half_of_the_device_gives() -> None:
    policy = residency(40, max_cold_bytes_per_step=3000)  # three blocks
    many = [request("a", 16), request("b", 16)]
    assert len(leaving(policy, many, 10)) == 3
    assert len(leaving(policy, [request("a", 16)], 10)) == 10
    hog = [request("a", 26), request("b", 8)]
    assert leaving(policy, hog, 20) == [("a", n) for n in range(1, 7)]
    assert policy.admits(3, 0, is_anyone_running=True)
    assert not policy.admits(1, 3, is_anyone_running=True)
    assert policy.admits(100, 0, is_anyone_running=False)


def test_blocks_come_back_shared_ones_first_then_of_whoever_lacks_least() -> None:
    running = [request("a", 12, 6), request("b", 12, 2)]
    chosen = residency().returning(running, 4, lambda r, i: (r.id, i) == ("a", 2))
    found = [(each.id, index) for each, index in chosen]
    assert found == [("a", 2), ("b", 2), ("b", 1), ("a", 6)]
    modest = [request("a", 12, 6, device_tokens=7 * BLOCK_TOKENS)]
    assert len(residency().returning(modest, 4, lambda r, i: False)) == 1


def test_watermarks() -> None:
    policy = residency(100, high_watermark=0.9, low_watermark=0.8)
    assert [policy.num_to_leave(used) for used in (80, 90, 91, 100)] == [0, 0, 11, 20]
    assert [policy.num_to_return(used) for used in (0, 79, 80, 95)] == [80, 1, 0, 0]


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"prefix_tokens": -1}, "prefix_tokens is -1"),
        ({"session_tokens": 0}, "session_tokens is 0"),
        ({"max_cold_bytes_per_step": 0}, "max_cold_bytes_per_step is 0"),
        ({"low_watermark": 0.9, "high_watermark": 0.8}, "0.9 and 0.8"),
        ({"high_watermark": 1.1}, "watermarks"),
    ],
)
def test_impossible_settings_are_refused(config: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ResidencyConfig(**config)


@pytest.mark.parametrize(
    "wish",
    [{"never_cold": 1}, {"device_tokens": 0}, {"tail_tokens": "x"}, {"tial_tokens": 4}, "cold", 3],
)
def test_impossible_wishes_are_refused(wish: Any) -> None:
    with pytest.raises(ConfigError, match="kv_residency"):
        SamplingParams(kv_residency=wish)


def test_within_the_bound_everybody_takes_part() -> None:
    running = [request("a", 10, 3), request("b", 10, 2), request("c", 10)]
    assert ColdReadBudget(5000, 1000).pick(running) == running
    assert ColdReadBudget(None, 1000).pick(running) == running


def test_a_huge_one_takes_part_in_some_steps_and_the_others_in_all() -> None:
    huge, small, hot = request("a", 60, 40), request("b", 10, 2), request("c", 10)
    turns = ColdReadBudget(10_000, 1000)
    taking = [turns.pick([huge, small, hot]) for _ in range(50)]
    assert all(small in step and hot in step for step in taking)
    # Of the bound's ten blocks small needs two: eight are left a step, and huge needs forty.
    assert sum(huge in step for step in taking) == 10


def test_a_huge_one_alone_does_not_wait_for_nobody() -> None:
    huge = request("a", 60, 40)
    turns = ColdReadBudget(10_000, 1000)
    assert all(turns.pick([huge]) == [huge] for _ in range(5))


@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 40),
)
def test_nobody_starves_and_the_bound_holds_on_average(
    cold: list[tuple[int, bool]], bound: int
) -> None:
    running = [
        request(chr(97 + n), 64, num_cold if is_cold else 0)
        for n, (num_cold, is_cold) in enumerate(cold)
    ]
    turns = ColdReadBudget(bound * 1000, 1000)
    num_steps = 60 * len(cold) + 60
    taking = [turns.pick(running) for _ in range(num_steps)]
    assert all(step for step in taking)
    for each in running:
        assert any(each in step for step in taking)
    if any(not is_cold for _, is_cold in cold):  # else someone runs for want of others
        read = sum(r.table.num_cold for step in taking for r in step)
        assert read <= bound * num_steps + sum(num for num, _ in cold)


def test_a_table_remembers_where_each_block_lies() -> None:
    table = BlockTable([Slot(5), Slot(6)])
    table.extend_places([~0, ~9])
    table.extend([Slot(n) for n in range(20, 40)])
    assert (len(table), table.num_cold, table.num_resident) == (24, 2, 22)
    assert table.cold() == [2, 3]
    assert table.resident(1, 5) == [1, 4]
    assert table.chill(1, Slot(3)) == 6
    assert table.warm(2, Slot(7)) == 0
    assert list(table)[:5] == [5, ~3, 7, ~9, 20]
    addresses = Addresses(1000, 10, 50_000, 100).of(table.places[:4])
    assert addresses.tolist() == [1050, 50_300, 1070, 50_900]
    assert Addresses(1000, 10).of(np.array([2, 4])).tolist() == [1020, 1040]
    slots, pins = table.take_all()
    assert slots == [5, 7, *range(20, 40)]
    assert pins == [3, 9]
    assert (len(table), table.num_cold) == (0, 0)


def test_places_that_several_read() -> None:
    tables = [BlockTable([Slot(1), Slot(2)]), BlockTable([Slot(1), Slot(3)])]
    tables[0].chill(1, Slot(8))
    tables[1].chill(1, Slot(8))
    assert shared_places(tables) == {1, ~8}
    assert shared_places(tables[:1]) == set()
