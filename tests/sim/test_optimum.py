"""The optimum against every possible choice, on traces small enough to try them all."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.policies import POLICIES
from penstock.sim.optimum import optimum, unbounded
from penstock.sim.replay import new_ledger, replay
from penstock.sim.trace import TraceRequest
from penstock.types import BlockKey


def chain(path: tuple[int, ...]) -> TraceRequest:
    names = [bytes(path[: end + 1]).ljust(32, b".") for end in range(len(path))]
    return TraceRequest(0.0, 16 * len(path), 1, tuple(map(BlockKey, names)))


def answered(request: TraceRequest, num_output: int) -> TraceRequest:
    """With its last blocks as the answer to the others."""
    keys = request.prompt_blocks
    start = max(0, len(keys) - num_output)
    return TraceRequest(0.0, 16 * start, 16 * num_output, keys[:start], keys[start:])


def most_hits(requests: list[TraceRequest], capacity: int) -> int:
    """By trying every set of blocks that could be kept after each request."""

    @cache
    def best(number: int, held: frozenset[BlockKey]) -> int:
        if number == len(requests):
            return 0
        prompt = requests[number].prompt_blocks
        hits = next((i for i, key in enumerate(prompt) if key not in held), len(prompt))
        offered = sorted(held | {*prompt, *requests[number].output_blocks})
        size = min(capacity, len(offered))
        return hits + max(best(number + 1, frozenset(kept)) for kept in combinations(offered, size))

    return best(0, frozenset())


Paths = list[tuple[tuple[int, ...], int]]
PATHS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple), st.integers(0, 2)),
    min_size=1,
    max_size=7,
)


@given(paths=PATHS, capacity=st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_no_choice_has_more_hits_and_one_has_as_many(paths: Paths, capacity: int) -> None:
    """Of prompts, some with answers that later prompts repeat."""
    requests = [answered(chain(path), num_output) for path, num_output in paths]
    assert optimum(requests, capacity).num_hits == most_hits(requests, capacity)


@given(
    prompts=st.lists(
        st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True), min_size=1, max_size=6
    ),
    capacity=st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_no_choice_has_more_hits_where_names_are_not_of_prefixes(
    prompts: list[list[int]], capacity: int
) -> None:
    requests = [
        TraceRequest(0.0, 16 * len(prompt), 1, tuple(BlockKey(bytes([b]) * 32) for b in prompt))
        for prompt in prompts
    ]
    assert optimum(requests, capacity).num_hits >= most_hits(requests, capacity)


@pytest.mark.parametrize("capacity", [20, 60, 150, 400])
def test_growing_sessions_on_a_small_tier(capacity: int) -> None:
    """Sessions in turn, each longer than its share of the tier: the case of heads first or last."""
    sessions = [[(number, *range(length)) for length in range(10, 60)] for number in range(6)]
    requests = [chain(turn) for turns in zip(*sessions, strict=True) for turn in turns]
    best = optimum(requests, capacity)
    for policy in POLICIES:
        for tails_first in (False, True):
            found = replay(requests, new_ledger(policy, capacity), tails_first=tails_first)
            assert found.num_hits <= best.num_hits
    assert best.num_hits >= 49 * min(capacity, 60)  # in each round but the first


def test_what_never_returns_passes_by() -> None:
    once = [chain((2, number)) for number in range(2)]
    found = optimum([chain((1,)), *once, chain((1,))], 1)
    assert found.num_hits == 1


def test_what_an_answer_made_is_kept_if_a_prompt_reads_it() -> None:
    made = TraceRequest(0.0, 16, 16, chain((1,)).prompt_blocks, chain((1, 2)).prompt_blocks[1:])
    assert optimum([made, chain((1, 2))], 2).num_hits == 2
    assert unbounded([made, chain((1, 2))]).num_hits == 2
    assert optimum([made, chain((1, 2))], 1).num_hits == 1


def test_enough_room_is_as_good_as_no_bound() -> None:
    requests = [chain((a, b, c)) for a in range(3) for b in range(3) for c in range(3)] * 2
    assert optimum(requests, 39).num_hits == unbounded(requests).num_hits
    assert unbounded(requests).num_written == 39
    assert unbounded([]).hit_rate == 0.0


def test_no_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity is 0 blocks"):
        optimum([], 0)
