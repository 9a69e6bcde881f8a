from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tools import Rig, keys_of

from penstock.events import (
    CodecsChosen,
    Damaged,
    Decided,
    Finished,
    FirstToken,
    LookedUp,
    Lost,
    Moved,
    Preempted,
    Refused,
    Sequences,
    TierCodec,
    TierEmptied,
    TierRested,
    TierRevived,
    TierUsage,
)
from penstock.metrics import Metrics
from penstock.types import Direction, Tier, Verdict


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Parsed back from the text that is scraped."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.expose().decode())
        for sample in family.samples
    }


def test_a_real_workload_is_counted_by_tier_and_direction(
    rigs: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = rigs(tmp_path)
    keys = keys_of(8)
    rig.save(keys)
    rig.load_cold(keys)
    rig.offloader.note(rig.offloader.match([*keys, *keys_of(2, "new")]))
    found = samples(rig.metrics)

    def hop(name: str, source: str, target: str, direction: str) -> float:
        labels = (("direction", direction), ("source", source), ("target", target))
        return found[name, labels]

    size = 8 * rig.spec.block_bytes
    for source, target, direction in (
        ("device", "host", "save"),
        ("host", "disk", "save"),
        ("disk", "host", "load"),
        ("host", "device", "load"),
    ):
        assert hop("penstock_blocks_total", source, target, direction) == 8
        assert hop("penstock_bytes_total", source, target, direction) == size
        assert hop("penstock_transfer_seconds_total", source, target, direction) > 0
    assert found["penstock_hit_blocks_total", (("tier", "host"),)] == 8
    assert found["penstock_miss_blocks_total", ()] == 2
    assert found["penstock_used_blocks", (("tier", "disk"),)] == 8
    assert found["penstock_capacity_blocks", (("tier", "host"),)] == 64
    assert found["penstock_queued_transfers", (("direction", "load"), ("tier", "disk"))] == 0
    assert found["kv_offload_total", ()] == 8
    assert found["kv_offload_bytes", ()] == size
    assert found["kv_reload_total", ()] == 8
    assert found["kv_cache_hit_rate", ()] == 0.8
    assert found["cpu_cache_usage_perc", ()] == 8 / 64
    assert found["gpu_cache_usage_perc", ()] == 0


def test_losses_are_counted_by_what_became_of_them() -> None:
    metrics = Metrics()
    metrics(Lost(Tier.DISK, Tier.HOST, Direction.LOAD, Verdict.CORRUPT, 3))
    metrics(Lost(Tier.HOST, Tier.DISK, Direction.SAVE, Verdict.DROPPED, 2))
    metrics(Lost(Tier.HOST, Tier.DEVICE, Direction.LOAD, Verdict.EXPIRED, 1))
    found = samples(metrics)
    assert found["penstock_corrupt_blocks_total", (("tier", "disk"),)] == 3
    metrics(Damaged(Tier.DISK, 4, "records of the index are damaged"))
    metrics(TierEmptied(Tier.DISK, 100, "it was deleted"))
    later = samples(metrics)
    assert later["penstock_corrupt_blocks_total", (("tier", "disk"),)] == 7
    assert later["penstock_tier_losses_total", (("tier", "disk"),)] == 1
    assert found["penstock_dropped_blocks_total", (("tier", "disk"),)] == 2
    hop = (("direction", "load"), ("source", "host"), ("target", "device"))
    assert found["penstock_lost_blocks_total", (*hop, ("verdict", "expired"))] == 1


def test_a_resting_tier_shows() -> None:
    metrics = Metrics()
    metrics(TierRested(Tier.DISK, Direction.SAVE, 1.0, "I/O error"))
    assert samples(metrics)["penstock_tier_resting", (("direction", "save"), ("tier", "disk"))] == 1
    metrics(TierRevived(Tier.DISK, Direction.SAVE))
    found = samples(metrics)
    assert found["penstock_tier_resting", (("direction", "save"), ("tier", "disk"))] == 0
    assert found["penstock_tier_rests_total", (("direction", "save"), ("tier", "disk"))] == 1


def test_a_host_reports_its_own_pool_as_the_device_tier() -> None:
    metrics = Metrics()
    metrics(TierUsage(Tier.DEVICE, 3, 4, 0, 0, 0))
    assert samples(metrics)["gpu_cache_usage_perc", ()] == 0.75


def test_before_the_first_lookup_the_hit_rate_is_zero() -> None:
    metrics = Metrics()
    assert samples(metrics)["kv_cache_hit_rate", ()] == 0
    metrics(LookedUp(0, ()))
    assert samples(metrics)["kv_cache_hit_rate", ()] == 0


def test_requests_of_the_engine_are_counted() -> None:
    metrics = Metrics()
    for event in (
        Decided(8, 8, 0.5, 2.0),
        Decided(8, 5, 0.5, 2.0),
        Decided(8, 0, 0.5, 0.1),
        Decided(8, 8, None, None),
        Sequences(3, 1, 2),
        Preempted(100),
        Refused("busy"),
        FirstToken(0.3, 100, 16, 64, 1.0),
        FirstToken(0.3, 100, 0, 0, None),
        Finished("length", 100, 11, 7, 1, 1.3, 0.3),
        Finished("abort", 100, 0, 0, 0, 1.0, None),
    ):
        metrics(event)
    found = samples(metrics)
    assert found["penstock_load_decisions_total", (("choice", "load"),)] == 2
    assert found["penstock_load_decisions_total", (("choice", "part"),)] == 1
    assert found["penstock_load_decisions_total", (("choice", "compute"),)] == 1
    assert found["penstock_saved_seconds_total", ()] == 3.0
    assert found["penstock_sequences", (("phase", "waiting"),)] == 3
    assert found["penstock_preemptions_total", ()] == 1
    assert found["penstock_refused_requests_total", (("reason", "busy"),)] == 1
    assert found["penstock_prompt_tokens_total", (("source", "loaded"),)] == 64
    assert found["penstock_prompt_tokens_total", (("source", "computed"),)] == 120
    assert found["penstock_first_token_seconds_count", (("prompt", "loaded"),)] == 1
    assert found["penstock_output_tokens_total", ()] == 11
    assert found["penstock_recomputed_tokens_total", ()] == 7
    assert found["penstock_token_seconds_sum", ()] == 0.1
    assert found["penstock_requests_total", (("reason", "abort"),)] == 1


def test_codecs_and_what_the_tiers_hold_in_tokens() -> None:
    metrics = Metrics()
    codecs = (
        TierCodec(Tier.HOST, "lossless", 1_605_760),
        TierCodec(Tier.DISK, "int8", 1_056_768),
    )
    metrics(CodecsChosen(codecs, 2_097_152, 16))
    metrics(TierUsage(Tier.HOST, 3, 10, 0, 0, 0))
    metrics(Moved(Tier.DISK, Tier.HOST, Direction.LOAD, 4, 4_227_072, 0.1))
    metrics(Moved(Tier.HOST, Tier.DISK, Direction.SAVE, 7, 7_397_376, 0.1))
    metrics(Moved(Tier.HOST, Tier.DEVICE, Direction.LOAD, 5, 8_028_800, 0.1))
    metrics(Lost(Tier.DEVICE, Tier.HOST, Direction.SAVE, Verdict.UNFIT, 2))
    metrics(Finished("stop", 100, 11, 0, 0, 1.3, 0.3, num_lossy=64))
    metrics(Finished("stop", 100, 11, 0, 0, 1.3, 0.3))
    found = samples(metrics)
    assert found["penstock_tier_codec_info", (("codec", "lossless"), ("tier", "host"))] == 1
    assert found["penstock_tier_codec_info", (("codec", "int8"), ("tier", "disk"))] == 1
    assert found["penstock_block_bytes", (("tier", "device"),)] == 2_097_152
    assert found["penstock_block_bytes", (("tier", "host"),)] == 1_605_760
    assert found["penstock_used_tokens", (("tier", "host"),)] == 48
    assert found["penstock_capacity_tokens", (("tier", "host"),)] == 160
    assert found["penstock_lossy_blocks_total", (("tier", "disk"),)] == 4
    assert found["penstock_lossy_blocks_total", (("tier", "host"),)] == 0
    assert found["penstock_unfit_blocks_total", (("tier", "host"),)] == 2
    hop = (("direction", "save"), ("source", "device"), ("target", "host"))
    assert found["penstock_lost_blocks_total", (*hop, ("verdict", "unfit"))] == 2
    assert found["penstock_lossy_requests_total", ()] == 1
