"""Attention over blocks that are packed in HOST: the same bits as over raw ones on the device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from engine.packed_blocks import PackedHost, form_of, pack_into, same_bits, strange_pool
from torch import Tensor

from penstock.codecs.lossless import LosslessCodec
from penstock.engine.attention.cpu import DecodeBatch
from penstock.engine.host_blocks import HostBlocks
from penstock.engine.runner import PackedRow, TorchMemory
from penstock.engine.table import PACKED_MARK, Addresses
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.types import BlockSpec, Slot

pytest.importorskip("triton")

from penstock.engine.attention import packed_triton as packed
from penstock.engine.attention import triton as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS = 2
NUM_BLOCKS = 24
SHAPES = [(16, 2, 64), (24, 3, 96), (64, 2, 128), (40, 1, 80)]  # block_tokens, kv_heads, head_dim
MANY_REGIONS = (320, 1, 128)  # a block's keys take several regions, and a block several parts


def addresses_of(pool: Tensor, host: PackedHost) -> Addresses:
    stride = pool.stride(0) * pool.itemsize
    return Addresses(pool.data_ptr(), stride, host.address + PACKED_MARK, host.stride_bytes)


def make(
    shape: tuple[int, int, int], kind: torch.dtype, num_blocks: int = NUM_BLOCKS
) -> tuple[Tensor, PackedHost]:
    """A pool, and all of its blocks packed in the opposite order."""
    pool = strange_pool((num_blocks, LAYERS, 2, *shape), kind).to(DEVICE)
    host = PackedHost(pool)
    for block in range(num_blocks):
        host.put(num_blocks - 1 - block, pool[block])
    return pool, host


def make_tables(lengths: list[int], block_tokens: int, seed: int) -> list[list[int]]:
    """Blocks at random: sequences may share some."""
    rng = random.Random(seed)
    return [[rng.randrange(NUM_BLOCKS) for _ in range(0, n, block_tokens)] for n in lengths]


def chilled(tables: list[list[int]], share: float, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [~(NUM_BLOCKS - 1 - block) if rng.random() < share else block for block in table]
        for table in tables
    ]


def layer_bytes_of(pool: Tensor) -> int:
    return pool.stride(1) * pool.itemsize


def fetch(
    pool: Tensor,
    host: PackedHost,
    waves: list[list[int]],  # places
    wave: int,
    layer: int,
    num_there: int = 0,
    num_near: int = 0,
    *,
    is_first: bool = False,
    has_window: bool = False,
) -> Tensor:
    """One layer of a wave's blocks, unpacked; sevens where nothing was fetched to."""
    numbers, sources = [], []
    for places in waves:
        numbers += [len(sources), len(places), num_there, 0, 0, num_near]
        sources += addresses_of(pool, host).of(np.array(places)).tolist()
    described = torch.tensor(numbers, device=DEVICE)
    which = {"is_first": is_first, "has_window": has_window}
    offset = layer * layer_bytes_of(pool)
    shape = (len(waves[wave]) + 2, packed.packed_layer_bytes(host.form, layer_bytes_of(pool)))
    arrived = torch.full(shape, 7, dtype=torch.uint8, device=DEVICE)
    kernels.fetch_layer(
        torch.tensor(sources, device=DEVICE),
        described,
        wave,
        packed.packed_at(host.form, offset) - PACKED_MARK,
        arrived.view(torch.int64),
        3,
        **which,
    )
    buffer = torch.full((shape[0], *pool.shape[2:]), 7, dtype=pool.dtype, device=DEVICE)
    packed.unpack_layer(arrived, described, wave, buffer, 5, host.form, **which)
    return buffer


