"""A server at a glance: every number that the page, the terminal and scripts show."""

from __future__ import annotations

import json

import pytest
from watch.prepared import BLOCK_BYTES, samples, trouble, usage, vllm_text, work

from penstock.events import (
    Event,
    Finished,
    FirstToken,
    LookedUp,
    Recovered,
    Stepped,
    TierRevived,
    TierUsage,
)
from penstock.types import Direction, Tier
from penstock.watch.history import History
from penstock.watch.samples import Samples, read_samples
from penstock.watch.view import View, make_view
from penstock.watch.vllm_names import to_our_names


def seen(*looks: Samples, spacing: float = 5.0) -> View:
    history = History()
    for number, look in enumerate(looks):
        history.add(number * spacing, look)
    return make_view(history)


@pytest.fixture
def busy() -> View:
    """Since the first look five times as much has happened as before it, in five seconds."""
    return seen(samples(usage(), work()), samples(usage(), work(6)))


def test_nothing_known() -> None:
    view = make_view(History())
    assert view.tiers == view.flows == view.advice == ()
    assert view.hit_rate is None
    assert view.hit_rate_since_start is None
    assert view.tokens_per_second is None
    assert view.cold_reads_per_token is None
    assert view.first_token_seconds == {}
    assert view.step_seconds.p50 is None
    assert view.tokens_saved == view.seconds_saved == 0


def test_codecs_and_tokens() -> None:
    text = """
penstock_capacity_blocks{tier="host"} 100
penstock_used_blocks{tier="host"} 40
penstock_capacity_tokens{tier="host"} 1600
penstock_used_tokens{tier="host"} 640
penstock_tier_codec_info{tier="host",codec="int8"} 1
penstock_block_bytes{tier="host"} 1000
penstock_block_bytes{tier="device"} 2000
penstock_unfit_blocks_total{tier="host"} 3
penstock_lossy_blocks_total{tier="host"} 8
penstock_lossy_requests_total 2
"""
    view = seen(read_samples(text))
    (host,) = view.tiers
    assert (host.codec, host.used_tokens, host.capacity_tokens) == ("int8", 640, 1600)
    assert (host.used_bytes, host.capacity_bytes) == (40_000, 100_000)
    assert (host.unfit_blocks, host.lossy_blocks, view.lossy_requests) == (3, 8, 2)
    # Two engines of one vLLM: sizes are added up, a block's size is not.
    one, other = (text.replace('tier="', f'engine="{n}",tier="') for n in (0, 1))
    (host,) = seen(read_samples(one + other)).tiers
    assert (host.capacity_tokens, host.capacity_bytes) == (3200, 200_000)


def test_it_is_plain_data(busy: View) -> None:
    data = json.loads(json.dumps(busy.as_data(), allow_nan=False))
    assert data["tiers"][1]["name"] == "host"
    assert data["recent_seconds"] == 5
    assert data["is_since_start"] is False


def test_tiers_from_the_top_down(busy: View) -> None:
    device, host, disk = busy.tiers
    assert (device.name, host.name, disk.name) == ("device", "host", "disk")
    assert (host.used_blocks, host.capacity_blocks) == (32768, 32768)
    assert host.used_bytes == host.capacity_bytes == 32768 * BLOCK_BYTES
    assert device.capacity_bytes == 1000 * BLOCK_BYTES
    assert host.leased_blocks == 100
    assert host.hit_share == pytest.approx(0.4)
    assert disk.hit_share == pytest.approx(0.1)
    assert (host.queued_loads, host.queued_saves) == (3, 0)
    assert (disk.queued_loads, disk.queued_saves) == (0, 12)
    assert host.resting == ()
    assert host.recovered_share is None


def test_sizes_are_unknown_until_a_block_has_moved() -> None:
    (host,) = seen(samples([TierUsage(Tier.HOST, 1, 10, 0, 0, 0)])).tiers
    assert (host.used_blocks, host.used_bytes, host.capacity_bytes) == (1, None, None)


