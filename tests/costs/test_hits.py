"""Load or compute, where only some lengths are legal and bytes do not grow evenly with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.costs.choose import Hit, LoadChoice, LoadOrCompute, choose_hit
from penstock.costs.rates import LinkRate, PrefillRate
from penstock.types import Run, Tier

MIB = 1 << 20
PREFILL = PrefillRate(1000.0)  # a millisecond a token


def hit(num_tokens: int, num_host: int = 0, num_disk: int = 0) -> Hit:
    counts = ((Tier.HOST, num_host), (Tier.DISK, num_disk))
    return Hit(num_tokens, tuple(Run(tier, count) for tier, count in counts if count))


def choose(
    hits: list[Hit], prefill: PrefillRate | None = PREFILL, **seconds_per_block: float
) -> tuple[Hit | None, LoadChoice]:
    links = {
        Tier[name.upper()]: LinkRate(MIB / seconds) for name, seconds in seconds_per_block.items()
    }
    return choose_hit(hits, block_bytes=MIB, num_past_tokens=0, rates=links, prefill=prefill)


def test_without_hits_there_is_nothing_to_load() -> None:
    assert choose([], host=0.001) == (None, LoadChoice(0))


def test_while_nothing_is_known_the_longest_is_loaded() -> None:
    hits = [hit(64, 10), hit(32, 6)]
    assert choose(hits, prefill=None, host=0.001) == (hits[0], LoadChoice(10))


def test_a_link_that_is_not_known_is_tried_with_a_limit() -> None:
    hits = [hit(64, 10, 2), hit(32, 6)]
    found, choice = choose(hits)
    assert found is hits[0]
    assert choice.num_blocks == 12
    assert choice.load_seconds is None
    assert choice.compute_seconds == pytest.approx(0.064)
    assert choice.patience_seconds is not None


def test_the_longest_is_loaded_if_loading_is_faster() -> None:
    hits = [hit(64, 10), hit(32, 6)]
    found, choice = choose(hits, host=0.001)
    assert found is hits[0]
    assert choice.num_blocks == 10
    assert choice.load_seconds == pytest.approx(0.010)
    assert choice.compute_seconds == pytest.approx(0.064)


def test_a_shorter_hit_is_loaded_if_the_rest_of_a_longer_one_costs_more_than_computing() -> None:
    """The last blocks of the longest hit lie on a slow disk."""
    hits = [hit(64, 10, 4), hit(48, 9)]
    found, choice = choose(hits, host=0.001, disk=0.020)
    assert found is hits[1]
    assert choice.num_blocks == 9


def test_a_longer_hit_may_cost_less_than_a_shorter_one() -> None:
    """A checkpoint costs the same at every length, but may lie in another tier."""
    hits = [hit(64, 8), hit(48, 6, 4)]
    found, _ = choose(hits, host=0.001, disk=0.020)
    assert found is hits[0]


def test_nothing_is_loaded_if_computing_is_faster() -> None:
    hits = [hit(64, 10), hit(32, 6)]
    found, choice = choose(hits, host=0.1)
    assert found is None
    # The seconds are those of the longest: that is what was declined.
    assert choice.num_blocks == 0
    assert choice.load_seconds == pytest.approx(1.0)
    assert choice.compute_seconds == pytest.approx(0.064)


def test_the_fixed_time_of_a_step_is_not_saved_by_loading() -> None:
    hits = [hit(10, 2)]
    slow_start = PrefillRate(1000.0, fixed_seconds=10.0)
    assert choose(hits, slow_start, host=0.006)[0] is None
    assert choose(hits, slow_start, host=0.004)[0] is hits[0]


@given(
    blocks=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=8),
    host=st.floats(1e-4, 1e-2),
    disk=st.floats(1e-4, 1e-2),
)
def test_no_other_legal_hit_saves_more(
    blocks: list[tuple[int, int]], host: float, disk: float
) -> None:
    hits = [
        hit(16 * (len(blocks) - place), *counts)
        for place, counts in enumerate(blocks)
        if any(counts)
    ]
    found, choice = choose(hits, host=host, disk=disk)

    def gain(one: Hit) -> float:
        # Tiers work in parallel, and all blocks come through DRAM.
        num_disk = sum(run.num_blocks for run in one.runs if run.tier is Tier.DISK)
        num_all = sum(run.num_blocks for run in one.runs)
        return one.num_tokens / 1000 - max(host * num_all, disk * num_disk)

    best = max([0.0, *map(gain, hits)])
    assert (0.0 if found is None else gain(found)) == pytest.approx(best, abs=1e-9)
    if found is not None:
        assert found in hits
        assert choice.num_blocks == sum(run.num_blocks for run in found.runs)


def test_now_and_then_a_link_that_seems_too_slow_is_tried() -> None:
    costs = LoadOrCompute(MIB, 16)
    for _ in range(40):
        costs.observe([(1000, 0)], 1.0)
        costs.observe([(2000, 0)], 2.0)
    assert costs.prefill is not None
    links = {Tier.HOST: LinkRate(MIB / 10.0)}
    hits = [hit(64, 10), hit(32, 6)]
    found = [costs.choose_hit(hits, 0, links) for _ in range(64)]
    tried = [(one, choice) for one, choice in found if one is not None]
    assert len(tried) == 2
    assert all(one is hits[0] and choice.num_blocks == 10 for one, choice in tried)
    assert all(choice.patience_seconds is not None for _, choice in tried)
