"""Policies that know prompts: `prefix-lru` and `reuse`, and the runs below them."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tools import key_of

from penstock.books.ledger import Ledger
from penstock.config import DiskConfig, HostConfig
from penstock.errors import BookError
from penstock.policies import POLICIES, Policy, PrefixLRU, Reuse
from penstock.policies.reuse_rates import ReuseRates
from penstock.policies.runs import Runs
from penstock.sim.formats import read_trace
from penstock.sim.replay import new_ledger, replay
from penstock.sim.trace import TraceRequest
from penstock.types import BlockKey

KNOWING = [PrefixLRU, Reuse]


def prompt(name: str, length: int = 5) -> list[BlockKey]:
    return [key_of((name, place)) for place in range(length)]


def use(policy: Policy, keys: Sequence[BlockKey], held: set[BlockKey]) -> None:
    parent = None
    for key in keys:
        if key in held:
            policy.touch(key)
        else:
            policy.insert(key, parent)
            held.add(key)
        parent = key


def pick(policy: Policy, num: int, held: set[BlockKey]) -> list[BlockKey]:
    victims = policy.pick(num, lambda _: True)
    held.difference_update(victims)
    return victims


@pytest.mark.parametrize("make", KNOWING)
def test_a_prompt_goes_from_its_tail(make: type[PrefixLRU] | type[Reuse]) -> None:
    policy, held = make(100), set[BlockKey]()
    old, new = prompt("old"), prompt("new")
    use(policy, old, held)
    use(policy, new, held)
    assert pick(policy, 7, held) == [*reversed(old), new[4], new[3]]
    policy.check()


@pytest.mark.parametrize("make", KNOWING)
def test_what_prompts_share_goes_after_what_only_one_of_them_has(
    make: type[PrefixLRU] | type[Reuse],
) -> None:
    policy, held = make(100), set[BlockKey]()
    shared = prompt("system", 3)
    for name in ("a", "b", "c"):
        use(policy, [*shared, *prompt(name, 4)], held)
    victims = pick(policy, 12, held)
    assert not set(victims) & set(shared)
    assert pick(policy, 3, held) == shared[::-1]


@pytest.mark.parametrize("make", KNOWING)
def test_to_use_a_block_is_to_use_those_before_it(make: type[PrefixLRU] | type[Reuse]) -> None:
    """A device that has a prompt's blocks asks the tiers for none of them, and names the last."""
    policy, held = make(100), set[BlockKey]()
    first, second = prompt("first"), prompt("second")
    use(policy, first, held)
    use(policy, second, held)
    policy.touch(first[2])
    gone = pick(policy, 7, held)
    assert set(gone) == {first[3], first[4], *second}


@pytest.mark.parametrize("make", KNOWING)
def test_a_long_prompt_in_parts_is_still_one(make: type[PrefixLRU] | type[Reuse]) -> None:
    policy, held = make(100), set[BlockKey]()
    long, other = prompt("long", 8), prompt("other", 8)
    for start in range(0, 8, 2):  # as two prompts are computed side by side
        for keys in (long, other):
            parent = keys[start - 1] if start else None
            for key in keys[start : start + 2]:
                policy.insert(key, parent)
                held.add(key)
                parent = key
    left = set(held) - set(pick(policy, 10, held))
    for keys in (long, other):
        places = [place for place, key in enumerate(keys) if key in left]
        assert places == list(range(len(places)))


@pytest.mark.parametrize("make", KNOWING)
def test_where_only_what_is_in_use_lies_behind_even_a_beginning_goes(
    make: type[PrefixLRU] | type[Reuse],
) -> None:
    policy, held = make(100), set[BlockKey]()
    keys = prompt("in use")
    use(policy, keys, held)
    assert policy.pick(4, lambda key: key != keys[4]) == keys[3::-1]
    policy.check()
    assert policy.pick(2, lambda _: True) == []
    assert len(policy) == 1


