from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.costs.choose import LoadChoice, choose_load
from penstock.costs.meters import PrefillMeter, RateMeter, WaitMeter
from penstock.costs.rates import LinkRate, PrefillRate, break_even_tokens, load_seconds
from penstock.errors import ConfigError
from penstock.types import Match, Run, Tier

LLAMA_8B_BYTES_PER_TOKEN = 131_072

rates = st.floats(1e-3, 1e12)
costs = st.floats(0, 1e3)
links = st.builds(LinkRate, rates, costs)
prefills = st.builds(PrefillRate, rates, st.floats(0, 1e-2), costs)


def test_a_link_takes_its_latency_and_its_share() -> None:
    link = LinkRate(bytes_per_second=50e9, latency_seconds=1e-3)
    assert link.seconds(50_000_000) == pytest.approx(2e-3)
    assert link.seconds(0) == link.seconds(-1) == 0.0


def test_prefill_adds_its_parts() -> None:
    prefill = PrefillRate(1000.0, quadratic_seconds_per_token2=1e-6, fixed_seconds=0.5)
    assert prefill.seconds(2000) == pytest.approx(0.5 + 2.0 + 4.0)
    assert prefill.seconds(1000, 1000) == pytest.approx(0.5 + 1.0 + 3.0)
    assert prefill.seconds(0, 1000) == 0.0


@given(prefills, st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_a_tail_costs_the_whole_less_the_head(
    prefill: PrefillRate, num_tokens: int, num_past: int
) -> None:
    fixed = prefill.fixed_seconds
    tail = prefill.seconds(num_tokens, num_past) - fixed
    whole = prefill.seconds(num_past + num_tokens) - fixed
    head = prefill.seconds(num_past) - fixed
    assert tail == pytest.approx(whole - head, rel=1e-6, abs=1e-9 * whole + 1e-9 * fixed)


@given(links, prefills, st.integers(1, 1 << 30))
def test_more_never_takes_less(link: LinkRate, prefill: PrefillRate, amount: int) -> None:
    assert link.seconds(amount + 1) >= link.seconds(amount) >= 0
    assert prefill.seconds(amount + 1) >= prefill.seconds(amount) >= 0
    assert prefill.seconds(amount, 1) >= prefill.seconds(amount)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"bytes_per_second is .* expected"):
        LinkRate(rate)
    with pytest.raises(ConfigError, match=r"tokens_per_second is .* expected"):
        PrefillRate(rate)
    with pytest.raises(ConfigError, match=r"kv_bytes_per_token is .* expected"):
        break_even_tokens(LinkRate(1.0), PrefillRate(1.0), rate)


@pytest.mark.parametrize("cost", [-1.0, math.inf, math.nan])
def test_impossible_costs_are_refused(cost: float) -> None:
    with pytest.raises(ConfigError, match="latency_seconds"):
        LinkRate(1.0, cost)
    with pytest.raises(ConfigError, match="quadratic"):
        PrefillRate(1.0, cost)
    with pytest.raises(ConfigError, match="fixed_seconds"):
        PrefillRate(1.0, 0.0, cost)


def test_loading_wins_from_where_latency_is_paid_off() -> None:
    # 1 ms of latency; a token gains 1 ms computed less 0.5 ms loaded: even at 2, better from 3.
    assert break_even_tokens(LinkRate(2000.0, 1e-3), PrefillRate(1000.0), 1) in (2, 3)
    # The same in numbers that are exact in binary.
    assert break_even_tokens(LinkRate(2.0, 1.0), PrefillRate(1.0), 1) == 3


def test_a_fast_link_wins_from_the_first_token() -> None:
    prefill = PrefillRate(40_000.0, fixed_seconds=5e-3)
    assert break_even_tokens(LinkRate(55e9, 1e-4), prefill, LLAMA_8B_BYTES_PER_TOKEN) == 1


def test_a_slow_link_never_wins_over_linear_compute() -> None:
    disk = LinkRate(2.8e9)
    assert break_even_tokens(disk, PrefillRate(40_000.0), LLAMA_8B_BYTES_PER_TOKEN) is None
    # Winning only the shortest prompts, thanks to the fixed part, is not winning from a length on.
    prefill = PrefillRate(40_000.0, fixed_seconds=1.0)
    assert break_even_tokens(disk, prefill, LLAMA_8B_BYTES_PER_TOKEN) is None


