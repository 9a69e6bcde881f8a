"""What every policy promises its ledger (`penstock.policies.base`), held against all of them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools import key_of

from penstock import config
from penstock.books.ledger import Ledger
from penstock.policies import POLICIES, Policy
from penstock.types import BlockKey

Make = Callable[[int], Policy]

CAPACITY = 10
NUMBERS = st.integers(0, 15)  # more blocks than fit
KEYS = [key_of(number) for number in range(16)]

every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)


def parent(number: int) -> BlockKey | None:
    """Prompts that share prefixes: a block always follows the same one."""
    return KEYS[number // 2] if number > 1 else None


class Watched:
    """A policy beside the plainest possible book of what it must hold."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.held: set[BlockKey] = set()
        self.leased: set[BlockKey] = set()

    def insert(self, key: BlockKey, parent: BlockKey | None = None) -> None:
        if key not in self.held:
            self.policy.insert(key, parent)
            self.held.add(key)

    def touch(self, key: BlockKey) -> None:
        if key in self.held:
            self.policy.touch(key)

    def demote(self, key: BlockKey) -> None:
        if key in self.held:
            self.policy.demote(key)

    def forget(self, key: BlockKey) -> None:
        if key in self.held:
            self.policy.forget(key)
            self.held.remove(key)

    def turn_lease(self, key: BlockKey) -> None:
        """Lease it, or release it."""
        self.leased ^= {key}

    def pick(self, num_victims: int) -> list[BlockKey]:
        idle = self.held - self.leased
        victims = self.policy.pick(num_victims, self._is_idle)
        assert len(victims) == (num_victims if num_victims <= len(idle) else 0)
        assert len(set(victims)) == len(victims)
        assert set(victims) <= idle
        self.held.difference_update(victims)
        assert len(self.policy) == len(self.held)
        return victims

    def _is_idle(self, key: BlockKey) -> bool:
        assert key in self.held, "a ledger knows nothing of a block that it does not hold"
        return key not in self.leased

    def check_whole(self) -> None:
        """Take everything out: each block is there once."""
        self.leased.clear()
        assert len(self.policy) == len(self.held)
        self.pick(len(self.held))
        assert len(self.policy) == 0


def step(watched: Watched, what: str, number: int) -> list[BlockKey]:
    """One event of a history; returns what was evicted."""
    key = KEYS[number]
    match what:
        case "insert":
            watched.insert(key, parent(number))
        case "insert, not knowing what it follows":
            watched.insert(key)
        case "touch":
            watched.touch(key)
        case "demote":
            watched.demote(key)
        case "forget":
            watched.forget(key)
        case "lease":
            watched.turn_lease(key)
        case "pick":
            return watched.pick(number)
    return []


STEPS = [
    "insert",
    "insert, not knowing what it follows",
    "touch",
    "demote",
    "forget",
    "lease",
    "pick",
]
histories = st.lists(st.tuples(st.sampled_from(STEPS), NUMBERS))


@every_policy
@given(history=histories)
def test_any_history_keeps_the_contract(make: Make, history: list[tuple[str, int]]) -> None:
    watched = Watched(make(CAPACITY))
    for what, number in history:
        step(watched, what, number)
        assert len(watched.policy) == len(watched.held)
    watched.check_whole()


@every_policy
@given(history=histories, num_more=st.integers(1, 3))
def test_what_cannot_be_had_takes_nothing(
    make: Make, history: list[tuple[str, int]], num_more: int
) -> None:
    watched = Watched(make(CAPACITY))
    for what, number in history:
        step(watched, what, number)
    idle = watched.held - watched.leased
    assert watched.pick(len(idle) + num_more) == []
    assert set(watched.pick(len(idle))) == idle
    watched.check_whole()


@every_policy
@given(history=histories, asked=st.lists(NUMBERS))
def test_admitting_changes_nothing(
    make: Make, history: list[tuple[str, int]], asked: list[int]
) -> None:
    watched, twin = Watched(make(CAPACITY)), Watched(make(CAPACITY))
    for what, number in history:
        for other in asked:
            if KEYS[other] not in watched.held:
                watched.policy.admit(KEYS[other])
        assert step(watched, what, number) == step(twin, what, number)
    assert watched.policy.pick(len(watched.held), lambda _: True) == twin.policy.pick(
        len(twin.held), lambda _: True
    )