def test_a_tier_that_rests_and_comes_back() -> None:
    _, _, disk = seen(samples(usage(), trouble())).tiers
    assert disk.resting == ("save",)
    revived = [TierRevived(Tier.DISK, Direction.SAVE)]
    assert seen(samples(usage(), trouble(), revived)).tiers[2].resting == ()


def test_an_index_that_is_being_read() -> None:
    _, _, disk = seen(samples(usage(), [Recovered(Tier.DISK, 25, 100, 20)])).tiers
    assert disk.recovered_share == 0.25


def test_flows_now_and_in_all(busy: View) -> None:
    flows = {(flow.source, flow.target, flow.direction): flow for flow in busy.flows}
    assert set(flows) == {
        ("device", "host", "save"),
        ("host", "device", "load"),
        ("host", "disk", "save"),
        ("disk", "host", "load"),
    }
    save = flows["device", "host", "save"]
    assert save.bytes_per_second == pytest.approx(500 * BLOCK_BYTES / 5)
    assert save.total_bytes == 600 * BLOCK_BYTES


def test_what_is_found_and_saved(busy: View) -> None:
    assert busy.hit_rate == busy.hit_rate_since_start == pytest.approx(0.5)
    assert busy.prompt_tokens == {"computed": 120_000, "device": 0, "loaded": 40_000}
    assert busy.tokens_saved == 48_000  # since the start
    assert busy.seconds_saved == pytest.approx(120 * 1.5)
    assert busy.decisions == {"load": 100}


def test_what_is_reused_is_told_of_the_same_tokens_and_time(busy: View) -> None:
    assert busy.reused_share == pytest.approx(40_000 / 160_000)
    assert busy.reused_share_since_start == pytest.approx(48_000 / 192_000)
    assert sum(busy.prompt_tokens_since_start.values()) == 192_000
    since_start = dict(busy.prompt_tokens_since_start)
    since_start.pop("computed")
    assert sum(since_start.values()) == busy.tokens_saved


def test_prompts_found_on_the_device_are_reused_without_a_hit_below_it() -> None:
    """Nothing is loaded, so nothing is saved by loading; the tokens are saved all the same."""
    on_device = [FirstToken(0.04, 1600, 1500, 0, None)] * 30
    view = seen(samples(), samples([LookedUp(10, ())] * 30, on_device))
    assert view.hit_rate == 0
    assert view.reused_share == pytest.approx(1500 / 1600)
    assert view.tokens_saved == view.prompt_tokens_since_start["device"] == 30 * 1500
    assert view.prompt_tokens_since_start["loaded"] == view.seconds_saved == 0
    assert not view.advice  # above all not that prompts share too little


def test_cold_reads_are_told_while_requests_run() -> None:
    """Tokens of answers are counted when a request ends, what steps read at every step."""
    steps: list[Event] = [Stepped(10, 10, 0.015, 40, 40 * BLOCK_BYTES, 0.001)] * 50
    running = seen(samples(), samples(steps))
    assert running.cold_reads_per_token == pytest.approx(4)
    ended = seen(samples(steps), samples(steps * 2, [Finished("stop", 10, 5000, 0, 0, 2.0, 0.5)]))
    assert ended.cold_reads_per_token == pytest.approx(4)


def test_the_hit_rate_is_of_late() -> None:
    misses = [LookedUp(10, ())] * 20
    view = seen(samples(work()), samples(work(), misses))
    assert view.hit_rate == 0
    assert view.hit_rate_since_start == pytest.approx(0.25)


def test_first_tokens_by_where_kv_came_from(busy: View) -> None:
    assert set(busy.first_token_seconds) == {"computed", "loaded"}
    loaded, computed = (busy.first_token_seconds[kind] for kind in ("loaded", "computed"))
    assert (loaded.count, computed.count) == (50, 50)
    assert loaded.p50 == pytest.approx(0.035)
    assert loaded.p99 == pytest.approx(0.0497)
    assert computed.p50 == pytest.approx(1.5)