def test_a_slow_link_wins_long_prompts_once_attention_is_dear() -> None:
    disk, prefill = LinkRate(2.8e9, 1e-3), PrefillRate(40_000.0, 4e-10, fixed_seconds=4e-3)
    tokens = break_even_tokens(disk, prefill, LLAMA_8B_BYTES_PER_TOKEN)
    assert tokens is not None
    assert 50_000 < tokens < 60_000
    for num_tokens, wins in [(tokens - 1, False), (tokens, True), (4 * tokens, True)]:
        load = disk.seconds(num_tokens * LLAMA_8B_BYTES_PER_TOKEN)
        assert (load < prefill.seconds(num_tokens)) is wins
    assert break_even_tokens(disk, prefill, LLAMA_8B_BYTES_PER_TOKEN, tokens) == tokens
    assert break_even_tokens(disk, prefill, LLAMA_8B_BYTES_PER_TOKEN, tokens - 1) is None


def test_no_prompts_no_break_even() -> None:
    assert break_even_tokens(LinkRate(1e9), PrefillRate(1.0), 1, max_tokens=0) is None


@given(
    st.builds(LinkRate, st.floats(1, 1e3), st.floats(0, 50)),
    st.builds(PrefillRate, st.floats(1, 1e3), st.floats(0, 1), st.floats(0, 50)),
    st.floats(0.1, 100),
    st.integers(1, 120),
)
def test_break_even_agrees_with_looking_at_every_length(
    link: LinkRate, prefill: PrefillRate, bytes_per_token: float, max_tokens: int
) -> None:
    def gains(n: int) -> bool:
        load = Fraction(link.latency_seconds) + n * Fraction(bytes_per_token) / Fraction(
            link.bytes_per_second
        )
        compute = (
            Fraction(prefill.fixed_seconds)
            + n / Fraction(prefill.tokens_per_second)
            + n * n * Fraction(prefill.quadratic_seconds_per_token2)
        )
        return load < compute

    losing = [n for n in range(1, max_tokens + 1) if not gains(n)]
    last_loss = losing[-1] if losing else 0
    expected = None if last_loss == max_tokens else last_loss + 1
    assert break_even_tokens(link, prefill, bytes_per_token, max_tokens) == expected


@given(links, prefills, st.floats(1e-3, 1e9))
def test_break_even_copes_with_any_rates(
    link: LinkRate, prefill: PrefillRate, bytes_per_token: float
) -> None:
    tokens = break_even_tokens(link, prefill, bytes_per_token)
    assert tokens is None or 1 <= tokens <= 1 << 20


def test_a_meter_knows_nothing_at_first() -> None:
    assert RateMeter().rate is None
    assert RateMeter().num_observations == 0


def test_one_observation_is_all_rate() -> None:
    meter = RateMeter()
    meter.observe(1000, 0.5)
    assert meter.rate == LinkRate(2000.0, 0.0)


def test_a_meter_learns_rate_and_latency_from_mixed_sizes() -> None:
    link, meter, draw = LinkRate(50e9, 30e-6), RateMeter(), random.Random(1)
    for _ in range(200):
        num_bytes = draw.randrange(1, 9) << 21
        meter.observe(num_bytes, link.seconds(num_bytes) * draw.uniform(0.99, 1.01))
    assert meter.rate is not None
    assert meter.rate.bytes_per_second == pytest.approx(link.bytes_per_second, rel=0.05)
    assert meter.rate.latency_seconds == pytest.approx(link.latency_seconds, rel=0.3)


def test_noise_at_one_size_is_not_taken_for_latency() -> None:
    meter, draw = RateMeter(), random.Random(2)
    for _ in range(200):
        meter.observe(2 << 20, 40e-6 * draw.uniform(0.8, 1.2))
    assert meter.rate is not None
    assert meter.rate.latency_seconds == pytest.approx(0.0, abs=1e-9)
    assert meter.rate.seconds(2 << 20) == pytest.approx(40e-6, rel=0.1)


def test_a_meter_follows_a_link_that_slows_down() -> None:
    meter = RateMeter()
    for _ in range(50):
        meter.observe(1 << 20, 1e-3)
    for _ in range(100):
        meter.observe(1 << 20, 1.0)
    assert meter.rate is not None
    assert meter.rate.seconds(1 << 20) == pytest.approx(1.0, rel=0.01)


def test_one_stall_does_not_condemn_a_link() -> None:
    meter = RateMeter()
    for _ in range(50):
        meter.observe(1 << 20, 1e-3)
    meter.observe(1 << 20, 600.0)
    assert meter.rate is not None
    assert meter.rate.seconds(1 << 20) < 2e-3


