"""The GPU's kernels: on a GPU where there is one, else in Triton's interpreter (see conftest)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("triton")

from penstock.engine.attention import triton as kernels
from penstock.engine.decode_plan import DecodePlan, PartRoom
from penstock.engine.table import Addresses

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
LAYERS = 2


def make(
    num_blocks: int, block_tokens: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A pool and as much of pinned DRAM, whose slots lie further apart."""
    shape = (num_blocks, LAYERS, 2, block_tokens, kv_heads, dim)
    pool = torch.randn(shape).to(dtype)
    size = pool[0].numel()
    padded = torch.zeros(num_blocks, size + 512, dtype=dtype)
    if DEVICE.type == "cuda":
        padded = padded.pin_memory()
    return pool.to(DEVICE), padded[:, :size].view(shape)


def make_tables(lengths: list[int], num_blocks: int, block_tokens: int) -> list[list[int]]:
    free = torch.randperm(num_blocks).tolist()
    return [[free.pop() for _ in range(-(-length // block_tokens))] for length in lengths]


def attend(
    query: Tensor,
    pool: Tensor,
    host: Tensor,
    tables: list[list[int]],
    lengths: list[int],
    layer: int,
    num_programs: int = 7,
) -> Tensor:
    block_tokens, kv_heads, dim = pool.shape[3:]
    addresses = Addresses(
        pool.data_ptr(),
        pool.stride(0) * pool.itemsize,
        host.data_ptr(),
        host.stride(0) * host.itemsize,
    )
    plan = DecodePlan(8, 64, block_tokens, kernels.PART_TOKENS, DEVICE)
    everything = np.concatenate([np.array(table) for table in tables])
    plan.fill(addresses.of(everything), [len(table) for table in tables], lengths)
    plan.send()
    room = PartRoom.make(plan.max_items, query.shape[1], dim, DEVICE)
    layer_bytes = layer * 2 * block_tokens * kv_heads * dim * pool.itemsize
    query = query.to(DEVICE)
    kernels.attend_wave(query, plan, room, layer_bytes, 0.2, kv_heads, block_tokens, num_programs)
    return kernels.merge_parts(query, plan, room)


def expected(query: Tensor, pool: Tensor, layer: int, table: list[int], length: int) -> Tensor:
    history = pool.cpu()[table, layer].double()
    keys = history[:, 0].flatten(0, 1)[:length].transpose(0, 1)
    values = history[:, 1].flatten(0, 1)[:length].transpose(0, 1)
    return scaled_dot_product_attention(
        query.double()[None, :, None], keys[None], values[None], scale=0.2, enable_gqa=True
    )[0, :, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_tokens"), [(9, 3, 64, 16), (8, 8, 80, 24), (32, 2, 128, 64)]
)
def test_it_is_attention(
    heads: int, kv_heads: int, dim: int, block_tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    lengths = [1, 15, 17, 255, 256, 257]
    pool, host = make(64, block_tokens, kv_heads, dim, dtype)
    tables = make_tables(lengths, 64, block_tokens)
    query = (3 * torch.randn(len(lengths), heads, dim)).to(dtype)
    for layer in range(LAYERS):
        found = attend(query, pool, host, tables, lengths, layer)
        assert found.dtype is dtype
        tolerance = 2e-5 if dtype is torch.float32 else 4e-3 if dtype is torch.float16 else 2e-2
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            wanted = expected(query[row], pool, layer, table, length)
            torch.testing.assert_close(
                found[row].double().cpu(), wanted, rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_neither_cold_blocks_nor_the_batch_change_a_bit(share: float) -> None:
    torch.manual_seed(1)
    pool, host = make(64, 16, 2, 32, torch.float32)
    query = torch.randn(3, 4, 32)
    lengths = [200, 77, 310]
    tables = make_tables(lengths, 64, 16)
    resident = attend(query, pool, host, tables, lengths, 1)
    alone = attend(query[2:], pool, host, tables[2:], lengths[2:], 1, num_programs=3)
    assert torch.equal(alone[0], resident[2])
    partly = pool.clone()
    for table in tables:
        for index, block in enumerate(table):
            if torch.rand(()) < share or share == 1:
                host[63 - block] = pool[block].cpu()
                partly[block] = float("nan")
                table[index] = ~(63 - block)
    assert torch.equal(attend(query, partly, host, tables, lengths, 1), resident)


def test_tokens_go_where_their_addresses_say_and_nowhere_else() -> None:
    torch.manual_seed(2)
    pool, _ = make(6, 16, 3, 80, torch.float32)
    before = pool.clone()
    key, value = (torch.randn(3, 5, 80).transpose(0, 1).to(DEVICE) for _ in range(2))
    token_bytes = 3 * 80 * 4
    places = [(4, 0), (4, 1), (0, 15), None, (5, 7)]
    addresses = [
        0 if place is None else pool[place[0]].data_ptr() + place[1] * token_bytes
        for place in places
    ]
    layer_bytes = pool.stride(1) * 4
    kernels.store_tokens(key, value, torch.tensor(addresses, device=DEVICE), layer_bytes, 16)
    for row, place in enumerate(places):
        if place is not None:
            before[place[0], 1, 0, place[1]] = key[row]
            before[place[0], 1, 1, place[1]] = value[row]
    assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_layer_is_brought_together_from_wherever_its_blocks_lie(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    pool, host = make(8, 24, 3, 40, dtype)
    host.copy_(torch.randn(host.shape).to(dtype))
    places = [3, ~5, 0, ~0, 7]
    addresses = Addresses(
        pool.data_ptr(),
        pool.stride(0) * pool.itemsize,
        host.data_ptr(),
        host.stride(0) * host.itemsize,
    )
    table = torch.from_numpy(addresses.of(np.array(places))).to(DEVICE)
    out = torch.empty(2, 5, 24, 3, 40, dtype=dtype, device=DEVICE)
    kernels.copy_layer(table, pool.stride(1) * pool.itemsize, out)
    for row, place in enumerate(places):
        source = pool[place] if place >= 0 else host[~place].to(DEVICE)
        assert torch.equal(out[:, row], source[1])


def test_a_plan_is_pulled_as_far_as_it_is_filled() -> None:
    staged = torch.arange(100, 100 + 4000)
    staged[:4] = torch.tensor([5, 700, 3, 2])  # items, blocks, fetched, waves
    if DEVICE.type == "cuda":
        staged = staged.pin_memory()
    sent = torch.zeros(4000, dtype=torch.int64, device=DEVICE)
    begins = (50, 500, 1000, 3000, 3500)
    kernels.pull_plan(staged.data_ptr(), sent, 40, begins)
    wanted = torch.zeros(4000, dtype=torch.int64)
    for begin, size in ((0, 40), (50, 5), (500, 5), (1000, 700), (3000, 3), (3500, 12)):
        wanted[begin : begin + size] = staged[begin : begin + size]
    assert torch.equal(sent.cpu(), wanted)


def test_numbers_are_put_where_they_are_wanted_and_not_beyond() -> None:
    numbers = torch.randint(1 << 40, (130,), device=DEVICE)
    box = torch.full((200,), -1)
    if DEVICE.type == "cuda":
        box = box.pin_memory()
    kept = torch.full((129,), -1, device=DEVICE)
    kernels.push_numbers(numbers, box.data_ptr(), kept[:128])
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert box.tolist() == numbers.tolist() + [-1] * 70
    assert kept.tolist() == [*numbers.tolist()[:128], -1]


def test_tokens_that_the_cpu_does_not_know_are_those_that_were_kept() -> None:
    ids = torch.randint(1 << 40, (300,), device=DEVICE)
    kept = torch.randint(1 << 40, (64,), device=DEVICE)
    wanted = ids.clone()
    for place, row in ((0, 63), (127, 0), (128, 5), (299, 5)):
        ids[place] = ~row
        wanted[place] = kept[row]
    kernels.take_kept(ids, kept)
    assert torch.equal(ids, wanted)
