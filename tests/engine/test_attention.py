"""Decode attention on a CPU, against torch's own in double precision."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.engine.attention.cpu import DecodeBatch
from penstock.engine.attention.torch import _attend_in_two
from penstock.engine.table import Addresses

BLOCK_TOKENS = 16
LAYERS = 2


def make_pool(num_blocks: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_blocks, LAYERS, 2, BLOCK_TOKENS, kv_heads, dim).to(dtype)


def make_tables(lengths: list[int], num_blocks: int) -> list[list[int]]:
    free = torch.randperm(num_blocks).tolist()
    return [[free.pop() for _ in range(-(-length // BLOCK_TOKENS))] for length in lengths]


def decode(
    pool: Tensor,
    tables: list[list[int]],
    lengths: list[int],
    heads: int,
    host: Tensor | None = None,
) -> DecodeBatch:
    """Blocks below zero lie in `host`."""
    stride = pool.stride(0) * pool.itemsize
    addresses = Addresses(pool.data_ptr(), stride)
    if host is not None:
        host_stride = host.stride(0) * host.itemsize
        addresses = Addresses(pool.data_ptr(), stride, host.data_ptr(), host_stride)
    return DecodeBatch(pool, [addresses.of(np.array(table)) for table in tables], lengths, heads)


def expected(query: Tensor, pool: Tensor, layer: int, table: list[int], length: int) -> Tensor:
    history = pool[table, layer].double()
    keys = history[:, 0].flatten(0, 1)[:length].transpose(0, 1)
    values = history[:, 1].flatten(0, 1)[:length].transpose(0, 1)
    return scaled_dot_product_attention(
        query.double()[None, :, None], keys[None], values[None], enable_gqa=True
    )[0, :, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 128)])
def test_it_is_attention(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = [1, 3, 15, 16, 17, 127, 128, 129, 300]
    pool = make_pool(80, kv_heads, dim, dtype)
    tables = make_tables(lengths, 80)
    used = torch.zeros(80, BLOCK_TOKENS, dtype=torch.bool)
    for table, length in zip(tables, lengths, strict=True):
        for index in range(length):
            used[table[index // BLOCK_TOKENS], index % BLOCK_TOKENS] = True
    pool.permute(0, 3, 1, 2, 4, 5)[~used] = float("nan")  # what is not theirs must not be read
    query = (3 * torch.randn(len(lengths), heads, dim)).to(dtype)
    batch = decode(pool, tables, lengths, heads)
    for layer in range(LAYERS):
        found = batch.attend(query, layer, dim**-0.5)
        assert found.dtype is dtype
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            wanted = expected(query[row], pool, layer, table, length)
            tolerance = 2e-6 if dtype is torch.float32 else 8e-3
            torch.testing.assert_close(found[row].double(), wanted, rtol=tolerance, atol=tolerance)


def test_neither_the_place_of_blocks_nor_the_batch_changes_a_bit() -> None:
    torch.manual_seed(1)
    pool = make_pool(64, 2, 32, torch.float32)
    query = torch.randn(3, 4, 32)
    lengths = [200, 77, 310]
    tables = make_tables(lengths, 64)
    together = decode(pool, tables, lengths, 4).attend(query, 1, 0.2)
    order = torch.randperm(64)
    elsewhere = torch.empty_like(pool)
    elsewhere[order] = pool
    for row in range(3):
        moved = [order[block].item() for block in tables[row]]
        alone = decode(elsewhere, [moved], [lengths[row]], 4)
        assert torch.equal(alone.attend(query[row : row + 1], 1, 0.2)[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_cold_blocks_change_no_bit(dtype: torch.dtype, share: float) -> None:
    torch.manual_seed(4)
    pool = make_pool(64, 2, 32, dtype)
    padded = torch.zeros(64, pool[0].numel() + 24, dtype=dtype)
    host = padded[:, : pool[0].numel()].view_as(pool)
    query = torch.randn(3, 4, 32).to(dtype)
    lengths = [200, 77, 310]
    tables = make_tables(lengths, 64)
    resident = decode(pool, tables, lengths, 4).attend(query, 1, 0.2)
    partly = pool.clone()
    for table in tables:
        for index, block in enumerate(table):
            if torch.rand(()) < share or share == 1:
                host[63 - block] = pool[block]
                partly[block] = float("nan")
                table[index] = ~(63 - block)
    found = decode(partly, tables, lengths, 4, host).attend(query, 1, 0.2)
    assert torch.equal(found, resident)


def test_scores_of_any_size_stay_finite() -> None:
    pool = make_pool(4, 1, 16, torch.float32) * 1e4
    query = torch.randn(1, 2, 16) * 1e4
    found = decode(pool, [[0, 1, 2]], [40], 2).attend(query, 0, 1.0)
    wanted = expected(query[0] * 4, pool, 0, [0, 1, 2], 40)
    torch.testing.assert_close(found[0].double(), wanted)


def test_two_engines_may_attend_at_once() -> None:
    torch.manual_seed(2)
    pool = make_pool(32, 2, 32, torch.float32)
    query = torch.randn(1, 4, 32)
    batches = [decode(pool, [list(range(32))], [500], 4) for _ in range(4)]
    wanted = batches[0].attend(query, 0, 0.2)
    with ThreadPoolExecutor(4) as threads:
        work = lambda batch: [batch.attend(query, 0, 0.2) for _ in range(20)]  # noqa: E731
        for results in threads.map(work, batches):
            assert all(torch.equal(result, wanted) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chunk_behind_a_long_history_is_attended_as_with_a_mask(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    num_past, num_new = 1500, 37
    query = torch.randn(1, 6, num_new, 32).to(dtype)
    key, value = (torch.randn(1, 2, num_past + num_new, 32).to(dtype) for _ in range(2))
    positions = torch.arange(num_past, num_past + num_new)
    mask = torch.arange(num_past + num_new)[None] <= positions[:, None]
    wanted = scaled_dot_product_attention(
        query.double(), key.double(), value.double(), mask, scale=0.2, enable_gqa=True
    )
    found = _attend_in_two(query, key, value, num_past, 0.2)
    assert found.dtype is dtype
    tolerance = 2e-6 if dtype is torch.float32 else 1e-2
    wanted = wanted[0].transpose(0, 1)
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("is_token_major", [False, True])
def test_halves_are_merged_by_their_weights(dim: int, is_token_major: bool) -> None:
    """As the GPU's kernels give them: heads first, or in the order of the query."""
    pytest.importorskip("triton")
    from penstock.engine.attention.halves_triton import merge

    torch.manual_seed(4)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_heads, num_tokens = 3, 37
    halves = []
    for scale in (1.0, 30.0):
        half = torch.randn(num_heads, num_tokens, dim, device=device)
        if is_token_major:
            half = half.transpose(0, 1).contiguous().transpose(0, 1)
        halves += [half, torch.randn(num_heads, num_tokens, device=device) * scale]
    past, past_sums, own, own_sums = halves
    past_sums[0, 0], own_sums[0, 0] = -200.0, 200.0
    past_sums[1, 5], own_sums[1, 5] = 3e4, -3e4
    shares = torch.stack([past_sums, own_sums]).double().softmax(0)[..., None]
    wanted = (past.double() * shares[0] + own.double() * shares[1]).transpose(0, 1)
    merged = merge(past, past_sums, own, own_sums)
    assert merged.is_contiguous()
    torch.testing.assert_close(merged.double(), wanted, rtol=2e-6, atol=2e-6)
