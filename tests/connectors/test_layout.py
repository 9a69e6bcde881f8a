"""Caches of any shape are read as stretches of bytes, or refused with a reason."""

from __future__ import annotations

import math
import random
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.vllm.layout import Cache, read_layout, read_union
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


# Layers of several groups that share memory: a block is the union of what all of them use.


def page(address: int, stride: int, num_bytes: int, num_blocks: int = BLOCKS) -> Cache:
    """A layer whose page is bytes; `stride` is the distance from one block to the next."""
    return Cache(address, (num_blocks, num_bytes), (stride, 1), 1, "uint8")


def union(
    caches: dict[str, Cache], pages: dict[str, int] | None = None, num_blocks: int = BLOCKS
) -> tuple[PagedMemory, str]:
    sizes = {name: cache.shape[1] for name, cache in caches.items()}
    return read_union(caches, num_blocks, sizes if pages is None else pages)


def test_groups_that_use_the_same_memory_are_copied_once() -> None:
    """Two groups of two layers each, one region of memory for each layer of a group."""
    caches = {
        "full 0": page(1000, 64, 64),
        "full 1": page(1640, 64, 64),
        "window 0": page(1000, 64, 64),
        "window 1": page(1640, 64, 64),
    }
    memory, _ = union(caches)
    assert memory == PagedMemory((PageStretch(1000, 64, 64), PageStretch(1640, 64, 64)), BLOCKS)


def test_a_page_is_copied_with_its_padding() -> None:
    caches = {"attn": page(0, 64, 40), "state": page(0, 64, 24)}
    memory, words = union(caches, {"attn": 64, "state": 64})
    assert memory.stretches == (PageStretch(0, 64, 64),)
    assert words.count("64 bytes of") == 2
    smaller, _ = union(caches, {"attn": 48, "state": 24})
    assert smaller.stretches == (PageStretch(0, 64, 48),)


def test_pages_of_two_sizes_in_one_packed_block() -> None:
    """Block-outermost: in a block of 100 bytes one group has 60 + 40, the other 30 + 30 + 30."""
    caches = {
        "a0": page(0, 100, 60),
        "a1": page(60, 100, 40),
        **{f"b{n}": page(30 * n, 100, 30) for n in range(3)},
    }
    memory, words = union(caches)
    assert memory.stretches == (PageStretch(0, 100, 100),)
    assert "a1 at 60:" in words
    assert "b2 at 60:" in words


def test_a_gap_that_no_layer_uses_is_not_copied() -> None:
    memory, words = union({"a": page(0, 100, 20), "b": page(50, 100, 20), "c": page(10, 100, 20)})
    assert memory.stretches == (PageStretch(0, 100, 30), PageStretch(50, 100, 20))
    assert "b at 30:" in words


def test_a_layer_may_join_what_lay_apart() -> None:
    memory, _ = union({"a": page(0, 100, 20), "b": page(40, 100, 20), "c": page(10, 100, 40)})
    assert memory.stretches == (PageStretch(0, 100, 60),)


def test_layers_that_are_not_kept_are_left_out() -> None:
    caches = {"kept": page(0, 64, 64), "scratch": page(5000, 8, 8)}
    memory, words = union(caches, {"kept": 64})
    assert memory.stretches == (PageStretch(0, 64, 64),)
    assert "scratch" not in words
    with pytest.raises(ConfigError, match="no KV cache to offload"):
        union(caches, {})


def test_where_memory_lies_is_of_no_account() -> None:
    def at(*addresses: int) -> tuple[list[int], str]:
        caches = {f"layer {n}": page(address, 64, 64) for n, address in enumerate(addresses)}
        caches["other group"] = caches["layer 0"]
        memory, words = union(caches)
        assert memory.stretches[0].address == addresses[0], "the order is that of the layers"
        return [memory.block_bytes], words

    assert at(0, 10_000, 20_000) == at(90_000, 50_000, 70_000) == at(640, 0, 1280)


def test_the_words_tell_which_layer_lies_where() -> None:
    """Two ways to fill the same memory, in which only the order within a block differs."""
    whole = {"full": page(0, 100, 100)}
    one = union({**whole, "b0": page(0, 100, 50), "b1": page(50, 100, 50)})
    two = union({**whole, "b0": page(50, 100, 50), "b1": page(0, 100, 50)})
    assert one[0] == two[0]
    assert one[1] != two[1]