@pytest.mark.parametrize(
    ("num_bytes", "seconds"),
    [(0, 1.0), (-5, 1.0), (10, 0.0), (10, -1.0), (10, math.nan), (10, math.inf), (1 << 80, 1.0)],
)
def test_impossible_observations_are_passed_over(num_bytes: int, seconds: float) -> None:
    meter = RateMeter()
    meter.observe(num_bytes, seconds)
    assert meter.rate is None
    meter.observe(1000, 0.5)
    meter.observe(num_bytes, seconds)
    assert meter.rate == LinkRate(2000.0)
    assert meter.num_observations == 1


@pytest.mark.parametrize("weight", [0.0, -0.1, 1.1, math.nan])
def test_a_weight_out_of_range_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight"):
        RateMeter(weight)


@given(
    st.lists(st.tuples(st.integers(-10, 1 << 64), st.floats(allow_nan=True)), max_size=40),
    st.floats(0.001, 1),
)
def test_a_meter_always_yields_a_usable_rate(
    observations: list[tuple[int, float]], weight: float
) -> None:
    meter = RateMeter(weight)
    for num_bytes, seconds in observations:
        meter.observe(num_bytes, seconds)
    rate = meter.rate  # LinkRate itself refuses what is not finite and positive
    assert (rate is None) == (meter.num_observations == 0)


# As many as are weighed alike, so that the mean is known here.
@given(st.lists(st.tuples(st.integers(1, 1 << 28), st.floats(1e-6, 1e3)), min_size=1, max_size=10))
@example([(1, 1e-6), (1 << 28, 1e-6)])  # the rate that would fit is beyond all belief
def test_the_mean_transfer_is_predicted_within_what_was_seen(
    observations: list[tuple[int, float]],
) -> None:
    meter = RateMeter(weight=0.1)
    for num_bytes, seconds in observations:
        meter.observe(num_bytes, seconds)
    assert meter.rate is not None
    mean_bytes = sum(num_bytes for num_bytes, _ in observations) / len(observations)
    predicted = meter.rate.seconds(mean_bytes)
    fastest = min(seconds for _, seconds in observations)
    slowest = max(seconds for _, seconds in observations)
    assert fastest * 0.999 <= predicted <= slowest * 1.001


def _match(*runs: tuple[Tier, int]) -> Match:
    return Match(100, tuple(Run(tier, count) for tier, count in runs))


def _choose(match: Match, prefill: PrefillRate | None, past: int = 0, **gbps: float) -> LoadChoice:
    rates = {Tier[name.upper()]: LinkRate(rate * 1e9, 0.001) for name, rate in gbps.items()}
    return choose_load(
        match,
        block_bytes=1_000_000,
        block_tokens=16,
        num_past_tokens=past,
        rates=rates,
        prefill=prefill,
    )


def test_all_is_loaded_until_rates_are_known() -> None:
    match = _match((Tier.HOST, 4), (Tier.DISK, 6))
    assert _choose(match, None, host=10).num_blocks == 10
    assert _choose(match, PrefillRate(1000)).num_blocks == 10
    assert _choose(_match(), PrefillRate(1000), host=1) == LoadChoice(0, 0.0, 0.0)


def test_what_is_cheaper_to_compute_is_computed() -> None:
    match = _match((Tier.HOST, 10))
    slow = _choose(match, PrefillRate(1000), host=0.01)  # 1 s to load, 0.16 s to compute
    assert slow.num_blocks == 0
    assert slow.load_seconds == pytest.approx(1.001)
    assert slow.compute_seconds == pytest.approx(0.16)
    assert _choose(match, PrefillRate(1000), host=10).num_blocks == 10


def test_what_every_step_takes_in_any_case_is_not_saved_by_loading() -> None:
    match = _match((Tier.HOST, 10))
    for fixed in (0.0, 0.3, 10.0):
        prefill = PrefillRate(1000, fixed_seconds=fixed)
        slow = _choose(match, prefill, host=0.05)  # 0.2 s to load, 0.16 s to compute
        assert slow.num_blocks == 0
        assert slow.compute_seconds == pytest.approx(0.16)
        fast = _choose(match, prefill, host=0.1)  # 0.1 s to load
        assert fast.num_blocks == 10
        assert fast.compute_seconds == pytest.approx(0.16)


def test_a_fast_head_is_loaded_and_a_slow_tail_computed() -> None:
    match = _match((Tier.HOST, 10), (Tier.DISK, 10))
    choice = _choose(match, PrefillRate(10_000), host=10, disk=0.1)
    assert choice.num_blocks == 10  # 2 ms against 16; the disk's would add 0.1 s against 16 ms
    assert _choose(match, PrefillRate(10_000), host=10, disk=5).num_blocks == 20