@every_policy
@pytest.mark.parametrize("capacity", [CAPACITY, 10 * CAPACITY])
@given(
    history=st.lists(st.tuples(st.sampled_from(["insert", "touch", "pick"]), NUMBERS)),
    num_demoted=st.integers(1, 4),
    num_leased=st.integers(0, 4),
    choice=st.randoms(use_true_random=False),
)
def test_what_is_demoted_goes_first(
    make: Make,
    capacity: int,
    history: list[tuple[str, int]],
    num_demoted: int,
    num_leased: int,
    choice: random.Random,
) -> None:
    """Of blocks that do not follow each other: others may have to go with what follows them."""
    watched = Watched(make(capacity))
    for what, number in history:
        if what == "insert":
            watched.insert(KEYS[number])
        else:
            step(watched, what, number)
    held = sorted(watched.held)
    demoted = choice.sample(held, min(num_demoted, len(held)))
    for key in demoted:
        watched.demote(key)
    watched.leased = set(choice.sample(held, min(num_leased, len(held))))
    idle = set(demoted) - watched.leased
    assert set(watched.pick(len(idle))) == idle
    watched.check_whole()


@every_policy
def test_what_is_demoted_and_then_used_is_a_block_like_others(make: Make) -> None:
    watched = Watched(make(CAPACITY))
    for key in KEYS[:4]:
        watched.insert(key)
    watched.demote(KEYS[0])
    watched.touch(KEYS[0])
    watched.touch(KEYS[0])
    assert watched.pick(1) != [KEYS[0]]
    watched.check_whole()