@pytest.mark.parametrize("shape", [*SHAPES, MANY_REGIONS], ids=str)
def test_a_layer_that_is_fetched_is_unpacked(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    pool, host = make(shape, torch.bfloat16, 5)
    waves = [[~2, ~1], [~4, ~1, ~0, ~3]]
    assert (addresses_of(pool, host).of(np.array(waves[1])) & PACKED_MARK).all()
    for layer in range(LAYERS):
        buffer = fetch(pool, host, waves, 1, layer)
        assert same_bits(buffer[:4], pool[[0, 3, 4, 1], layer])
        assert (buffer[4:] == 7).all()
        buffer = fetch(pool, host, waves, 1, layer, num_there=1, is_first=True)
        assert same_bits(buffer[1:4], pool[[3, 4, 1], layer])
        assert (buffer[[0, 4, 5]] == 7).all()  # fetched earlier, or not wanted
        buffer = fetch(pool, host, waves, 1, layer, 1, 2, is_first=True, has_window=True)
        assert same_bits(buffer[1], pool[3, layer])
        assert (buffer[[0, 2, 3, 4, 5]] == 7).all()  # a window does not reach all of them
        buffer = fetch(pool, host, waves, 1, layer, 2, 1, is_first=True, has_window=True)
        assert (buffer == 7).all()


@pytest.mark.parametrize("shape", [*SHAPES, MANY_REGIONS], ids=str)
def test_a_layer_is_brought_together_from_raw_and_packed_blocks(
    shape: tuple[int, int, int],
) -> None:
    torch.manual_seed(1)
    pool, host = make(shape, torch.bfloat16, 5)
    places = np.array([3, ~4, 0, ~0, ~2, 1])
    table = torch.from_numpy(addresses_of(pool, host).of(places)).to(DEVICE)
    for layer in range(LAYERS):
        out = torch.full((2, 6, *shape), 7, dtype=torch.bfloat16, device=DEVICE)
        kernels.copy_layer(table, layer * layer_bytes_of(pool), out, host.form)
        assert same_bits(out.transpose(0, 1), pool[[3, 0, 0, 4, 2, 1], layer])


def decode(
    pool: Tensor, host: PackedHost, tables: list[list[int]], lengths: list[int], heads: int
) -> DecodeBatch:
    addresses = addresses_of(pool, host)
    places = [addresses.of(np.array(table)) for table in tables]
    return DecodeBatch(pool, places, lengths, heads, host.form)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="reads the pool on a CPU")
@pytest.mark.parametrize("shape", [*SHAPES, MANY_REGIONS], ids=str)
def test_the_cpus_attention_gives_the_same_bits(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(3)
    pool, host = make(shape, torch.bfloat16)
    block_tokens, kv_heads, dim = shape
    heads = 3 * kv_heads
    lengths = [1, 50, 127, 300, 999]
    tables = make_tables(lengths, block_tokens, seed=3)
    query = torch.randn(len(lengths), heads, dim).to(torch.bfloat16)
    resident = [
        DecodeBatch(
            pool,
            [
                Addresses(pool.data_ptr(), layer_bytes_of(pool) * LAYERS).of(np.array(table))
                for table in tables
            ],
            lengths,
            heads,
        ).attend(query, layer, 0.2)
        for layer in range(LAYERS)
    ]
    assert resident[0].isfinite().any()
    for seed, share in enumerate((0.0, 0.2, 0.6, 1.0)):
        batch = decode(pool, host, chilled(tables, share, seed), lengths, heads)
        for layer in range(LAYERS):
            assert same_bits(batch.attend(query, layer, 0.2), resident[layer]), (share, layer)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="reads the pool on a CPU")
def test_torch_gathers_raw_and_packed_blocks() -> None:
    torch.manual_seed(4)
    pool = DevicePool(6, LAYERS, 16, 2, 64, torch.bfloat16)
    pool.tensor.copy_(strange_pool(pool.tensor.shape, torch.bfloat16))
    form = form_of(pool.tensor)
    host = HostArena(BlockSpec(bytes(32), form.packed_bytes, 16), 6 * (form.packed_bytes + 4096))
    codec = LosslessCodec(form)
    for block in range(5):
        pack_into(codec, pool.tensor[block], host.view(Slot(4 - block)))
    nothing: Any = np.zeros(0, np.int64)
    row = PackedRow([], nothing, [], [], nothing, np.zeros(0, np.bool_), [])
    memory = TorchMemory(pool.tensor, HostBlocks(pool, host, form), row, 16)
    for layer in range(LAYERS):
        keys, values = memory.history(layer, np.array([3, ~4, ~0, 5, ~2]))
        wanted = pool.tensor[[3, 0, 4, 5, 2], layer]
        assert same_bits(keys, wanted[:, 0].flatten(0, 1))
        assert same_bits(values, wanted[:, 1].flatten(0, 1))
