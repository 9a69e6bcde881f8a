"""One contract for all policies, and what sets each apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.policies import LRU, POLICIES, S3FIFO, Policy
from penstock.types import BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(4, "little") * 8)


def always(_: BlockKey) -> bool:
    return True


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
class TestContract:
    @given(
        steps=st.lists(
            st.tuples(st.sampled_from(["insert", "touch", "forget", "pick"]), st.integers(0, 15))
        ),
        leased=st.sets(st.integers(0, 15), max_size=8),
    )
    def test_any_history_keeps_the_contract(
        self,
        make: Callable[[int], Policy],
        steps: list[tuple[str, int]],
        leased: set[int],
    ) -> None:
        policy = make(10)
        held: set[BlockKey] = set()
        busy = {key(number) for number in leased}
        for step, number in steps:
            name = key(number)
            if step == "pick":
                idle = held - busy
                victims = policy.pick(number, lambda k: k not in busy)
                assert len(victims) == (number if number <= len(idle) else 0)
                assert len(set(victims)) == len(victims)
                assert set(victims) <= idle
                held -= set(victims)
            elif step == "insert" and name not in held:
                policy.insert(name)
                held.add(name)
            elif step == "touch" and name in held:
                policy.touch(name)
            elif step == "forget" and name in held:
                policy.forget(name)
                held.remove(name)
            assert len(policy) == len(held)
        assert set(policy.pick(len(held), always)) == held

    def test_admitting_changes_nothing(self, make: Callable[[int], Policy]) -> None:
        policy = make(4)
        assert policy.admit(key(1))
        assert len(policy) == 0


def test_lru_evicts_what_was_used_longest_ago() -> None:
    policy = LRU(3)
    for number in range(3):
        policy.insert(key(number))
    policy.touch(key(0))
    assert policy.pick(2, always) == [key(1), key(2)]


def test_s3fifo_lets_a_scan_pass_without_losing_what_returns() -> None:
    policy = S3FIFO(20)
    hot = [key(number) for number in range(10)]
    for name in hot:
        policy.insert(name)
        policy.touch(name)
        policy.touch(name)
    for number in range(100, 400):
        if len(policy) == 20:
            policy.pick(1, always)
        policy.insert(key(number))
    survivors = set(policy.pick(20, always))
    assert set(hot) <= survivors


def test_s3fifo_remembers_what_it_evicted_and_takes_it_back_to_main() -> None:
    policy = S3FIFO(20)
    for number in range(20):
        policy.insert(key(number))
    (victim,) = policy.pick(1, always)
    policy.insert(victim)
    for number in range(100, 118):  # a scan washes out the small queue, not the returned block
        policy.pick(1, always)
        policy.insert(key(number))
    assert victim in policy.pick(len(policy), always)


def test_s3fifo_forgets_its_ghosts_in_time() -> None:
    policy = S3FIFO(10)
    policy.insert(key(0))
    assert policy.pick(1, always) == [key(0)]
    for number in range(1, 100):
        policy.insert(key(number))
        policy.pick(1, always)
    assert key(0) not in policy._ghosts
