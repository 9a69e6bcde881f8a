"""MIN against every possible choice, on traces small enough to try them all."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.sim.optimum import belady, unbounded
from penstock.sim.trace import TraceRequest
from penstock.types import BlockKey


def chain(path: tuple[int, ...]) -> TraceRequest:
    names = [bytes(path[: end + 1]).ljust(32, b".") for end in range(len(path))]
    return TraceRequest(0.0, 16 * len(path), 1, tuple(map(BlockKey, names)))


def most_hits(requests: list[TraceRequest], capacity: int) -> int:
    """By trying every set of blocks that could be kept after each request."""

    @cache
    def best(number: int, held: frozenset[BlockKey]) -> int:
        if number == len(requests):
            return 0
        prompt = requests[number].prompt_blocks
        hits = next((i for i, key in enumerate(prompt) if key not in held), len(prompt))
        offered = sorted(held | set(prompt))
        size = min(capacity, len(offered))
        return hits + max(best(number + 1, frozenset(kept)) for kept in combinations(offered, size))

    return best(0, frozenset())


@given(
    paths=st.lists(
        st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
    ),
    capacity=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_tails_first_is_the_optimum(paths: list[tuple[int, ...]], capacity: int) -> None:
    requests = [chain(path) for path in paths]
    assert belady(requests, capacity, tails_first=True).num_hits == most_hits(requests, capacity)
    assert belady(requests, capacity).num_hits <= most_hits(requests, capacity)


def test_what_never_returns_passes_by() -> None:
    once = [chain((2, number)) for number in range(2)]
    found = belady([chain((1,)), *once, chain((1,))], 1, tails_first=True)
    assert found.num_hits == 1


def test_what_an_answer_made_is_kept_if_a_prompt_reads_it() -> None:
    made = TraceRequest(0.0, 16, 16, chain((1,)).prompt_blocks, chain((1, 2)).prompt_blocks[1:])
    assert belady([made, chain((1, 2))], 2).num_hits == 2
    assert unbounded([made, chain((1, 2))]).num_hits == 2
    assert belady([made, chain((1, 2))], 1, tails_first=True).num_hits == 1


def test_enough_room_is_as_good_as_no_bound() -> None:
    requests = [chain((a, b, c)) for a in range(3) for b in range(3) for c in range(3)] * 2
    assert belady(requests, 39).num_hits == unbounded(requests).num_hits
    assert unbounded(requests).num_written == 39
    assert unbounded([]).hit_rate == 0.0


def test_no_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds nothing"):
        belady([], 0)
