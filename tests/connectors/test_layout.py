"""Caches of any shape are read as stretches of bytes, or refused with a reason."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.vllm.layout import Cache, read_layout
from penstock.errors import ConfigError
from penstock.transfer.paged import PagedMemory, PageStretch

BLOCKS = 10


def dense(address: int, *shape: int, element_bytes: int = 2) -> Cache:
    strides = tuple(accumulate((1, *reversed(shape[1:])), lambda a, b: a * b))[::-1]
    return Cache(address, shape, strides, element_bytes, "bfloat16")


def refuse(cache: Cache, why: str, page_bytes: int = 512, num_blocks: int = BLOCKS) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        read_layout({"model.layers.3.attn": cache}, num_blocks, page_bytes)
    assert "model.layers.3.attn" in str(refused.value)
    assert "Choose another attention backend" in str(refused.value)


def test_layers_of_their_own_are_a_stretch_each_in_the_order_given() -> None:
    caches = {f"layer {n}": dense(address, BLOCKS, 2, 4, 32) for n, address in enumerate([9000, 1])}
    memory, words = read_layout(caches, BLOCKS, 512)
    assert memory == PagedMemory((PageStretch(9000, 512, 512), PageStretch(1, 512, 512)), BLOCKS)
    assert words == "2 layers of 1x[2, 4, 32] strides [128, 32, 1] bfloat16"


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    element_bytes=st.sampled_from([1, 2, 4]),
    padding=st.integers(0, 7),
    seed=st.integers(0, 1 << 32),
)
def test_any_order_of_a_blocks_inside_is_one_stretch(
    shape: list[int], element_bytes: int, padding: int, seed: int
) -> None:
    rng = random.Random(seed)
    order = rng.sample(range(len(shape)), len(shape))
    strides = [0] * len(shape)
    expected = 1
    for axis in order:
        # Where there is only one, its stride says nothing, and torch may give any.
        strides[axis] = expected if shape[axis] > 1 else rng.randint(0, 1000)
        expected *= shape[axis]
    block_stride = expected + padding  # blocks may lie apart
    cache = Cache(4096, (BLOCKS, *shape), (block_stride, *strides), element_bytes, "any")
    memory, _ = read_layout({"layer": cache}, BLOCKS, expected * element_bytes)
    (stretch,) = memory.stretches
    assert stretch == PageStretch(4096, block_stride * element_bytes, expected * element_bytes)


def test_one_order_is_described_apart_from_another() -> None:
    one = Cache(0, (BLOCKS, 4, 8), (32, 8, 1), 2, "bfloat16")
    other = Cache(0, (BLOCKS, 4, 8), (32, 1, 4), 2, "bfloat16")
    dtype = one._replace(dtype="float16")
    words = {read_layout({"layer": cache}, BLOCKS, 64)[1] for cache in (one, other, dtype)}
    assert len(words) == 3


def test_layers_side_by_side_within_a_block_become_one_stretch() -> None:
    """Cross-layer: the blocks of all layers lie together, each layer strides over the others."""
    num_layers, elements = 4, 256
    caches = {
        f"layer {n}": Cache(
            1000 + n * elements * 2, (BLOCKS, 8, 32), (num_layers * elements, 32, 1), 2, "bfloat16"
        )
        for n in range(num_layers)
    }
    memory, words = read_layout(caches, BLOCKS, 512)
    assert memory == PagedMemory((PageStretch(1000, 4 * 512, 4 * 512),), BLOCKS)
    assert words.startswith("4 layers of ")


def test_kernel_blocks_smaller_than_the_managers_are_taken_together() -> None:
    cache = dense(0, 4 * BLOCKS, 8, 16)
    memory, words = read_layout({"layer": cache}, BLOCKS, 4 * 256)
    assert memory.stretches == (PageStretch(0, 1024, 1024),)
    assert words == "1 layers of 4x[8, 16] strides [16, 1] bfloat16"
    apart = cache._replace(strides=(129, 16, 1))
    refuse(apart, "parts of a block are not adjacent", 1024)


def test_layers_of_different_shapes_are_described_one_by_one() -> None:
    caches = {"a": dense(0, BLOCKS, 8, 16), "b": dense(1 << 20, BLOCKS, 4, 32)}
    memory, words = read_layout(caches, BLOCKS, 256)
    assert len(memory.stretches) == 2
    assert words.count("|") == 1
    assert "[8, 16]" in words
    assert "[4, 32]" in words


def test_layers_that_share_one_cache_count_once() -> None:
    own, other = dense(0, BLOCKS, 8, 16), dense(1 << 20, BLOCKS, 8, 16)
    memory, words = read_layout({"a": own, "b": other, "shares a's": own}, BLOCKS, 256)
    assert [stretch.address for stretch in memory.stretches] == [0, 1 << 20]
    assert words.startswith("2 layers")


@pytest.mark.parametrize(
    "strides",
    [
        (256, 33, 1),  # rows apart
        (256, 32, 2),  # elements apart
        (256, 32, 0),  # one element for all
        (255, 32, 1),  # blocks within each other
        (1, 32, 1),
        (256, 0, 1),
    ],
)
def test_gaps_and_overlaps_are_refused(strides: tuple[int, ...]) -> None:
    refuse(Cache(0, (BLOCKS, 8, 32), strides, 2, "bfloat16"), "gaps, or blocks overlap")


@pytest.mark.parametrize(
    "shape",
    [
        (2, BLOCKS, 8, 16),  # keys and values apart, as older backends have it
        (BLOCKS + 1, 256),
        (BLOCKS - 1, 256),
        (0, 256),
        (),
    ],
)
def test_a_first_dimension_that_does_not_count_blocks_is_refused(shape: tuple[int, ...]) -> None:
    cache = dense(0, *shape) if shape else Cache(0, (), (), 2, "bfloat16")
    refuse(cache, rf"first dimension is not a multiple of {BLOCKS}, the number of blocks")


@pytest.mark.parametrize("page_bytes", [511, 513, 1024])
def test_a_block_of_another_size_than_vllm_says_is_refused(page_bytes: int) -> None:
    refuse(dense(0, BLOCKS, 8, 32), rf"512 bytes, but vLLM says {page_bytes}", page_bytes)


def test_no_cache_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache to offload"):
        read_layout({}, BLOCKS, 512)


def test_real_tensors_are_read_as_they_lie() -> None:
    torch = pytest.importorskip("torch")
    whole = torch.zeros(3, BLOCKS, 8, 2, 16, dtype=torch.bfloat16)
    permuted = whole[1].permute(0, 2, 1, 3)  # as a backend that wants heads before tokens
    cache = Cache.of(permuted)
    size = math.prod((8, 2, 16)) * 2
    assert cache.address == whole.data_ptr() + BLOCKS * size
    assert cache.shape == (BLOCKS, 2, 8, 16)
    assert cache.element_bytes == 2
    assert cache.dtype == "bfloat16"
    memory, _ = read_layout({"layer": cache}, BLOCKS, size)
    assert memory.stretches == (PageStretch(cache.address, size, size),)
    across = torch.zeros(BLOCKS, 3, 8, 32, dtype=torch.float32)
    layers = {f"layer {n}": Cache.of(across[:, n]) for n in range(3)}
    memory, _ = read_layout(layers, BLOCKS, 8 * 32 * 4)
    assert memory.stretches == (PageStretch(across.data_ptr(), 3 * 1024, 3 * 1024),)
    with pytest.raises(ConfigError, match="gaps"):
        read_layout({"layer": Cache.of(across[:, 0, :, :16])}, BLOCKS, 512)
