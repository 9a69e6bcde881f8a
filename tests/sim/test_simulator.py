"""The timed simulator: deterministic, conserving blocks, with links that are shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.clock import ManualClock
from penstock.costs.rates import LinkRate, PrefillRate
from penstock.errors import ConfigError
from penstock.events import Event, LookedUp
from penstock.sim.compute import ComputeRates, DecodeRate
from penstock.sim.instance import InstanceConfig, build_books
from penstock.sim.links import LinkSpec, SimulatedLinks
from penstock.sim.plot import Chart, PlotLine, Section, nice_ticks, page
from penstock.sim.simulator import simulate
from penstock.sim.sweep import Point, sweep
from penstock.sim.tally import Simulated
from penstock.sim.trace import Trace, TraceRequest
from penstock.sim.workloads import generate
from penstock.types import BlockKey, Direction, Slot, Tier, Transfer, TransferId

RATES = ComputeRates(PrefillRate(10_000.0), DecodeRate(0.01, 0.0001, 1e-7))
MB = 1_000_000
LINK = LinkSpec(LinkRate(1000 * MB), LinkRate(1000 * MB))
CONFIG = InstanceConfig(64, MB, RATES, 128, 256, 2048, "lru", LINK, LINK, 512, 16, 1000)


def key(*name: object) -> BlockKey:
    return BlockKey(str(name).encode().ljust(32, b".")[:32])


def ask(arrival: float, name: object, num_blocks: int, num_output: int = 10) -> TraceRequest:
    blocks = tuple(key(name, index) for index in range(num_blocks))
    return TraceRequest(arrival, 64 * num_blocks + 5, num_output, blocks)


def trace(*requests: TraceRequest) -> Trace:
    return Trace("made", 64, requests)


@pytest.fixture(scope="module")
def chat() -> Trace:
    return generate("chat", num_requests=150, seed=3)


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_every_block_is_found_loaded_or_computed_once(chat: Trace, policy: str) -> None:
    found = simulate(chat, replace(CONFIG, policy=policy))
    assert found.num_served + found.num_refused == len(chat.requests)
    for told, request in zip(found.requests, chat.requests, strict=True):
        if told.refusal:
            continue
        parts = (told.num_device_blocks, told.num_loaded_blocks, told.num_computed_blocks)
        assert min(parts) >= 0
        assert sum(parts) == request.num_input_tokens // 64
        assert told.first_token_seconds is not None
        assert told.seconds is not None
        assert 0 < told.first_token_seconds <= told.seconds
    assert found.hits[Tier.DEVICE]
    assert found.hits[Tier.HOST]
    assert found.carried[Tier.HOST, Direction.LOAD].num_blocks >= found.hits[Tier.HOST]


def test_the_same_again_is_the_same(chat: Trace) -> None:
    assert simulate(chat, CONFIG) == simulate(chat, CONFIG)


def test_more_memory_and_no_tiers(chat: Trace) -> None:
    none = simulate(chat, replace(CONFIG, num_host_blocks=0, num_disk_blocks=0))
    some = simulate(chat, CONFIG)
    plenty = simulate(chat, replace(CONFIG, num_host_blocks=50_000, num_disk_blocks=0))
    assert none.hit_rate < some.hit_rate < plenty.hit_rate
    assert not none.carried
    median = [found.first_token_percentile(0.5) for found in (none, some, plenty)]
    assert median[0] is not None
    assert median[2] is not None
    assert median[0] > median[2]


def test_times_follow_from_the_rates() -> None:
    request = ask(5.0, "a", 4, num_output=3)  # 261 tokens
    (told,) = simulate(trace(request), CONFIG).requests
    assert told.first_token_seconds == pytest.approx(261 / 10_000)
    context = 262 + 263  # read by the two steps that follow
    assert told.seconds == pytest.approx(261 / 10_000 + 2 * 0.0101 + context * 1e-7)


def test_a_prompt_that_returns_is_loaded_at_the_links_speed() -> None:
    others = [ask(10.0 + number, number, 100) for number in range(2)]
    found = simulate(trace(ask(0, "a", 20), *others, ask(100, "a", 20)), CONFIG)
    told = found.requests[-1]
    assert (told.num_device_blocks, told.num_loaded_blocks) == (0, 20)
    step = 5 / 10_000  # the tokens behind the last full block
    assert told.first_token_seconds == pytest.approx(20 * MB / (1000 * MB) + step, rel=0.02)


def test_two_loads_at_once_share_a_link() -> None:
    clock = ManualClock()
    links = SimulatedLinks({Tier.HOST: LINK}, clock, MB)

    def load(number: int, num_blocks: int) -> Transfer:
        slots = tuple(map(Slot, range(num_blocks)))
        keys = tuple(key(number, index) for index in range(num_blocks))
        return Transfer(TransferId(number), Tier.HOST, Tier.DEVICE, keys, slots, slots)

    def ends() -> dict[int, float]:
        found = {}
        while links.is_busy:
            clock.advance(max(0.0, links.next_end - clock.now()))
            links.advance()
            for outcome in links.poll():
                assert outcome.ended is not None
                found[int(outcome.transfer_id)] = outcome.ended
        return found

    assert links.submit(load(1, 100))
    assert ends() == {1: pytest.approx(0.1)}
    start = clock.now()
    links.submit(load(2, 100))
    links.submit(load(3, 50))
    links.submit(load(4, 10))  # a third waits for one of the two streams
    assert {n: end - start for n, end in ends().items()} == {
        3: pytest.approx(0.1),
        4: pytest.approx(0.12),
        2: pytest.approx(0.16),
    }
    assert links.carried()[Tier.HOST, Direction.LOAD].num_bytes == 260 * MB


@pytest.mark.parametrize(("is_duplex", "expected"), [(True, 0.1), (False, 0.2)])
def test_saves_slow_loads_only_where_they_meet(is_duplex: bool, expected: float) -> None:
    clock = ManualClock()
    links = SimulatedLinks({Tier.DISK: replace(LINK, is_duplex=is_duplex)}, clock, MB)
    slots, keys = tuple(map(Slot, range(100))), tuple(key(index) for index in range(100))
    links.submit(Transfer(TransferId(1), Tier.DISK, Tier.HOST, keys, slots, slots))
    links.submit(Transfer(TransferId(2), Tier.HOST, Tier.DISK, keys, slots, slots))
    clock.advance(1.0)
    links.advance()
    assert [outcome.ended for outcome in links.poll()] == [pytest.approx(expected)] * 2


def test_concurrent_loads_take_longer_than_one() -> None:
    fill = [ask(10.0 + number, number, 100) for number in range(2)]
    slow = LinkSpec(LinkRate(100 * MB), LinkRate(1000 * MB))
    config = replace(CONFIG, host_link=slow, rates=replace(RATES, prefill=PrefillRate(100.0)))
    first = [ask(0, "a", 20), ask(1, "b", 20), *fill]
    alone = simulate(trace(*first, ask(1000, "a", 20)), config).requests[-1]
    both = simulate(trace(*first, ask(1000, "a", 20), ask(1000, "b", 20)), config).requests[-2:]
    assert [told.num_loaded_blocks for told in both] == [20, 20]
    assert alone.first_token_seconds is not None
    assert all((told.first_token_seconds or 0) > 1.5 * alone.first_token_seconds for told in both)


def test_what_can_never_fit_and_what_is_too_much_is_rejected() -> None:
    small = replace(CONFIG, num_device_blocks=32, max_waiting=2, max_num_seqs=1)
    crowd = [ask(1.0, number, 10, num_output=400) for number in range(6)]
    found = simulate(trace(ask(0, "large", 40), *crowd), small)
    assert found.requests[0].refusal == "too_long"
    assert found.refusals == {"too_long": 1, "busy": 4}
    assert found.num_served == 2


def test_a_full_pool_preempts_and_everyone_is_served() -> None:
    config = replace(CONFIG, num_device_blocks=24, num_host_blocks=64, num_disk_blocks=0)
    requests = [ask(0.001 * number, number, 8, num_output=300) for number in range(6)]
    found = simulate(trace(*requests), config)
    assert found.num_served == 6
    assert found.num_preemptions > 0


def test_computing_is_chosen_where_a_link_is_slower() -> None:
    fill = [ask(10.0 + number, number, 100) for number in range(3)]
    crawl = LinkSpec(LinkRate(MB), LinkRate(1000 * MB))
    again = [ask(1000.0 + 100 * number, "a", 20) for number in range(2)]
    gaps = [ask(1050.0, number, 100) for number in range(3)]
    requests = sorted([*again, *gaps], key=lambda request: request.arrival_seconds)
    found = simulate(trace(ask(0, "a", 20), *fill, *requests), replace(CONFIG, host_link=crawl))
    # The first load shows what the link is worth, and is given up; the second is not tried.
    assert found.requests[-1].num_loaded_blocks == 0
    assert (found.requests[-1].first_token_seconds or 9) < 1


def test_observers_see_the_tiers_events(chat: Trace) -> None:
    seen: list[Event] = []
    simulate(chat, CONFIG, observers=[seen.append])
    assert any(isinstance(event, LookedUp) for event in seen)


def test_bad_instances_are_refused() -> None:
    with pytest.raises(ConfigError, match="disk tier and no host tier"):
        replace(CONFIG, num_host_blocks=0)
    with pytest.raises(ConfigError, match="num_device_blocks is 0"):
        replace(CONFIG, num_device_blocks=0)
    with pytest.raises(ConfigError, match="no policy"):
        build_books(replace(CONFIG, policy="random"), ManualClock())
    with pytest.raises(ConfigError, match="blocks of 64 tokens"):
        simulate(trace(ask(0, "a", 1)), replace(CONFIG, block_tokens=16))
    with pytest.raises(ConfigError, match="speed is 0"):
        simulate(trace(ask(0, "a", 1)), CONFIG, speed=0)
    with pytest.raises(ConfigError, match="takes no time"):
        DecodeRate(0.0)


def test_decode_steps_in_bulk_add_up() -> None:
    rate = DecodeRate(0.01, 0.001, 1e-5)
    one_by_one = sum(rate.seconds(1, 4, 1000 + 4 * step) for step in range(50))
    assert rate.seconds(50, 4, 1000) == pytest.approx(one_by_one)
    for num_steps in (1, 2, 7, 50):
        seconds = rate.seconds(num_steps, 4, 1000)
        assert rate.num_steps(seconds - 1e-6, 4, 1000) == num_steps
        assert rate.num_steps(seconds + 1e-6, 4, 1000) == num_steps + 1


def test_a_sweep_side_by_side_finds_the_same(chat: Trace) -> None:
    points = [
        Point(0, "lru", 128, blocks, 0, replace(CONFIG, num_host_blocks=blocks, num_disk_blocks=0))
        for blocks in (100, 400)
    ]
    points.append(Point(0, "s3fifo", None, 300))
    alone = sweep([chat], points)
    assert sweep([chat], points, num_processes=2) == alone
    assert alone.found[0].hit_rate < alone.found[1].hit_rate
    for found, limit in zip(alone.found, alone.limits, strict=True):
        assert found.hit_rate <= limit.optimum <= limit.unbounded


def test_where_requests_are_rejected_the_optimum_is_of_those_served() -> None:
    """Those too long for the device have nothing in common: counted in, they lowered the bound."""
    short = [ask(2 * number, "a", 2) for number in range(4)]
    long = [ask(2 * number + 1, f"long {number}", 1000) for number in range(4)]
    mixed = trace(*sorted([*short, *long], key=lambda request: request.arrival_seconds))
    config = replace(CONFIG, num_device_blocks=8, num_host_blocks=8, num_disk_blocks=0)
    swept = sweep([mixed], [Point(0, "lru", 8, 8, 0, config)])
    (found,), (limit,) = swept.found, swept.limits
    assert isinstance(found, Simulated)
    assert found.refusals == {"too_long": 4}
    assert 0.5 < found.hit_rate <= limit.optimum <= limit.unbounded


def test_pages_are_complete_and_escaped() -> None:
    line = PlotLine("<lru>", ((0.0, 0.1), (4.0, 0.5), (8.0, 0.6)))
    limit = PlotLine("MIN", ((8.0, 0.7),), "limit")
    chart = Chart("Hits", "host", "share", (line, limit), str, str)
    html = page("a & b", "note", [Section("s", "n", (chart,), ("policy",), (("<lru>",),))])
    assert html.startswith("<!doctype html>")
    assert "&lt;lru&gt;" in html
    assert "<lru>" not in html
    assert html.count("<circle") == 3 + 1  # and one in the key
    assert "http" not in html.replace("http-equiv", "")
    assert "nan" not in html
    assert "inf" not in html.replace("info", "")


def test_ticks_are_round_and_reach_the_top() -> None:
    assert nice_ticks(0.37) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert nice_ticks(0) == [0.0, 1.0]
    for highest in (1e-6, 0.8, 1.0, 99.0, 12_345.0):
        ticks = nice_ticks(highest)
        assert ticks[-1] >= highest * (1 - 1e-9)
        assert 3 <= len(ticks) <= 7