def test_the_quadratic_part_makes_long_prompts_worth_loading() -> None:
    prefill = PrefillRate(10_000, quadratic_seconds_per_token2=1e-6)
    match = _match((Tier.HOST, 10))
    assert _choose(match, prefill, past=0, host=0.2).num_blocks == 0
    assert _choose(match, prefill, past=4000, host=0.2).num_blocks == 10


def test_tiers_stream_side_by_side_and_all_cross_the_hosts_link() -> None:
    rates = {Tier.HOST: LinkRate(10.0), Tier.DISK: LinkRate(4.0)}
    assert load_seconds([(Tier.HOST, 2), (Tier.DISK, 2)], 10, rates) == 5.0
    assert load_seconds([(Tier.HOST, 10), (Tier.DISK, 2)], 10, rates) == 12.0
    assert load_seconds([(Tier.DISK, 2)], 10, {}) is None


@given(
    per_token=st.floats(1e-6, 1e-2),
    quadratic=st.sampled_from([0.0, 1e-9, 1e-7]),
    fixed=st.sampled_from([0.0, 0.001, 0.05]),
)
def test_prefill_is_learnt_with_its_quadratic_part(
    per_token: float, quadratic: float, fixed: float
) -> None:
    truth = PrefillRate(1 / per_token, quadratic, fixed)
    meter = PrefillMeter()
    assert meter.rate is None
    for _ in range(6):
        for past in range(0, 8192, 512):
            meter.observe([(512, past)], truth.seconds(512, past))
        for tokens in (3, 50, 200):
            meter.observe([(tokens, 0)], truth.seconds(tokens))
    assert meter.rate is not None
    for tokens, past in ((512, 0), (512, 4096), (512, 7680)):
        wanted = truth.seconds(tokens, past)
        assert meter.rate.seconds(tokens, past) == pytest.approx(wanted, rel=0.15, abs=1e-4)


def test_prefill_of_one_size_is_put_down_to_the_tokens() -> None:
    meter = PrefillMeter()
    for _ in range(20):
        meter.observe([(256, 0)], 0.256)
    assert meter.rate is not None
    assert meter.rate.seconds(256) == pytest.approx(0.256, rel=0.01)
    assert meter.rate.tokens_per_second == pytest.approx(1000, rel=0.5)


def test_one_stall_does_not_look_like_the_rule() -> None:
    meter = PrefillMeter()
    for _ in range(20):
        meter.observe([(256, 0)], 0.256)
    meter.observe([(256, 0)], 3600)
    meter.observe([], 1.0)
    meter.observe([(10, 0)], float("nan"))
    assert meter.rate is not None
    assert meter.rate.seconds(256) < 0.5


def test_steps_that_are_all_alike_are_not_put_down_to_a_fixed_part() -> None:
    meter = PrefillMeter()
    meter.observe([(40, 0)], 0.007)
    for number in range(200):  # a flood of equal ones, the older ones all but forgotten
        meter.observe([(8192, 0), (8192, 0)], 0.41 + 0.0001 * (number % 3))
    assert meter.rate is not None
    assert meter.rate.fixed_seconds <= 0.007
    assert meter.rate.seconds(8192) - meter.rate.fixed_seconds == pytest.approx(0.2, rel=0.05)


def test_one_small_load_that_stalled_says_nothing_of_large_ones() -> None:
    meter = RateMeter(of_whole_loads=True)
    meter.observe(2 << 20, 0.1)
    assert meter.rate is not None
    match = Match(100, (Run(Tier.HOST, 100),))
    choice = choose_load(
        match,
        block_bytes=2 << 20,
        block_tokens=16,
        num_past_tokens=0,
        rates={Tier.HOST: meter.rate},
        prefill=PrefillRate(40_000),
    )
    assert choice.num_blocks == 100  # tried, and so learnt


def test_the_last_of_many_loads_does_not_make_the_link_look_slow() -> None:
    """All begin together; each waits for those before it. Some end in one step."""
    meter, gigabyte = WaitMeter(), 10**9
    for number in range(1, 49):
        meter.observe(gigabyte, started=0.0, ended=0.02 * number)
    meter.observe(8 * gigabyte, started=0.0, ended=0.02 * (48 + 8))
    assert meter.rate is not None
    assert meter.rate.seconds(gigabyte) == pytest.approx(0.02, rel=0.01)
    meter.observe(gigabyte, started=100.0, ended=100.02)  # the link lay idle meanwhile
    assert meter.rate.seconds(gigabyte) == pytest.approx(0.02, rel=0.01)
