from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from tools import key_of, keys_of

from penstock.policies import LFU
from penstock.types import BlockKey


def always(_: BlockKey) -> bool:
    return True


def test_what_is_used_least_often_goes_first_and_of_those_the_least_recent() -> None:
    policy = LFU(10)
    a, b, c, d = keys_of(4)
    for key in (a, b, c, d):
        policy.insert(key)
    for key in (a, a, a, c, b):
        policy.touch(key)
    assert policy.pick(4, always) == [d, c, b, a]


def test_what_was_popular_once_is_overtaken() -> None:
    policy = LFU(4)
    old, *others = keys_of(4)
    policy.insert(old)
    for _ in range(20):
        policy.touch(old)
    for key in others:
        policy.insert(key)
    for number in range(100):  # newcomers that are used a few times each
        victims = policy.pick(1, always)
        if old in victims:
            break
        policy.insert(key_of(("new", number)))
        policy.touch(key_of(("new", number)))
    else:
        raise AssertionError("uses of long ago keep a block for ever")
    assert number >= 10, "twenty uses are worth something"


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["insert", "touch", "demote", "pick"]), st.integers(0, 9))
    )
)
def test_it_is_the_papers_algorithm(steps: list[tuple[str, int]]) -> None:
    """Held against the formula, evaluated over all blocks each time."""
    policy, keys = LFU(10), keys_of(10)
    uses: dict[BlockKey, int] = {}
    worth: dict[BlockKey, int] = {}  # those used least recently first
    age = 0
    for step, number in steps:
        key = keys[number]
        if step == "insert" and key not in worth:
            policy.insert(key)
            uses[key], worth[key] = 1, age + 1
        elif step == "touch" and key in worth:
            policy.touch(key)
            uses[key] += 1
            del worth[key]
            worth[key] = age + uses[key]
        elif step == "demote" and key in worth:
            policy.demote(key)
            del worth[key]
            worth[key] = 0
        elif step == "pick" and worth:
            least = min(worth, key=worth.__getitem__)
            assert policy.pick(1, always) == [least]
            age = max(age, worth.pop(least))


def test_a_pick_that_fails_leaves_the_order_as_it_was() -> None:
    policy, twin = LFU(10), LFU(10)
    keys = keys_of(8)
    for each in (policy, twin):
        for number, key in enumerate(keys):
            each.insert(key)
            for _ in range(number % 3):
                each.touch(key)
        each.demote(keys[5])
    assert policy.pick(7, lambda key: key not in keys[:2]) == []
    assert policy.pick(8, always) == twin.pick(8, always)


def test_leased_blocks_are_passed_once_and_keep_their_uses() -> None:
    policy = LFU(10)
    leased, often, seldom = keys_of(3)
    for key in (leased, often, seldom):
        policy.insert(key)
    policy.touch(often)
    assert policy.pick(1, lambda key: key != leased) == [seldom]
    # Its one use counts from now on; the other's two date from before.
    assert policy.pick(2, always) == [often, leased]


def test_a_demoted_block_stays_so_while_it_is_leased() -> None:
    policy = LFU(10)
    a, b, c = keys_of(3)
    for key in (a, b, c):
        policy.insert(key)
    policy.touch(a)
    policy.demote(a)
    assert policy.pick(1, lambda key: key != a) == [b]
    assert policy.pick(1, always) == [a]


def test_worths_that_no_block_has_are_forgotten() -> None:
    policy, chance, keys = LFU(8), random.Random(4), keys_of(8)
    for key in keys:
        policy.insert(key)
    for _ in range(20_000):
        policy.touch(chance.choice(keys))
        assert len(policy._shelves) <= 8
        assert len(policy._worths) <= 100