def test_guesses_that_go_in_a_circle_end_somewhere() -> None:
    """After a restart, neighbours on the disk pass for neighbours in a prompt."""
    policy, held = PrefixLRU(10), set[BlockKey]()
    first, second = key_of("first"), key_of("second")
    policy.insert(first, second)
    policy.insert(second, first)
    policy.touch(first)
    policy.touch(second)
    held |= {first, second}
    assert set(pick(policy, 2, held)) == {first, second}


def test_lost_blocks_are_noticed() -> None:
    runs = Runs()
    run = runs.start(None)
    runs.add(key_of(1), run)
    run.keys.append(key_of(2))
    with pytest.raises(BookError, match="in no run, or in two"):
        runs.check([run])


def conversations(seed: int, num: int = 1_500) -> list[TraceRequest]:
    """Most are never heard of again; some go on, and then again and again."""
    rng = random.Random(seed)
    open_ones: list[tuple[int, int]] = []
    requests = []
    for number in range(num):
        if open_ones and rng.random() < 0.4:
            name, length = open_ones.pop(rng.randrange(len(open_ones)))
        else:
            name, length = number, 0
        length += 8
        if length > 8 or rng.random() < 0.2:
            open_ones.append((name, length))
        keys = tuple(key_of((seed, name, place)) for place in range(length))
        requests.append(TraceRequest(float(number), length, 1, keys))
    return requests


def test_it_learns_which_prompts_come_back() -> None:
    gains = []
    for seed in range(3):
        requests = conversations(seed)
        learnt, recency = (
            replay(requests, new_ledger(name, 800)).hit_rate for name in ("reuse", "prefix-lru")
        )
        gains.append(learnt - recency)
    assert min(gains) > -0.005
    assert sum(gains) > 0.003


def test_with_nothing_learnt_the_younger_is_worth_more() -> None:
    rates = ReuseRates(1000)
    for indices in rates.indices:
        assert indices == sorted(indices, reverse=True)


def test_what_comes_back_more_often_is_worth_more() -> None:
    rates = ReuseRates(1000)
    for _ in range(300):
        for _ in range(10):
            rates.begin(1)
            rates.begin(2)
        rates.reused(1, 400, 1)
        rates.reused(2, 400, 9)
    rates.compute()
    once, twice = rates.indices[0], rates.indices[1]
    age = rates.age_of(300)
    assert twice[age] > 3 * once[age]
    late = rates.age_of(20_000)
    assert twice[late] < twice[age]


TRACES = Path(os.environ.get("PENSTOCK_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
CONVERSATIONS = TRACES / "mooncake" / "conversation_trace.jsonl"


@pytest.mark.skipif(not CONVERSATIONS.exists(), reason="needs Mooncake's conversation trace")
def test_the_default_on_a_real_trace() -> None:
    """As in docs/policies.md, but for the first 4,000 requests alone, which takes less time."""
    requests = read_trace(CONVERSATIONS).requests[:4_000]
    rates = {name: replay(requests, new_ledger(name, 4_000)).hit_rate for name in ("lru", "reuse")}
    assert rates["reuse"] > 1.3 * rates["lru"]


def test_the_default_is_the_one_that_wins() -> None:
    assert (HostConfig().policy, DiskConfig().policy) == ("reuse", "reuse")
    assert POLICIES["reuse"] is Reuse


def test_what_was_learnt_is_followed_where_it_helps() -> None:
    """A loop larger than the tier: recency keeps nothing of it."""
    policy = Reuse(60)
    assert not policy._trial.prefers_worth  # until it has proved better
    ledger = Ledger(60, policy)
    documents = [prompt(f"document {number}", 10) for number in range(12)]
    again = [TraceRequest(0.0, 160, 1, tuple(keys)) for keys in documents]
    replay(again * 40, ledger)
    assert policy._trial.prefers_worth
    policy.check()


def test_nothing_to_learn_is_prefix_lru() -> None:
    requests = [
        TraceRequest(0.0, 160, 1, tuple(prompt(f"once {number // 2}", 10))) for number in range(900)
    ]
    reuse, recency = (replay(requests, new_ledger(name, 50)) for name in ("reuse", "prefix-lru"))
    assert reuse == recency
