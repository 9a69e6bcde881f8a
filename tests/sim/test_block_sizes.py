from __future__ import annotations

import pytest

from penstock.shapes.sizing import PRESETS
from penstock.sim.block_sizes import BlockSizes, block_sizes
from penstock.sim.settings import Room, SimulatedHardware, plan_points
from penstock.sim.simulator import simulate
from penstock.sim.trace import Trace, TraceRequest
from penstock.sim.workloads import generate
from penstock.types import BlockKey, Direction, Tier, round_up

SIZES = {"device": "20", "host": "64", "disk": "100"}
NO_BLOCKS = dict.fromkeys(SIZES)


def keys(start: int, end: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(number.to_bytes(32)) for number in range(start, end))


# Two requests share 1,024 tokens. The first answers 512, which the trace does not name.
TRACE = Trace(
    "two",
    512,
    (
        TraceRequest(0.0, 1536, 512, keys(0, 3)),
        TraceRequest(1.0, 2048, 1, (*keys(0, 2), *keys(10, 12))),
    ),
)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3"])
def test_if_every_layer_keeps_every_token_a_block_has_one_size(model: str) -> None:
    size = 512 * PRESETS[model].bytes_per_token
    assert block_sizes(PRESETS[model], TRACE) == BlockSizes(size, size)


def test_windows_are_spread_over_the_tokens() -> None:
    """Gemma 3: 80 KiB per token grow; a window takes 1,024 times 416 KiB."""
    growing, window = 81_920, 425_984 * 1024
    found = block_sizes(PRESETS["gemma-3-27b"], TRACE)
    tokens = 2048 + 2049
    assert found.device_bytes == -(-(growing * tokens + 2 * window) * 512 // tokens)
    # Six blocks: three of the first prompt and its answer, two more of the second.
    assert found.tier_bytes == -(-(growing * 512 * 6 + 2 * window) // 6)
    assert found.load_bytes == found.device_bytes


def test_states_are_spread_over_the_tokens() -> None:
    growing, states = 24_576, 39_518_208
    found = block_sizes(PRESETS["qwen3-next-80b-a3b"], TRACE)
    tokens = 2048 + 2049
    assert found.device_bytes == -(-(growing * tokens + 2 * states) * 512 // tokens)
    assert found.tier_bytes == growing * 512 + 2 * states // 6


@pytest.mark.parametrize("model", ["gemma-3-27b", "qwen3-next-80b-a3b", "gpt-oss-20b"])
def test_a_simulation_counts_them(model: str) -> None:
    trace = generate("chat", num_requests=60, seed=1)
    room = Room.read(SIZES, NO_BLOCKS)
    hardware = SimulatedHardware(model, "h200", host_codec="raw")
    ((point,), _) = plan_points([trace], room, ["lru"], hardware)
    sizes = block_sizes(hardware.shape, trace)
    assert point.num_device_blocks == (20 << 30) // sizes.device_bytes
    slot_bytes = round_up(sizes.tier_bytes, 4096)
    assert point.num_host_blocks == (64 << 30) // slot_bytes
    assert point.num_disk_blocks == (100 << 30) // slot_bytes
    assert point.instance is not None
    assert point.instance.block_bytes == sizes.tier_bytes
    assert point.instance.load_block_bytes == sizes.load_bytes
    assert simulate(trace, point.instance).num_served == 60


def test_loads_and_saves_move_their_own_bytes() -> None:
    trace = generate("chat", num_requests=60, seed=1)
    hardware = SimulatedHardware("llama-3.1-8b", "h200", host_codec="raw")
    size = trace.block_tokens * hardware.shape.bytes_per_token
    sizes = BlockSizes(3 * size, size)
    found = simulate(trace, hardware.instance(trace.block_tokens, "lru", 500, 5000, 0, sizes))
    assert {direction for _, direction in found.carried} == set(Direction)
    for (_, direction), each in found.carried.items():
        assert each.num_blocks
        assert each.num_bytes == each.num_blocks * size * (3 if direction is Direction.LOAD else 1)


def test_tiers_hold_packed_blocks_and_links_carry_them() -> None:
    trace = generate("chat", num_requests=60, seed=1)
    room = Room.read(SIZES, NO_BLOCKS)
    points, runs = {}, {}
    for codec in ("raw", "auto", "int8"):
        hardware = SimulatedHardware("llama-3.1-8b", "h200", host_codec=codec)
        ((point,), _) = plan_points([trace], room, ["lru"], hardware)
        assert point.instance is not None
        points[codec], runs[codec] = point, simulate(trace, point.instance)
    ratio = SimulatedHardware("llama-3.1-8b", "h200").packings(trace.block_tokens)[Tier.HOST].ratio
    assert 0.76 < ratio < 0.78
    raw, packed, lossy = points["raw"], points["auto"], points["int8"]
    assert packed.num_device_blocks == raw.num_device_blocks
    assert packed.num_host_blocks >= 1.28 * raw.num_host_blocks
    assert packed.num_disk_blocks >= 1.28 * raw.num_disk_blocks
    assert lossy.num_host_blocks > 1.9 * raw.num_host_blocks
    assert packed.instance is not None
    assert (packed.instance.host_ratio, packed.instance.disk_ratio) == (ratio, ratio)
    lane = (Tier.HOST, Direction.SAVE)
    each = [runs[codec].carried[lane] for codec in ("raw", "auto")]
    per_block = [found.num_bytes / found.num_blocks for found in each]
    assert per_block[1] == pytest.approx(per_block[0] * ratio, rel=1e-6)
    seconds = [found.busy_seconds / found.num_bytes for found in each]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.2)  # the link's own rate is the same