def long_history(policy: Policy, capacity: int, seed: int, num_steps: int) -> list[BlockKey]:
    """Prompts that come, grow and come back, some of them in use; returns all victims in order."""
    watched, chance = Watched(policy), random.Random(seed)
    evicted: list[BlockKey] = []
    for number in range(num_steps):
        # Some prompts come often, most come once.
        prompt = chance.choice([chance.randrange(8), chance.randrange(64), 1000 + number])
        previous: BlockKey | None = None
        for position in range(chance.randrange(1, 1 + capacity // 4)):
            key = key_of((prompt, position))
            if key in watched.held:
                watched.touch(key)
            else:
                if len(watched.held) == capacity:
                    evicted += watched.pick(1) or [key]
                if len(watched.held) < capacity:
                    watched.insert(key, previous)
            previous = key
            if chance.random() < 0.02 and len(watched.leased) < capacity // 2:
                watched.leased.add(key)
            if chance.random() < 0.01:
                watched.demote(key)
            if chance.random() < 0.005:
                watched.forget(key)
        if number % 8 == 0:
            watched.leased.clear()
        if number % 32 == 0:
            evicted += watched.pick(min(len(watched.held) // 3, 7))
        assert len(policy) == len(watched.held) <= capacity
    watched.check_whole()
    return evicted


@every_policy
@pytest.mark.parametrize("capacity", [1, 2, 7, 64])
def test_no_block_is_lost_or_doubled_in_the_long_run(make: Make, capacity: int) -> None:
    long_history(make(capacity), max(capacity, 4), capacity, num_steps=2000)


@every_policy
@given(history=histories)
def test_the_same_history_ends_the_same(make: Make, history: list[tuple[str, int]]) -> None:
    watched, twin = Watched(make(CAPACITY)), Watched(make(CAPACITY))
    for what, number in history:
        assert step(watched, what, number) == step(twin, what, number)


def fingerprints() -> str:
    """Of long histories under each policy, in a form that crosses processes."""
    found = {
        name: sha256(b"".join(long_history(make(64), 64, 5, num_steps=300))).hexdigest()
        for name, make in POLICIES.items()
    }
    return repr(found)


@every_policy
@pytest.mark.parametrize("seed", range(4))
def test_many_at_once_are_as_one_by_one(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    capacity = 200
    at_once, one_by_one = make(capacity), make(capacity)
    held: dict[BlockKey, None] = {}
    # Branches of a tree: prompts share their beginnings, and some start in the middle.
    prompts = [
        [key_of(1000 * (place < shared or number) + place) for place in range(length)]
        for number in range(30)
        for shared, length in [(rng.randrange(8), rng.randrange(8, 40))]
    ]
    for _ in range(300):
        prompt = rng.choice(prompts)
        prompt = prompt[rng.randrange(4) :] if rng.random() < 0.1 else prompt
        used = [key for key in prompt if key in held]
        new = [key for key in prompt if key not in held]
        parents = [prompt[place - 1] if (place := prompt.index(key)) else None for key in new]
        at_once.touch_all(used)
        for key in used:
            one_by_one.touch(key)
        num_victims = max(0, len(held) + len(new) - capacity)
        in_use = set(used)
        victims = at_once.pick(num_victims, lambda key, in_use=in_use: key not in in_use)
        assert victims == one_by_one.pick(num_victims, lambda key, in_use=in_use: key not in in_use)
        at_once.insert_all(new, parents)
        for key, parent in zip(new, parents, strict=True):
            one_by_one.insert(key, parent)
        for key in victims:
            del held[key]
        held.update(dict.fromkeys(new))
    assert len(held) > capacity // 2
    assert at_once.pick(len(held), lambda _: True) == one_by_one.pick(len(held), lambda _: True)


def test_every_process_chooses_the_same() -> None:
    """Whatever its hash seed: nothing follows from the order of a set."""
    here = Path(__file__)
    path = os.pathsep.join([str(here.parent), str(here.parent.parent), *sys.path])
    told = {
        subprocess.run(
            [sys.executable, "-c", "import test_contract as t; print(t.fingerprints())"],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert told == {fingerprints()}


def peak_bytes(policy: Policy, capacity: int, numbers: range) -> int:
    """The most memory that is held while prompts come, many of them again after their eviction."""
    policy.pick(len(policy), lambda _: True)  # begin with an empty tier
    held: set[BlockKey] = set()
    chance = random.Random(numbers.start)
    tracemalloc.reset_peak()
    for number in numbers:
        prompt = number - chance.randrange(60)
        previous: BlockKey | None = None
        for position in range(1 + prompt % 5):
            key = key_of((prompt, position))
            if key in held:
                policy.touch(key)
            else:
                if len(held) == capacity:
                    held.difference_update(policy.pick(1, lambda _: True))
                policy.insert(key, previous)
                held.add(key)
            previous = key
    return tracemalloc.get_traced_memory()[1]


@every_policy
def test_memory_is_bounded(make: Make) -> None:
    capacity = 32
    tracemalloc.start()
    try:
        policy = make(capacity)
        # The first stretch is long enough for the most ghosts that any policy keeps.
        early = peak_bytes(policy, capacity, range(2000))
        late = peak_bytes(policy, capacity, range(2000, 4800))
    finally:
        tracemalloc.stop()
    assert late < 1.5 * early


@every_policy
def test_one_block_used_for_ever_takes_no_more_memory(make: Make) -> None:
    tracemalloc.start()
    try:
        policy = make(CAPACITY)
        for key in KEYS[:CAPACITY]:
            policy.insert(key)
        before_bytes, _ = tracemalloc.get_traced_memory()
        for _ in range(5000):
            policy.touch(KEYS[0])
        after_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after_bytes - before_bytes < 20_000


@every_policy
def test_a_ledger_adds_up(make: Make) -> None:
    """Through the book that it serves: claims of several blocks, leases, drops."""
    ledger, chance = Ledger(32, make(32)), random.Random(3)
    for _ in range(1500):
        prompt = chance.randrange(40)
        keys = [key_of((prompt, position)) for position in range(chance.randrange(1, 12))]
        leased = [slot for slot in ledger.use_ready(keys) if slot is not None]
        behind: dict[BlockKey, BlockKey | None] = dict(zip(keys[1:], keys, strict=False))
        new = [key for key in keys if key not in ledger]
        if new and ledger.claim(new, [behind.get(key) for key in new]) is not None:
            ledger.commit(new)
        if chance.random() < 0.1 and ledger.is_ready(keys[0]):
            ledger.drop(keys[0])
        if chance.random() < 0.1:
            ledger.demote(keys[-1])
        ledger.release(leased)
        ledger.check()


def test_every_policy_can_be_chosen() -> None:
    assert set(config.POLICIES) == set(POLICIES)
