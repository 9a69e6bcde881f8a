"""Events as servers tell them, through the real metrics, into advice."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.errors import ConfigError
from penstock.events import (
    Asked,
    Decided,
    Event,
    Finished,
    FirstToken,
    LookedUp,
    Lost,
    Migrated,
    Moved,
    Preempted,
    Recovered,
    Refused,
    Removed,
    Stepped,
    TierRested,
    TierRevived,
    TierUsage,
)
from penstock.metrics import Metrics
from penstock.types import BlockKey, Direction, Tier, Verdict
from penstock.units import GiB, MiB
from penstock.watch.advice import Advice, Urgency, block_bytes, hit_rate
from penstock.watch.adviser import advise
from penstock.watch.samples import Samples, read_samples


def told(*events: Event, times: int = 1) -> Samples:
    metrics = Metrics()
    for event in events * times:
        metrics(event)
    return read_samples(metrics.expose().decode())


def about(topic: str, seen: Samples) -> list[Advice]:
    return [advice for advice in advise(seen) if advice.topic == topic]


def moved(source: Tier, target: Tier, num_blocks: int, seconds: float = 1.0) -> Moved:
    direction = Direction.LOAD if target < source else Direction.SAVE
    return Moved(source, target, direction, num_blocks, num_blocks * 2 * MiB, seconds)


def keys(count: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(number.to_bytes(32, "big")) for number in range(count))


def lookups(num_found: int, tier: Tier = Tier.HOST) -> list[Event]:
    """A hundred, of ten blocks each."""
    return [LookedUp(10, ((tier, num_found),) if num_found else ())] * 100


def finished(num_output: int = 100) -> Finished:
    return Finished("stop", 100, num_output, 7, 0, 1.0, 0.1)


def test_a_server_that_has_done_nothing_is_not_judged() -> None:
    (advice,) = advise(told())
    assert advice.topic == "hits"
    assert "too few" in advice.finding


def test_what_is_well_is_said_too() -> None:
    seen = told(*lookups(8), *[Decided(8, 8, 0.01, 0.5)] * 40)
    assert [advice.urgency for advice in advise(seen)] == [Urgency.WELL, Urgency.WELL]
    assert hit_rate(seen) == pytest.approx(0.8)
    (loading,) = about("loading", seen)
    assert "19.60 s" in loading.finding


def test_a_host_tier_that_is_too_small_by_so_much() -> None:
    seen = told(
        *lookups(1),
        moved(Tier.DEVICE, Tier.HOST, 2048),
        Removed(Tier.HOST, keys(512), evicted=True),
        TierUsage(Tier.HOST, 1000, 1024, 0, 0, 0),
    )
    (advice,) = about("hits", seen)
    assert block_bytes(seen) == 2 * MiB
    assert "10% of blocks looked up were found; DRAM evicted 512" in advice.finding
    assert "by up to 1.0 GiB more than its 2.0 GiB" in advice.change
    assert dict(advice.numbers)["more_bytes"] == GiB


def test_no_more_is_useful_than_was_missed() -> None:
    seen = told(
        LookedUp(100, ()),
        *lookups(0)[:30],
        moved(Tier.DEVICE, Tier.HOST, 10),
        Removed(Tier.HOST, keys(5000), evicted=True),
        TierUsage(Tier.HOST, 10, 10, 0, 0, 0),
    )
    (advice,) = about("hits", seen)
    assert dict(advice.numbers)["more_bytes"] == 400 * 2 * MiB


def test_without_evictions_more_dram_gains_nothing() -> None:
    (advice,) = about("hits", told(*lookups(1)))
    assert "more DRAM does not help" in advice.change


def test_an_index_that_is_still_read_is_waited_for() -> None:
    (advice,) = about("hits", told(*lookups(1), Recovered(Tier.DISK, 25, 100, 20)))
    assert "disk has read 25% of its index" in advice.change


def test_hits_from_below_a_full_dram() -> None:
    full = TierUsage(Tier.HOST, 99, 100, 0, 0, 0)
    (advice,) = about("tiers", told(*lookups(8, Tier.DISK), *lookups(2), full))
    assert "80% of hits come from below DRAM, most from disk" in advice.finding
    assert not about("tiers", told(*lookups(8), full))


def test_loads_slower_than_computing() -> None:
    seen = told(
        *[Decided(8, 0, 0.5, 0.1)] * 30,
        *[Decided(8, 8, 0.1, 0.5)] * 10,
        moved(Tier.DISK, Tier.HOST, 512),
    )
    (advice,) = about("loading", seen)
    assert "75% of 40 matches were recomputed" in advice.finding
    assert "disk 1.1 GB/s" in advice.finding


@pytest.mark.parametrize(
    ("num_dropped", "urgency"), [(1, None), (50, Urgency.CONSIDER), (500, Urgency.ACT)]
)
def test_dropped_saves(num_dropped: int, urgency: Urgency | None) -> None:
    lost = Lost(Tier.HOST, Tier.DISK, Direction.SAVE, Verdict.DROPPED, num_dropped)
    found = about("saves", told(moved(Tier.HOST, Tier.DISK, 1000), lost))
    assert [advice.urgency for advice in found] == ([] if urgency is None else [urgency])
    assert all("disk.threads" in advice.change for advice in found)


def test_corrupt_blocks_come_first() -> None:
    lost = Lost(Tier.DISK, Tier.HOST, Direction.LOAD, Verdict.CORRUPT, 3)
    first = advise(told(*lookups(1), lost))[0]
    assert (first.urgency, first.topic) == (Urgency.ACT, "corruption")
    assert "3 blocks from disk" in first.finding
    assert "penstock store check" in first.change


def test_loads_that_do_not_arrive() -> None:
    late = Lost(Tier.REMOTE, Tier.HOST, Direction.LOAD, Verdict.EXPIRED, 100)
    (advice,) = about("loads", told(moved(Tier.HOST, Tier.DEVICE, 900), late))
    assert "100 blocks from remote did not arrive (expired), 10.0%" in advice.finding


def test_a_tier_that_is_left_alone() -> None:
    rested = TierRested(Tier.DISK, Direction.SAVE, 1.0, "no space")
    (now,) = about("health", told(rested))
    assert now.urgency is Urgency.ACT
    assert "disk fails to save" in now.finding
    (before,) = about("health", told(rested, TierRevived(Tier.DISK, Direction.SAVE)))
    assert before.urgency is Urgency.CONSIDER


@pytest.mark.parametrize(("link_seconds", "urgency"), [(0.9, Urgency.ACT), (0.1, Urgency.WELL)])
def test_cold_reads_per_token(link_seconds: float, urgency: Urgency) -> None:
    step = Stepped(4, 4, 1.0, 512, GiB, link_seconds)
    (advice,) = about("cold reads", told(step, finished(num_output=4)))
    assert advice.urgency is urgency
    assert "each token reads 256.0 MiB" in advice.finding


def test_kv_that_goes_back_and_forth() -> None:
    assert about("residency", told(Migrated(500, 500), finished()))
    assert not about("residency", told(Migrated(500, 0), finished()))


def test_requests_too_long_for_the_model_are_not_a_matter_of_memory() -> None:
    seen = told(*[finished()] * 10, *[Refused("too_long")] * 30)
    (advice,) = about("refusals", seen)
    assert advice.urgency is Urgency.ACT
    assert "30 requests were refused as longer than the model's context, 75%" in advice.finding
    everything = " ".join(each.change for each in advise(seen))
    assert "more memory does not help" in everything
    assert "--kv-offloading-size" not in everything
    assert "DRAM" not in everything


def test_requests_larger_than_gpu_and_dram_are() -> None:
    (advice,) = about("refusals", told(*[finished()] * 10, Refused("no_room")))
    assert "does not fit into GPU and DRAM together" in advice.finding
    assert "--kv-offloading-size" in advice.change


def test_a_disk_that_fails_saves_still_loads() -> None:
    failed = Lost(Tier.HOST, Tier.DISK, Direction.SAVE, Verdict.FAILED, 40, "No space left")
    rested = TierRested(Tier.DISK, Direction.SAVE, 1.0, "No space left")
    seen = told(moved(Tier.HOST, Tier.DISK, 60), failed, rested)
    (health,) = about("health", seen)
    assert "disk fails to save" in health.finding
    assert "full, read-only" in health.change
    assert "nothing new is saved there" in health.change
    assert "its blocks can still be loaded" in health.change
    assert "computed" not in health.change
    (saves,) = about("saves", seen)
    assert "40 saves to disk failed, 40%" in saves.finding
    both = told(moved(Tier.HOST, Tier.DISK, 60), failed, rested, rested_load(Tier.DISK))
    assert "still be loaded" not in about("health", both)[1].change


def rested_load(tier: Tier) -> TierRested:
    return TierRested(tier, Direction.LOAD, 60.0, "Connection refused")


def test_failed_saves_are_told_before_the_tier_rests() -> None:
    failed = Lost(Tier.HOST, Tier.DISK, Direction.SAVE, Verdict.FAILED, 5, "No space left")
    (advice,) = about("saves", told(moved(Tier.HOST, Tier.DISK, 95), failed))
    assert (advice.urgency, advice.topic) == (Urgency.CONSIDER, "saves")
    assert "5 saves to disk failed, 5%" in advice.finding


def stopped_store() -> Samples:
    """What a server said whose Redis was stopped: misses, evictions, and the cause."""
    return told(
        *lookups(1, Tier.REMOTE),
        *[Asked(Tier.REMOTE, 10, 9, 0.001)] * 25,
        *[Asked(Tier.REMOTE, 10, 0, 0.01, "Connection refused")] * 9,
        *[rested_load(Tier.REMOTE)] * 9,
        Lost(Tier.REMOTE, Tier.HOST, Direction.LOAD, Verdict.FAILED, 7),
        Lost(Tier.HOST, Tier.REMOTE, Direction.SAVE, Verdict.FAILED, 14),
        Lost(Tier.DEVICE, Tier.HOST, Direction.SAVE, Verdict.DROPPED, 30),
        *[Decided(8, 0, 0.5, 0.1)] * 30,
        moved(Tier.DEVICE, Tier.HOST, 100),
        Removed(Tier.HOST, keys(329), evicted=True),
        TierUsage(Tier.HOST, 14, 14, 0, 0, 0),
    )


def test_a_stopped_store_is_not_blamed_on_dram() -> None:
    found = advise(stopped_store())
    assert (found[0].urgency, found[0].topic) == (Urgency.ACT, "health")
    assert "remote fails to load" in found[0].finding
    assert "down or unreachable" in found[0].change
    for advice in found:
        assert "DRAM is too small" not in advice.change
        assert "host.size" not in advice.change
        assert "more DRAM" not in advice.change
        assert "move it closer" not in advice.change
    (hits,) = about("hits", stopped_store())
    assert "remote failed to load in this time" in hits.change


def test_a_store_that_answers_nothing_is_said_before_it_rests() -> None:
    silent = [Asked(Tier.REMOTE, 10, 0, 0.25, "timeout")] * 4
    seen = told(*lookups(0), *silent, Removed(Tier.HOST, keys(50), evicted=True))
    (advice,) = about("remote", seen)
    assert advice.urgency is Urgency.ACT
    assert "did not answer 4 of 4 lookups" in advice.finding
    assert "DRAM" not in " ".join(each.change for each in advise(seen))


def test_what_waits_for_a_disk_that_fails_is_not_blamed_on_dram() -> None:
    dropped = Lost(Tier.DEVICE, Tier.HOST, Direction.SAVE, Verdict.DROPPED, 500)
    rested = TierRested(Tier.DISK, Direction.SAVE, 1.0, "No space left")
    seen = told(moved(Tier.DEVICE, Tier.HOST, 1000), dropped, rested)
    (advice,) = about("saves", seen)
    assert "disk failed to save in this time" in advice.change
    assert "host.size" not in advice.change
    (alone,) = about("saves", told(moved(Tier.DEVICE, Tier.HOST, 1000), dropped))
    assert "host.size" in alone.change


def test_prompts_that_the_device_has_are_not_said_to_share_too_little() -> None:
    on_device = [FirstToken(0.04, 1600, 1500, 0, None)] * 30
    (advice,) = about("hits", told(*lookups(0), *on_device))
    assert advice.urgency is Urgency.WELL
    assert "94% of prompt tokens were reused; below the device 0% of blocks" in advice.finding
    (whole,) = about("hits", told(*on_device))  # nothing was looked up at all
    assert whole.urgency is Urgency.WELL
    assert "on the device" in whole.finding


def test_loads_without_an_estimate_claim_no_time() -> None:
    (advice,) = about("loading", told(*[Decided(8, 8, None, None)] * 40))
    assert advice.finding == "40 of 40 matches were loaded"


def test_refusals_and_preemptions() -> None:
    seen = told(*[finished()] * 79, *[Refused("busy")] * 20, Refused("too_long"))
    busy, long = about("refusals", seen)  # the more urgent first
    assert "20 requests were refused because too many were waiting, 20%" in busy.finding
    assert (busy.urgency, long.urgency) == (Urgency.ACT, Urgency.CONSIDER)
    (preempted,) = about("preemption", told(*[finished()] * 10, *[Preempted(5)] * 4))
    assert "70 tokens were computed again" in preempted.finding


def test_dram_that_running_sessions_hold() -> None:
    (advice,) = about("room", told(TierUsage(Tier.HOST, 100, 100, 90, 0, 0)))
    assert "90% of DRAM" in advice.finding


def test_a_shared_store_that_answers_late() -> None:
    slow = [Asked(Tier.REMOTE, 10, 0, 0.2)] * 90
    failed = [Asked(Tier.REMOTE, 10, 0, 0.25, "timeout")] * 10
    (advice,) = about("remote", told(*slow, *failed))
    assert "200.0 ms, and 10.0% not at all" in advice.finding
    assert not about("remote", told(*[Asked(Tier.REMOTE, 10, 9, 0.002)] * 100))


def test_vllms_labels_are_summed_over() -> None:
    text = "".join(
        f'penstock_hit_blocks_total{{model_name="m",engine="{engine}",tier="host"}} 30\n'
        f'penstock_lookup_blocks_total{{engine="{engine}",model_name="m"}} 40\n'
        f'vllm:num_requests_running{{engine="{engine}"}} 1\n'
        for engine in (0, 1)
    )
    seen = read_samples(text)
    assert seen.total("penstock_hit_blocks_total", tier="host") == 60
    assert hit_rate(seen) == pytest.approx(0.75)
    assert {name for name, _ in seen.values} == {
        "penstock_hit_blocks_total",
        "penstock_lookup_blocks_total",
    }


def test_an_interval_counts_what_is_new_and_shows_gauges_as_they_are() -> None:
    before = told(*lookups(0), TierUsage(Tier.HOST, 5, 10, 0, 0, 0))
    after = told(*lookups(0), *lookups(9), TierUsage(Tier.HOST, 9, 10, 0, 0, 0))
    seen = after.since(before)
    assert hit_rate(seen) == pytest.approx(0.9)
    assert seen.total("penstock_used_blocks", tier="host") == 9
    restarted = before.since(after)
    assert restarted.total("penstock_lookups_total") == 100  # fewer than before: it began anew


def every_event() -> Iterable[Event]:
    yield from (*lookups(3), moved(Tier.HOST, Tier.DEVICE, 7), Refused("busy"))
    yield from (Stepped(1, 1, 0.5, 2, 3, 0.1), Asked(Tier.REMOTE, 1, 1, 0.1), finished())


def test_the_text_is_read_as_prometheus_reads_it() -> None:
    metrics = Metrics()
    for event in every_event():
        metrics(event)
    text = metrics.expose().decode()
    expected = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("penstock_")
    }
    assert read_samples(text).values == expected


def test_labels_with_odd_characters() -> None:
    text = r'penstock_requests_total{reason="a \"b\", c\\d\ne}",x="1"} 3 1700000000' + "\n"
    seen = read_samples(text)
    assert seen.by("penstock_requests_total", "reason") == {'a "b", c\\d\ne}': 3.0}
    assert seen.by("penstock_requests_total", "nobody") == {}


@pytest.mark.parametrize("text", ["", "\n\n", "# HELP x y\n"])
def test_nothing_is_no_metrics(text: str) -> None:
    with pytest.raises(ConfigError, match="no metric"):
        read_samples(text)


@pytest.mark.parametrize(
    "text", ["<html>", '{"error": 1}', "penstock_x", "penstock_x y", "a b c d"]
)
def test_other_text_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ConfigError, match="line 2 is"):
        read_samples(f"ok 1\n{text}\n")


def test_numbers_that_are_none_are_passed_over() -> None:
    assert not read_samples("penstock_x NaN\npenstock_y +Inf\n")


def test_blocks_that_do_not_fit_their_codec() -> None:
    text = """
penstock_lookups_total 1000
penstock_unfit_blocks_total{tier="host"} 50
penstock_blocks_total{source="device",target="host",direction="save"} 950
"""
    (advice,) = [advice for advice in advise(read_samples(text)) if advice.topic == "codec"]
    assert "50 blocks did not fit the codec of host, 5.0% of all saves" in advice.finding
    assert "set host.codec to raw" in advice.change
    few = text.replace("950", "950000")
    assert not [advice for advice in advise(read_samples(few)) if advice.topic == "codec"]
