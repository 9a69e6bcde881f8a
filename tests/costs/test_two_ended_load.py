"""Where front and back meet, by arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.costs.choose import LoadChoice, choose_load, choose_two_ended
from penstock.costs.rates import LinkRate, PrefillRate
from penstock.types import Match, Run, Tier

BLOCK_TOKENS = 10
BLOCK_BYTES = 1000
PREFILL = PrefillRate(1000.0)  # a block takes 0.01 s


def choose(match: Match, remote: float, host: float = 1e9) -> LoadChoice:
    rates = {Tier.HOST: LinkRate(host), Tier.REMOTE: LinkRate(remote)}
    return both(match, rates, PREFILL)


def both(match: Match, rates: dict[Tier, LinkRate], prefill: PrefillRate) -> LoadChoice:
    plain = choose_load(
        match,
        block_bytes=BLOCK_BYTES,
        block_tokens=BLOCK_TOKENS,
        num_past_tokens=0,
        rates=rates,
        prefill=prefill,
    )
    return choose_two_ended(
        match,
        plain,
        block_bytes=BLOCK_BYTES,
        block_tokens=BLOCK_TOKENS,
        num_past_tokens=0,
        rates=rates,
        prefill=prefill,
    )


def test_a_tier_as_fast_as_computing_saves_half() -> None:
    match = Match(100, (Run(Tier.REMOTE, 100),))
    assert choose(match, remote=1e5) == LoadChoice(0, 0.0, 0.0, num_two_ended=100)


def test_who_cannot_load_from_both_ends_is_told_what_to_load() -> None:
    match = Match(100, (Run(Tier.REMOTE, 100),))
    slower, faster = choose(match, remote=8e4), choose(match, remote=1.2e5)
    assert slower.num_two_ended == faster.num_two_ended == 100
    assert slower.one_ended.num_blocks == 0
    assert faster.one_ended.num_blocks == 100
    assert faster.one_ended.one_ended.num_two_ended == 0


def test_a_fast_tier_is_simply_loaded() -> None:
    match = Match(100, (Run(Tier.REMOTE, 100),))
    assert choose(match, remote=1e8).num_two_ended == 0
    assert choose(match, remote=1e8).num_blocks == 100


def test_a_hopeless_one_is_left_alone() -> None:
    match = Match(100, (Run(Tier.REMOTE, 100),))
    assert choose(match, remote=1e3).num_two_ended == 0
    assert choose(match, remote=1e3).num_blocks == 0


def test_what_lies_in_dram_in_front_is_loaded_first() -> None:
    match = Match(100, (Run(Tier.HOST, 40), Run(Tier.REMOTE, 60)))
    choice = choose(match, remote=1e5)
    assert (choice.num_blocks, choice.num_two_ended) == (40, 60)


def test_a_few_blocks_are_not_worth_it() -> None:
    assert choose(Match(3, (Run(Tier.REMOTE, 3),)), remote=1e5).num_two_ended == 0


@given(
    num_host=st.integers(0, 50),
    num_remote=st.integers(0, 400),
    remote=st.floats(1e3, 1e9),
    quadratic=st.floats(0, 1e-6),
)
def test_it_is_never_slower_than_the_better_of_the_two_alone(
    num_host: int, num_remote: int, remote: float, quadratic: float
) -> None:
    runs = [Run(Tier.HOST, num_host)] if num_host else []
    runs += [Run(Tier.REMOTE, num_remote)] if num_remote else []
    match = Match(num_host + num_remote, tuple(runs))
    prefill = PrefillRate(1000.0, quadratic)
    rates = {Tier.HOST: LinkRate(1e9), Tier.REMOTE: LinkRate(remote)}
    choice = both(match, rates, prefill)
    assert choice.num_blocks + choice.num_two_ended <= match.num_blocks
    if not choice.num_two_ended:
        return
    assert choice.num_blocks + choice.num_two_ended == match.num_blocks
    lead = choice.num_blocks
    # Play it: one block after the other, computed from the front and loaded from the back.
    front, back, computed, loaded = lead, match.num_blocks, 0.0, 0.0
    while front < back:
        next_front = computed + prefill.seconds(BLOCK_TOKENS, front * BLOCK_TOKENS)
        next_back = loaded + BLOCK_BYTES / remote
        if next_front <= next_back:
            front, computed = front + 1, next_front
        else:
            back, loaded = back - 1, next_back
    played = lead * BLOCK_BYTES / 1e9 + max(computed, loaded)
    all_computed = prefill.seconds(match.num_blocks * BLOCK_TOKENS)
    all_loaded = max(num_remote * BLOCK_BYTES / remote, match.num_blocks * BLOCK_BYTES / 1e9)
    assert played <= min(all_computed, all_loaded) * 1.01
