"""Blocks through a real ledger, request by request: hits, refusals, the published figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.books.ledger import Ledger
from penstock.errors import ConfigError
from penstock.policies import LRU, POLICIES
from penstock.sim.formats import read_trace
from penstock.sim.optimum import optimum, unbounded
from penstock.sim.replay import new_ledger, replay
from penstock.sim.trace import Trace, TraceRequest
from penstock.types import BlockKey

TRACES = Path(os.environ.get("PENSTOCK_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
MOONCAKE = TRACES / "mooncake" / "conversation_trace.jsonl"


def key(name: object) -> BlockKey:
    return BlockKey(str(name).encode().ljust(32, b"."))


def request(*names: object, output: tuple[object, ...] = ()) -> TraceRequest:
    return TraceRequest(0.0, 16 * len(names), 1, tuple(map(key, names)), tuple(map(key, output)))


def chains(paths: list[list[int]]) -> list[TraceRequest]:
    """A name stands for its block and all before it."""
    return [
        request(*("/".join(map(str, path[: end + 1])) for end in range(len(path))))
        for path in paths
    ]


PATHS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=40).map(chains)


@pytest.fixture(scope="module")
def mooncake() -> Trace:
    if not MOONCAKE.exists():
        pytest.skip("Mooncake's trace is not here: PENSTOCK_TRACES names the folder it lies in")
    return read_trace(MOONCAKE)


def test_a_hit_needs_all_before_it() -> None:
    ledger = new_ledger("lru", 10)
    found = replay([request("a", "b", "c"), request("a", "x", "c")], ledger)
    assert (found.num_blocks, found.num_hits) == (6, 1)
    ledger.check()
    assert ledger.num_leased == 0


def test_what_an_answer_made_can_be_found_by_the_next_prompt() -> None:
    found = replay([request("a", output=("b",)), request("a", "b")], new_ledger("lru", 10))
    assert (found.num_blocks, found.num_hits, found.num_written) == (3, 2, 2)


def test_a_request_larger_than_the_tier_keeps_its_head() -> None:
    ledger = new_ledger("lru", 3)
    found = replay([request(*range(8)), request(0, 1, 2, 3)], ledger)
    assert found.num_hits == 3
    assert found.num_refused == 5 + 1


def test_a_policy_may_refuse() -> None:
    class Choosy(LRU):
        def admit(self, key: BlockKey) -> bool:
            return not key.startswith(b"b")

    ledger = Ledger(10, Choosy(10))
    found = replay([request("a", "b", "c")] * 2, ledger)
    assert (found.num_hits, found.num_refused, found.num_written) == (1, 2, 2)


def test_tails_first_evicts_a_chain_from_its_end() -> None:
    requests = [request("a", "b", "c"), request("x"), request("a", "b", "c")]
    heads, tails = (replay(requests, new_ledger("lru", 3), tails_first=t) for t in (False, True))
    assert (heads.num_hits, tails.num_hits) == (0, 2)


def test_unknown_policies_and_empty_tiers_are_refused() -> None:
    with pytest.raises(ConfigError, match="no policy 'fifo'"):
        new_ledger("fifo", 10)
    with pytest.raises(ConfigError, match="capacity is 0 blocks"):
        new_ledger("lru", 0)


def test_progress_is_told_and_requests_may_come_one_by_one() -> None:
    def stream() -> Iterator[TraceRequest]:
        for number in range(600):
            yield request(number)

    ticks: list[int] = []
    assert replay(stream(), new_ledger("lru", 5), ticks.append).num_requests == 600
    assert ticks == [256, 512, 600]


@pytest.mark.parametrize("policy", POLICIES)
@given(requests=PATHS, capacity=st.integers(1, 12), tails_first=st.booleans())
def test_no_policy_beats_the_optimum(
    policy: str, requests: list[TraceRequest], capacity: int, tails_first: bool
) -> None:
    ledger = new_ledger(policy, capacity)
    found = replay(requests, ledger, tails_first=tails_first)
    ledger.check()
    best = optimum(requests, capacity)
    assert found.num_hits <= best.num_hits <= unbounded(requests).num_hits
    assert found == replay(requests, new_ledger(policy, capacity), tails_first=tails_first)


Rate = Callable[[Trace, int], float]
FIGURES: dict[str, tuple[Rate, tuple[float, float, float]]] = {
    "LRU": (
        lambda trace, blocks: (
            replay(trace.requests, new_ledger("lru", blocks), tails_first=True).hit_rate
        ),
        (0.045, 0.087, 0.263),
    ),
    "optimum": (
        lambda trace, blocks: optimum(trace.requests, blocks).hit_rate,
        (0.191, 0.322, 0.366),
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_the_mooncake_trace(mooncake: Trace, name: str) -> None:
    assert len(mooncake.requests) == 12_031
    assert sum(len(request.prompt_blocks) for request in mooncake.requests) == 288_500
    rate, expected = FIGURES[name]
    found = [round(rate(mooncake, blocks), 3) for blocks in (1000, 4000, 16_000)]
    assert found == list(expected)
    assert round(unbounded(mooncake.requests).hit_rate, 3) == 0.366