def test_speed(busy: View) -> None:
    assert busy.tokens_per_second == pytest.approx(250 * 20 / 5)
    assert busy.step_seconds.count == 250
    assert busy.step_seconds.p50 == pytest.approx(0.015)
    assert busy.token_seconds.count == 100
    assert busy.cold_reads_per_token == pytest.approx(40 / 12)  # a step of 12 reads 40


def test_sequences(busy: View) -> None:
    assert busy.sequences == {"loading": 2, "running": 12, "waiting": 5}
    assert busy.resident_share == {"all": 0.78, "lowest": 0.4}
    assert (busy.retained_blocks, busy.retainable_blocks) == (120, 400)
    assert busy.requests == {"stop": 120}


def test_trouble_is_counted_since_the_start_and_advised_of_late() -> None:
    calm, after = samples(usage(), work()), samples(usage(), work(), trouble())
    view = seen(calm, after)
    assert view.corrupt_blocks == {"disk": 3}
    assert view.dropped_blocks == {"host": 11}
    assert view.lost_blocks == {"corrupt": 3, "dropped": 11, "expired": 7}
    assert view.lost_loads == {"corrupt": 3, "expired": 7}
    assert view.lost_saves == {"dropped": 11}
    assert view.refused == {"busy": 1}
    assert (view.preemptions, view.recent_preemptions) == (1, 1)
    topics = {advice.topic: advice.urgency for advice in view.advice}
    assert topics["corruption"] == topics["health"] == "act"
    later = seen(after, after)
    assert later.corrupt_blocks == {"disk": 3}
    assert later.recent_preemptions == 0
    assert [advice.topic for advice in later.advice] == ["health"]  # it still rests


def test_where_all_is_well_nothing_is_advised(busy: View) -> None:
    assert busy.advice == ()


def test_too_little_to_judge_by_does_not_hurt() -> None:
    assert seen(samples(usage()), samples(usage())).advice == ()


def test_who_looks_once_sees_all_since_the_start() -> None:
    history = History()
    for at in (0.0, 1.0):
        history.add(at, samples(usage(), work(), trouble()))
    view, once = make_view(history), make_view(history, since_start=True)
    assert view.first_token_seconds["loaded"].p50 is None
    assert once.is_since_start
    assert once.first_token_seconds["loaded"].count == 10
    assert once.hit_rate == pytest.approx(0.5)
    assert once.recent_preemptions == 1
    assert once.tokens_per_second == 0  # a rate is of the last seconds all the same
    assert "corruption" in {advice.topic for advice in once.advice}


def test_vllm_in_the_same_shape() -> None:
    looks = [
        to_our_names(read_samples(vllm_text(times), ("penstock_", "vllm:"))) for times in (1, 6)
    ]
    view = seen(*looks)
    device, host = view.tiers
    assert (device.used_blocks, device.capacity_blocks) == (pytest.approx(100), 400)
    assert device.used_bytes is None  # its blocks are not ours
    assert host.used_bytes == 100 * BLOCK_BYTES
    assert view.hit_rate == pytest.approx(0.6)
    assert view.tokens_saved == 6 * 700
    assert view.tokens_per_second == pytest.approx(5 * 380 / 5)
    assert view.sequences == {"running": 3, "waiting": 4}
    assert view.first_token_seconds["all"].count == 50
    assert view.cold_reads_per_token is None  # vLLM has none, which is not 0
    assert view.resident_share == {}
    (flow,) = view.flows
    assert (flow.source, flow.target) == ("host", "device")


def test_a_restart_does_not_mix_two_servers() -> None:
    first, second = samples(usage(), work(10)), samples(usage(), work(1))
    view = seen(first, second, samples(usage(), work(3)))
    assert view.recent_seconds == 5
    assert view.first_token_seconds["loaded"].count == 20
    assert view.tokens_per_second == pytest.approx(100 * 20 / 5)
