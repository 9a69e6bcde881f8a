"""What servers say at /metrics: one of ours at work, and a vLLM that Penstock is part of."""

from __future__ import annotations

from penstock.events import (
    Decided,
    Event,
    Finished,
    FirstToken,
    LookedUp,
    Lost,
    Moved,
    Preempted,
    Refused,
    ResidentShare,
    Retained,
    Sequences,
    Stepped,
    TierRested,
    TierUsage,
)
from penstock.metrics import Metrics
from penstock.types import Direction, Tier, Verdict
from penstock.watch.samples import Samples, read_samples

BLOCK_BYTES = 2 << 20
LOAD, SAVE = Direction.LOAD, Direction.SAVE


def usage() -> list[Event]:
    return [
        TierUsage(Tier.DEVICE, 680, 1000, 512, 0, 0),
        TierUsage(Tier.HOST, 32768, 32768, 100, 3, 0),
        TierUsage(Tier.DISK, 100_000, 524_288, 0, 0, 12),
        Sequences(5, 2, 12),
        ResidentShare(0.4, 0.78),
        Retained(120, 400),
    ]


def work(times: int = 1) -> list[Event]:
    """Some traffic: half of the blocks are found, most of them in DRAM."""
    return [
        *[LookedUp(10, ((Tier.HOST, 4), (Tier.DISK, 1)))] * 20 * times,
        Moved(Tier.DEVICE, Tier.HOST, SAVE, 100 * times, 100 * times * BLOCK_BYTES, 1.0),
        Moved(Tier.HOST, Tier.DEVICE, LOAD, 90 * times, 90 * times * BLOCK_BYTES, 1.0),
        Moved(Tier.DISK, Tier.HOST, LOAD, 20 * times, 20 * times * BLOCK_BYTES, 1.0),
        Moved(Tier.HOST, Tier.DISK, SAVE, 30 * times, 30 * times * BLOCK_BYTES, 1.0),
        *[Decided(5, 5, 0.1, 1.6)] * 20 * times,
        *[FirstToken(0.04, 1600, 0, 800, None)] * 10 * times,
        *[FirstToken(1.5, 1600, 0, 0, None)] * 10 * times,
        *[Stepped(12, 20, 0.015, 40, 40 * BLOCK_BYTES, 0.001)] * 50 * times,
        *[Finished("stop", 1600, 50, 0, 0, 2.0, 0.5)] * 20 * times,
    ]


def trouble() -> list[Event]:
    return [
        Lost(Tier.DISK, Tier.HOST, LOAD, Verdict.CORRUPT, 3),
        Lost(Tier.DISK, Tier.HOST, LOAD, Verdict.EXPIRED, 7),
        Lost(Tier.DEVICE, Tier.HOST, SAVE, Verdict.DROPPED, 11),
        Refused("busy"),
        Preempted(100),
        TierRested(Tier.DISK, SAVE, 1.0, "no space"),
    ]


def exposed(*events: list[Event]) -> bytes:
    metrics = Metrics()
    for several in events:
        for event in several:
            metrics(event)
    return metrics.expose()


def samples(*events: list[Event]) -> Samples:
    return read_samples(exposed(*events).decode())


def vllm_text(times: int = 1) -> str:
    """As vLLM 0.32 writes it with the connector, shortened."""
    own = 'engine="0",model_name="smol"'
    hop = f'direction="load",{own},source="host",target="device"'
    return f"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{own}}} 3.0
vllm:num_requests_waiting{{{own}}} 4.0
vllm:num_requests_waiting_by_reason{{{own},reason="capacity"}} 4.0
vllm:engine_sleep_state{{{own},sleep_state="awake"}} 1.0
vllm:kv_cache_usage_perc{{{own}}} 0.25
vllm:cache_config_info{{block_size="32",engine="0",num_gpu_blocks="400"}} 1.0
vllm:num_preemptions_total{{{own}}} 2.0
vllm:num_preemptions_created{{{own}}} 1.7e+09
vllm:prompt_tokens_total{{{own}}} {1000.0 * times}
vllm:prompt_tokens_by_source_total{{{own},source="local_compute"}} {300.0 * times}
vllm:prompt_tokens_by_source_total{{{own},source="local_cache_hit"}} {200.0 * times}
vllm:prompt_tokens_by_source_total{{{own},source="external_kv_transfer"}} {500.0 * times}
vllm:generation_tokens_total{{{own}}} {80.0 * times}
vllm:time_to_first_token_seconds_bucket{{{own},le="0.1"}} {5.0 * times}
vllm:time_to_first_token_seconds_bucket{{{own},le="1.0"}} {10.0 * times}
vllm:time_to_first_token_seconds_bucket{{{own},le="+Inf"}} {10.0 * times}
vllm:time_to_first_token_seconds_count{{{own}}} {10.0 * times}
vllm:time_to_first_token_seconds_sum{{{own}}} {2.0 * times}
vllm:inter_token_latency_seconds_bucket{{{own},le="0.05"}} {70.0 * times}
vllm:inter_token_latency_seconds_bucket{{{own},le="+Inf"}} {70.0 * times}
vllm:inter_token_latency_seconds_count{{{own}}} {70.0 * times}
vllm:inter_token_latency_seconds_sum{{{own}}} {3.0 * times}
python_gc_objects_collected_total{{generation="0"}} 100.0
penstock_lookups_total{{{own}}} {30.0 * times}
penstock_lookup_blocks_total{{{own}}} {100.0 * times}
penstock_hit_blocks_total{{{own},tier="host"}} {60.0 * times}
penstock_blocks_total{{{hop}}} {16.0 * times}
penstock_bytes_total{{{hop}}} {16.0 * times * BLOCK_BYTES}
penstock_used_blocks{{{own},tier="host"}} 100.0
penstock_capacity_blocks{{{own},tier="host"}} 512.0
"""
