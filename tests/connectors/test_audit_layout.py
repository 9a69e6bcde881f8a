"""Audits find every layer's numbers where they lie in a block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.audits.layout import DIM, HEAD, TOKEN
from penstock.connectors.vllm.audit_layout import audit_layouts, layer_bytes
from penstock.connectors.vllm.layout import Cache, read_union
from penstock.connectors.vllm.orders import LayerBytes, Shard, place_parts
from penstock.groups.kinds import Group, Groups, Kind

BLOCKS = 10


def attention(address: int, stride: int, heads: int = 2, dtype: str = "bfloat16") -> Cache:
    """[blocks, heads, 4 tokens, 8 numbers]; `stride` from block to block is in numbers."""
    return Cache(address, (BLOCKS, heads, 4, 8), (stride, 32, 8, 1), 2, dtype)


def spec(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


def config_of(**groups: tuple[Any, list[str]]) -> Any:
    return SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=names)
            for spec, names in groups.values()
        ],
    )


def test_layers_of_two_groups_that_share_memory() -> None:
    caches = {
        "full 0": attention(1000, 64),
        "full 1": attention(1000 + 128 * BLOCKS, 64),
        "window 0": attention(1000, 64),
    }
    memory, _ = read_union(caches, BLOCKS, dict.fromkeys(caches, 128))
    config = config_of(
        full=(spec(num_kv_heads=2), ["full 0", "full 1"]),
        window=(spec(num_kv_heads=2), ["window 0"]),
    )
    found = layer_bytes(caches, memory, config)
    assert [(layer.group, layer.name, layer.offset) for layer in found] == [
        (0, "full 0", 0),
        (0, "full 1", 128),
        (1, "window 0", 0),
    ]
    assert found[0].shape == (1, 2, 4, 8)
    assert found[0].strides == (64, 32, 8, 1)
    assert found[0].axes == ("", HEAD, TOKEN, DIM)


def test_layers_side_by_side_in_a_packed_block() -> None:
    caches = {"a": attention(0, 200), "b": attention(128, 200)}
    memory, _ = read_union(caches, BLOCKS, dict.fromkeys(caches, 128))
    config = config_of(all=(spec(num_kv_heads=2), ["a", "b"]))
    assert [layer.offset for layer in layer_bytes(caches, memory, config)] == [0, 128]


def test_heads_are_named_only_where_they_are_known() -> None:
    caches = {"a": attention(0, 64)}
    memory, _ = read_union(caches, BLOCKS, {"a": 128})
    for fields in ({"num_kv_heads": 3}, {}):
        (found,) = layer_bytes(caches, memory, config_of(all=(spec(**fields), ["a"])))
        assert found.axes == ("",) * 4


def test_numbers_of_an_unknown_type_are_bytes() -> None:
    caches = {"a": attention(0, 64, dtype="uint8")._replace(element_bytes=1)}
    memory, _ = read_union(caches, BLOCKS, {"a": 64})
    (found,) = layer_bytes(caches, memory, config_of(all=(spec(num_kv_heads=2), ["a"])))
    assert found == LayerBytes(0, "a", 0, "uint8", (64,))


def test_a_block_of_several_kernel_blocks_is_read_as_one() -> None:
    cache = Cache(0, (4 * BLOCKS, 2, 4, 8), (64, 32, 8, 1), 2, "bfloat16")
    memory, _ = read_union({"a": cache}, BLOCKS, {"a": 512})
    (found,) = layer_bytes({"a": cache}, memory, config_of(all=(spec(num_kv_heads=2), ["a"])))
    assert found.shape == (4, 2, 4, 8)


def test_the_states_of_a_layer_follow_each_other() -> None:
    torch = pytest.importorskip("torch")
    state = spec(
        shapes=((3, 8), (2, 4, 4), (5,)), dtypes=(torch.bfloat16, torch.float32, torch.int8)
    )
    caches = {
        "attn": Cache(0, (BLOCKS, 200), (200, 1), 1, "int8"),
        "state": Cache(0, (BLOCKS, 1, 1, 181), (200, 181, 181, 1), 1, "int8"),
    }
    memory, _ = read_union(caches, BLOCKS, dict.fromkeys(caches, 200))
    found = layer_bytes(caches, memory, config_of(state=(state, ["state"])))
    assert found == (
        LayerBytes(0, "state state 0", 0, "bfloat16", (3, 8)),
        LayerBytes(0, "state state 1", 48, "float32", (2, 4, 4)),
        LayerBytes(0, "state state 2", 48 + 128, "int8", (5,)),
    )


def test_layers_with_specs_of_their_own() -> None:
    caches = {"attn": attention(0, 64), "other": attention(128 * BLOCKS, 32, heads=1)}
    memory, _ = read_union(caches, BLOCKS, {"attn": 128, "other": 64})
    both = spec(kv_cache_specs={"attn": spec(num_kv_heads=2), "other": spec(num_kv_heads=1)})
    found = layer_bytes(caches, memory, config_of(all=(both, ["attn", "other"])))
    assert [layer.axes[1] for layer in found] == [HEAD, HEAD]
    assert [layer.offset for layer in found] == [0, 128]


def test_layers_of_other_stages_and_groups_that_are_not_kept_are_left_out() -> None:
    caches = {"mine": attention(0, 64), "scratch": attention(1 << 20, 64)}
    memory, _ = read_union(caches, BLOCKS, {"mine": 128})
    config = config_of(
        kept=(spec(num_kv_heads=2), ["mine", "of another stage"]),
        scratch=(spec(num_kv_heads=2, prefix_cacheable=False), ["scratch"]),
    )
    assert [layer.name for layer in layer_bytes(caches, memory, config)] == ["mine"]


# All workers together.

GROUPS = Groups((Group(0, Kind.FULL, 4), Group(2, Kind.WINDOW, 4, 8)))
LAYERS = (
    LayerBytes(0, "full", 0, "bfloat16", (1, 2, 4, 8)),
    LayerBytes(2, "window", 64, "bfloat16", (1, 2, 4, 4)),
)


def test_each_group_has_a_layout_with_its_layers() -> None:
    shards = [Shard(0, 128, BLOCKS, "", 1, layers=LAYERS)]
    full, window = audit_layouts(shards, place_parts(shards), GROUPS)
    assert [(one.layer, one.offset) for one in full.stretches] == [("full", 0)]
    assert [(one.layer, one.offset) for one in window.stretches] == [("window", 64)]


def test_each_workers_part_begins_at_its_place() -> None:
    shards = [
        Shard(rank, size, BLOCKS, "", 1, stage=stage, layers=LAYERS)
        for stage, size in enumerate((128, 256))
        for rank in range(2)
    ]
    _, window = audit_layouts(shards, place_parts(shards), GROUPS)
    assert [(one.layer, one.offset) for one in window.stretches] == [
        ("window (stage 0, rank 0)", 64),
        ("window (stage 0, rank 1)", 128 + 64),
        ("window (stage 1, rank 0)", 256 + 64),
        ("window (stage 1, rank 1)", 512 + 64),
    ]


def test_what_several_workers_hold_alike_is_audited_once() -> None:
    shards = [Shard(rank, 128, BLOCKS, "", 1, replicas=2, layers=LAYERS) for rank in range(4)]
    full, _ = audit_layouts(shards, place_parts(shards), GROUPS)
    assert [(one.layer, one.offset) for one in full.stretches] == [
        ("full (stage 0, rank 0)", 0),
        ("full (stage 0, rank 2)", 128),
    ]
