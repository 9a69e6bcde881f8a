"""The rules of the routers, without instances."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from penstock.errors import ConfigError
from penstock.sim.prefix_tree import PrefixTree
from penstock.sim.routers import (
    CacheAware,
    CacheAwareRules,
    LeastLoaded,
    RoundRobin,
    RoutedPrompt,
    Sticky,
    new_router,
    routed_prompts,
    session_keys,
)
from penstock.sim.trace import Trace, TraceRequest
from penstock.types import BlockKey

IDLE = [0, 0, 0, 0]


def key(name: object) -> BlockKey:
    return BlockKey(str(name).encode().ljust(32, b".")[:32])


def keys(*names: object) -> tuple[BlockKey, ...]:
    """Chained, as in a trace: a key stands for its block and all before it."""
    return tuple(key(names[: end + 1]) for end in range(len(names)))


def prompt(*names: object, tail: int = 0, session: str = "") -> RoutedPrompt:
    """A prompt of blocks with 10 tokens each, and `tail` tokens that the trace does not name."""
    found = keys(*names)
    sizes = (10,) * len(found)
    return RoutedPrompt(found, sizes, 10 * len(found) + tail, session.encode())


def request(session: str, *names: object) -> TraceRequest:
    return TraceRequest(0.0, 10 * len(names), 1, keys(*names), session=session)


def test_in_turn() -> None:
    router = RoundRobin(3)
    assert [router.route(prompt("a"), [9, 0, 0], 0.0) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_the_least_loaded_is_the_first_of_several() -> None:
    assert LeastLoaded().route(prompt("a"), [3, 1, 2, 1], 0.0) == 1


def test_a_session_stays_and_few_move_when_an_instance_leaves() -> None:
    before, after = Sticky(8), Sticky(7)
    sessions = [prompt("a", session=f"session {number}") for number in range(4000)]
    places = [before.route(each, IDLE, 0.0) for each in sessions]
    assert places == [before.route(each, [5, 0, 0, 0], 1.0) for each in sessions]
    counts = Counter(places)
    assert set(counts) == set(range(8))
    assert max(counts.values()) < 2 * len(sessions) / 8
    for each, place in zip(sessions, places, strict=True):
        if place != 7:  # the last one has left
            assert after.route(each, IDLE, 0.0) == place


def test_without_sessions_a_prompt_is_known_by_its_first_uncommon_block() -> None:
    turns = [
        request("", "system", "a"),
        request("", "system", "a", "a2"),
        request("", "system", "b"),
        request("", "system", "b", "b2"),
        request("named", "system", "c"),
        request("", "system"),
        request("", "system"),
    ]
    found = session_keys(turns)
    assert found[0] == found[1] == keys("system", "a")[1]
    assert found[2] == found[3] != found[0]
    assert found[4] == b"named"
    assert found[5] != found[6]


def test_a_prompt_goes_where_most_of_it_went() -> None:
    router = CacheAware(4, CacheAwareRules())
    # Nothing is known: the least loaded.
    assert router.route(prompt("a", 1, 2), [1, 1, 0, 1], 0.0) == 2
    assert router.route(prompt("b", 1, 2), [1, 0, 1, 1], 0.0) == 1
    # A later turn, of which most is known.
    assert router.route(prompt("a", 1, 2, 3), IDLE, 0.0) == 2
    assert router.route(prompt("b", 1, 2, 3), IDLE, 0.0) == 1
    # Of nine blocks two are known: too few. Of six, exactly a third: enough.
    assert router.route(prompt("a", 1, *range(7)), IDLE, 0.0) == 0
    assert router.route(prompt("b", 1, *range(50, 54)), IDLE, 0.0) == 1


def test_the_share_is_of_all_tokens_and_must_be_exceeded() -> None:
    rules = CacheAwareRules(cache_threshold=0.5)
    for tail, expected in ((0, 3), (19, 3), (20, 0), (500, 0)):
        router = CacheAware(4, rules)
        assert router.route(prompt("a", 1), [1, 1, 1, 0], 0.0) == 3
        assert router.route(prompt("a", 1, tail=tail), IDLE, 0.0) == expected


def test_a_prefix_belongs_to_the_one_that_was_sent_it_first() -> None:
    router = CacheAware(2, CacheAwareRules(balance_abs_threshold=2))
    assert router.route(prompt("a", 1), [0, 0], 0.0) == 0
    # Load is uneven, so another gets it, and the tree learns that too.
    assert router.route(prompt("a", 1, 2), [3, 0], 0.0) == 1
    assert router.route(prompt("a", 1), [0, 0], 0.0) == 0
    assert router.route(prompt("a", 1, 2), [0, 0], 0.0) == 1


@pytest.mark.parametrize(
    ("loads", "is_uneven"),
    [([10, 0], False), ([11, 0], True), ([40, 29], False), ([40, 20], True), ([31, 20], True)],
)
def test_uneven_load_needs_both_thresholds(loads: list[int], is_uneven: bool) -> None:
    router = CacheAware(2, CacheAwareRules(balance_abs_threshold=10, balance_rel_threshold=1.5))
    assert router.route(prompt("a"), [0, 0], 0.0) == 0
    assert router.route(prompt("a"), loads, 0.0) == int(is_uneven)


def test_the_tree_agrees_with_a_list_of_prompts() -> None:
    """Against the plain rule: a block belongs to the worker that was sent it first."""
    rng = random.Random(5)
    tree = PrefixTree(3)
    owner: dict[BlockKey, int] = {}
    sent: list[set[BlockKey]] = [set() for _ in range(3)]
    for _ in range(3000):
        blocks = keys(*(rng.randrange(3) for _ in range(rng.randrange(1, 9))))
        known = 0
        while known < len(blocks) and blocks[known] in owner:
            known += 1
        size, worker = tree.match(blocks)
        assert size == 10 * known
        if known:
            assert worker == owner[blocks[known - 1]]
        worker = rng.randrange(3)
        tree.insert(blocks, [10] * len(blocks), worker)
        sent[worker].update(blocks)
        for each in blocks:
            owner.setdefault(each, worker)
    assert tree.sizes == [10 * len(blocks) for blocks in sent]


def test_the_tree_forgets_what_is_oldest_and_keeps_beginnings() -> None:
    tree = PrefixTree(2)
    for name in range(20):
        tree.insert(keys("system", name, "end"), [10, 10, 10], 0)
    tree.insert(keys("other"), [10], 1)
    tree.evict(100)
    assert tree.sizes == [90, 10]  # the system prompt and the last four
    assert tree.match(keys("system", 19, "end")) == (30, 0)
    assert tree.match(keys("system", 0, "end")) == (10, 0)
    assert tree.match(keys("other")) == (10, 1)
    tree.evict(0)
    assert tree.sizes == [0, 0]
    assert tree.match(keys("system"))[0] == 0


def test_what_a_router_reads_of_a_trace() -> None:
    """A trace may name a partial block at the end, or leave tokens unnamed."""
    requests = (
        TraceRequest(0.0, 25, 1, keys(1, 2, 3)),
        TraceRequest(0.0, 25, 1, keys(1, 2)),
        TraceRequest(0.0, 5, 1, ()),
    )
    found = routed_prompts(Trace("made", 10, requests))
    assert [each.sizes for each in found] == [(10, 10, 5), (10, 10), ()]
    assert [each.num_tokens for each in found] == [25, 25, 5]


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache_threshold": 1.1},
        {"cache_threshold": float("nan")},
        {"balance_abs_threshold": -1},
        {"balance_rel_threshold": 0.9},
    ],
)
def test_wrong_rules(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        CacheAwareRules(**wrong)  # type: ignore[arg-type]


def test_an_unknown_router() -> None:
    with pytest.raises(ConfigError, match="'random': expected one of round-robin, sticky, cache"):
        new_router("random", 2)