@pytest.mark.parametrize(
    ("caches", "why"),
    [
        # Groups with different distances between blocks: block 3 of one is block 2 of the other.
        ({"a": page(0, 64, 64), "b": page(0, 96, 96)}, "overlap those of other layers in part"),
        ({"a": page(0, 64, 32), "b": page(0, 96, 32)}, "overlap those of other layers in part"),
        # The same distance, shifted by half a block, or by some blocks.
        ({"a": page(0, 64, 64), "b": page(32, 64, 64)}, "overlap those of other layers in part"),
        ({"a": page(0, 64, 64), "b": page(128, 64, 64)}, "overlap those of other layers in part"),
        ({"a": page(0, 64, 20), "b": page(60, 64, 20)}, "overlap those of other layers in part"),
        ({"a": page(0, 32, 64)}, "blocks of 64 bytes overlap"),
        ({"a": Cache(0, (BLOCKS + 1, 8), (8, 1), 1, "uint8")}, "not a multiple of 10"),
        ({"a": Cache(0, (BLOCKS, 8, 8), (8, 800, 1), 1, "uint8")}, "more than the 8 bytes"),
        ({"a": Cache(0, (BLOCKS, 8), (8, -1), 1, "uint8")}, "more than the 8 bytes"),
        ({"a": Cache(0, (), (), 1, "uint8")}, "not a multiple of 10"),
    ],
)
def test_what_does_not_fit_together_is_refused(caches: dict[str, Cache], why: str) -> None:
    pages = {name: cache.shape[1] if cache.shape else 8 for name, cache in caches.items()}
    with pytest.raises(ConfigError, match=why) as refused:
        read_union(caches, BLOCKS, pages)
    assert "Choose another attention backend" in str(refused.value)


@given(data=st.data())
def test_a_block_has_every_byte_of_every_layer_exactly_once(data: st.DataObject) -> None:
    """Random groups, each with its own division of one block, or of one region for each layer."""
    num_blocks, stride = 3, data.draw(st.integers(8, 48))
    is_packed = data.draw(st.booleans())
    num_regions = 1 if is_packed else data.draw(st.integers(1, 3))
    caches: dict[str, Cache] = {}
    pages: dict[str, int] = {}
    for group in range(data.draw(st.integers(1, 4))):
        for region in range(num_regions):
            base = 7 + region * stride * num_blocks
            some = st.lists(st.integers(0, stride), unique=True, min_size=2, max_size=5)
            cuts = sorted(data.draw(some)) if is_packed else [0, stride]
            for start, end in pairwise(cuts):
                name = f"{group}.{region}.{start}"
                used = data.draw(st.integers(1, end - start))
                caches[name] = page(base + start, stride, used, num_blocks)
                pages[name] = data.draw(st.integers(used, end - start))  # with padding
    names = data.draw(st.permutations(sorted(caches)))
    memory, _ = union({name: caches[name] for name in names}, pages, num_blocks)

    size = 7 + num_regions * stride * num_blocks
    device = bytearray(random.Random(1).randbytes(size))
    saved = [
        b"".join(
            bytes(device[at : at + stretch.num_bytes])
            for stretch in memory.stretches
            for at in [stretch.address + block * stretch.stride_bytes]
        )
        for block in range(num_blocks)
    ]
    assert all(len(block) == memory.block_bytes <= num_regions * stride for block in saved)
    restored = bytearray(size)
    for block, content in enumerate(saved):
        done = 0
        for stretch in memory.stretches:
            at = stretch.address + block * stretch.stride_bytes
            assert not any(restored[at : at + stretch.num_bytes]), "copied twice"
            restored[at : at + stretch.num_bytes] = content[done : done + stretch.num_bytes]
            done += stretch.num_bytes
    for name, cache in caches.items():
        offset = memory.offset(cache.address)
        assert offset is not None
        for block in range(num_blocks):
            at = cache.address + block * stride
            mine = device[at : at + pages[name]]
            assert restored[at : at + pages[name]] == mine
            assert saved[block][offset : offset + pages[name]] == mine
