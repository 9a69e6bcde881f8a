"""What an audit takes the bytes of vLLM's blocks for."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.audits.compare import Difference, compare_blocks
from penstock.audits.layout import BlockLayout
from penstock.connectors.vllm.audit_layout import audit_layouts, layer_bytes, whole_bytes
from penstock.connectors.vllm.layout import Cache, read_layout
from penstock.connectors.vllm.orders import LayerBytes, Shard, place_parts
from penstock.groups.kinds import Group, Groups, Kind
from penstock.transfer.paged import PagedMemory

NUM_BLOCKS, HEADS, TOKENS, SIZE = 5, 3, 8, 16
PAGE = HEADS * TOKENS * 2 * SIZE * 4
GROUPS = Groups((Group(0, Kind.FULL, TOKENS),))


def cache(tensor: np.ndarray[Any, Any], dtype: str = "float32") -> Cache:
    steps = tuple(step // tensor.itemsize for step in tensor.strides)
    return Cache(tensor.ctypes.data, tensor.shape, steps, tensor.itemsize, dtype)


def config(*names: str, **spec: Any) -> Any:
    made = SimpleNamespace(num_kv_heads=HEADS, head_size=SIZE, page_size_bytes=PAGE, **spec)
    group = SimpleNamespace(layer_names=list(names), kv_cache_spec=made)
    return SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[group])


def layout_of(layers: tuple[LayerBytes, ...], block_bytes: int) -> BlockLayout:
    shard = Shard(0, block_bytes, NUM_BLOCKS, "", 1, layers=layers)
    (made,) = audit_layouts([shard], place_parts([shard]), GROUPS)
    assert made.num_bytes <= block_bytes
    return made


def block(memory: PagedMemory, index: int) -> memoryview:
    """A block as DRAM keeps it."""
    parts = [
        ctypes.string_at(each.address + index * each.stride_bytes, each.num_bytes)
        for each in memory.stretches
    ]
    return memoryview(b"".join(parts))


def differing(layout: BlockLayout, one: memoryview, other: memoryview) -> list[Difference]:
    return [each for each in compare_blocks(layout, one, other) if each.value]


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("rows", [1, 2])  # kernels may divide a block into smaller ones
def test_a_difference_has_a_layer_a_head_and_is_in_k_or_v(on_cpu: bool, rows: int) -> None:
    shape = (NUM_BLOCKS * rows, HEADS, TOKENS // rows, 2 * SIZE)
    tensors = {name: np.random.default_rng(0).random(shape, np.float32) for name in ("a", "b")}
    caches = {name: cache(tensor) for name, tensor in tensors.items()}
    memory, _ = read_layout(caches, NUM_BLOCKS, PAGE)
    layers = layer_bytes(caches, memory, config("a", "b"), on_cpu=on_cpu)
    layout = layout_of(layers, memory.block_bytes)
    assert layout.num_bytes == memory.block_bytes == 2 * PAGE, "every byte is compared"
    before = block(memory, 3)
    assert differing(layout, before, before) == []
    changed = tensors["b"][3 * rows + rows - 1]  # of this block, the last row
    if on_cpu:  # V is the second half of a head's memory
        changed[1].reshape(2, -1)[1] *= -1
    else:
        changed[1][:, SIZE:] *= -1
    (found,) = differing(layout, before, block(memory, 3))
    assert (found.layer, found.part, found.head) == ("b", "V", 1)
    assert found.value > 1
    assert differing(layout, block(memory, 2), block(memory, 2)) == []


def test_other_shapes_are_compared_as_a_whole() -> None:
    tensor = np.zeros((NUM_BLOCKS, TOKENS, 36), np.float32)  # latent attention
    caches = {"a": cache(tensor)}
    memory, _ = read_layout(caches, NUM_BLOCKS, TOKENS * 36 * 4)
    layers = layer_bytes(caches, memory, config("a"), on_cpu=False)
    layout = layout_of(layers, memory.block_bytes)
    assert layout.num_bytes == memory.block_bytes
    before = block(memory, 4)
    tensor[4, 7, 35] = 1
    (found,) = differing(layout, before, block(memory, 4))
    assert (found.layer, found.part, found.head, found.value) == ("a", "", None, 1.0)


def test_of_numbers_that_cannot_be_decoded_bytes_are_compared() -> None:
    tensor = np.zeros((NUM_BLOCKS, HEADS, TOKENS, 2 * SIZE), np.uint16)
    caches = {"a": cache(tensor, "int16")}
    memory, _ = read_layout(caches, NUM_BLOCKS, PAGE // 2)
    layout = layout_of(layer_bytes(caches, memory, config("a"), on_cpu=False), memory.block_bytes)
    assert layout.num_bytes == memory.block_bytes
    before = block(memory, 0)
    tensor[0] = 0x0101
    (found,) = differing(layout, before, block(memory, 0))
    assert found.value == 1.0


def test_states_follow_each_other() -> None:
    class Type:
        itemsize = 4

        def __str__(self) -> str:
            return "torch.float32"

    tensor = np.zeros((NUM_BLOCKS, 64), np.float32)
    caches = {"a": cache(tensor)}
    memory, _ = read_layout(caches, NUM_BLOCKS, 256)
    states = config("a", shapes=[(3, 4), (5, 8)], dtypes=[Type(), Type()])
    layout = layout_of(layer_bytes(caches, memory, states, on_cpu=True), 256)
    assert [each.layer for each in layout.stretches] == ["a state 0", "a state 1"]
    before = block(memory, 1)
    tensor[1, 12] = 1  # the first number after the first state
    tensor[1, 52:] = 1  # padding
    (found,) = differing(layout, before, block(memory, 1))
    assert found.layer == "a state 1"


def test_one_tensor_of_all_layers_is_compared_too() -> None:
    tensor = np.zeros((NUM_BLOCKS, 2, HEADS, TOKENS, 2 * SIZE), np.float32)
    memory, _ = read_layout({"all": cache(tensor)}, NUM_BLOCKS, 2 * PAGE)
    layout = layout_of(whole_bytes(cache(tensor), memory), memory.block_bytes)
    assert layout.num_bytes == memory.block_bytes
    before = block(memory, 2)
    tensor[2, 1, 2, 7, 31] = 1
    assert len(differing(layout, before, block(memory, 2))) == 1


def test_workers_are_told_apart_and_replicas_are_compared_once() -> None:
    layers = (LayerBytes(0, "a", 0, "float32", (8,)),)
    shards = [
        Shard(rank, 32, NUM_BLOCKS, "", 1, stage=stage, replicas=2, layers=layers)
        for stage in range(2)
        for rank in range(2)
    ]
    (layout,) = audit_layouts(shards, place_parts(shards), GROUPS)
    assert [(each.layer, each.offset) for each in layout.stretches] == [
        ("a (stage 0, rank 0)", 0),
        ("a (stage 1, rank 0)", 32),
    ]
