"""What hand-made traces read again."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.plan.reuse import analyse
from penstock.sim.trace import Trace, TraceRequest
from penstock.types import BlockKey


def request(at: float, names: str, *, output: str = "", tokens: int | None = None) -> TraceRequest:
    def keys(text: str) -> tuple[BlockKey, ...]:
        return tuple(BlockKey(name.encode()) for name in text)

    num_tokens = 10 * len(names) if tokens is None else tokens
    return TraceRequest(at, num_tokens, 5, keys(names), keys(output))


def trace(*requests: TraceRequest) -> Trace:
    return Trace("handmade", 10, requests)


def test_nothing_is_read_again() -> None:
    found = analyse(trace(request(0, "ab"), request(1, "cd")))
    assert found.reuse_share == 0
    assert (found.num_distinct_blocks, found.num_live_blocks) == (4, 0)


def test_a_conversation_reads_its_history_again() -> None:
    found = analyse(trace(request(0, "a"), request(2, "ab"), request(4, "abc")))
    assert found.reuse_share == pytest.approx((1 + 2) / 6)
    assert found.requests_per_second == pytest.approx(0.5)
    assert (found.p50_tokens, found.p90_tokens, found.max_tokens) == (25, 35, 35)
    assert found.mean_prompt_tokens == 20
    assert found.num_live_blocks == 2  # c is never read again


def test_only_a_leading_run_counts() -> None:
    found = analyse(trace(request(0, "abc"), request(1, "xbc")))
    assert found.reuse_share == 0


def test_answers_are_found_by_the_next_turn() -> None:
    found = analyse(trace(request(0, "a", output="b"), request(1, "abc")))
    assert found.reuse_share == pytest.approx(2 / 4)


def test_a_block_that_is_not_full_counts_for_what_it_holds() -> None:
    found = analyse(trace(request(0, "ab", tokens=14), request(1, "ab", tokens=14)))
    assert found.reuse_share == pytest.approx(0.5)


def test_what_lives_at_once_is_less_than_what_is_seen() -> None:
    """Ten conversations one after another, two turns each: one at a time lives."""
    requests = [
        request(turn, name * 3) for turn, name in enumerate(n for n in "abcdefghij" for _ in "12")
    ]
    found = analyse(trace(*requests))
    assert found.num_distinct_blocks == 10
    assert found.num_live_blocks == 1


def test_all_at_once_have_no_rate() -> None:
    assert analyse(trace(request(0, "a"), request(0, "b"))).requests_per_second is None


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no requests"):
        analyse(trace())
