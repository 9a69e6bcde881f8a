"""Attention on a GPU over blocks given by address, in GPU memory or in pinned DRAM.

Decode: each sequence is split into parts of `PART_TOKENS`, which are distributed over programs.
Each part keeps its largest score, its sum of weights and its weighted values; the parts are merged
at the end. The split depends only on a sequence's length, so the result is the same, bit for bit,
wherever its blocks are and whatever else is in the batch. All heads of a group share each read.

Kernels read everything that changes between steps from tensors at fixed addresses, because a
captured graph always replays with the same addresses.

Decode attends to cold blocks when they have been fetched, in waves (see `fetch_choice`): each wave
has some of the parts. Packed blocks (see `packed_triton`) are unpacked after they have arrived.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.codecs.lossless_format import LosslessFormat
from penstock.engine.attention import packed_triton as packed
from penstock.engine.attention.fp8_triton import fp8_mode, narrow, widen
from penstock.engine.attention.packed_triton import (
    WAVE_NUMBERS,
    are_packed,
    unpack_rows_of_layer,
    wave_blocks,
)
from penstock.engine.attention.rules import CAUSAL, LayerRules

PART_TOKENS = 256
_HEAD_BYTES = 256  # of a token's keys in one head, at most, in a whole tile
_MERGED_PARTS = 16
_LOG2_E = tl.constexpr(1.4426950408889634)


class DecodeCut(NamedTuple):
    """How the decode kernel is cut: measured by `benchmarks.decode_kernel`.

    More stages would prefetch little, as addresses are read first, and take registers: then fewer
    programs fit on a processor.
    """

    tile_tokens: int  # that a program reads at once
    num_warps: int
    num_stages: int
    programs_per_processor: int


_LARGE = DecodeCut(128, 4, 2, 3)
_SMALL = DecodeCut(64, 4, 2, 4)
_LARGE_BYTES = 3 * (74 << 10)  # shared memory of three programs with large tiles


@cache
def cut_for(device: torch.device) -> DecodeCut:
    if device.type != "cuda":
        return _LARGE
    properties: Any = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_multiprocessor", 0)
    return _LARGE if room >= _LARGE_BYTES else _SMALL


def _tile_tokens(cut: DecodeCut, dim: int, item_bytes: int) -> int:
    """Fewer for wide heads and for float32, or shared memory or registers would not suffice."""
    return cut.tile_tokens // max(1, dim * item_bytes // _HEAD_BYTES, item_bytes // 2)


@triton.jit
def soften(scores, CAP: tl.constexpr):  # noqa: N803
    """CAP * tanh(scores / CAP)."""
    power = tl.exp2(tl.abs(scores) * (-2.0 * _LOG2_E / CAP))
    softened = CAP * ((1.0 - power) / (1.0 + power))
    return tl.where(scores < 0, -softened, softened)


@triton.jit(do_not_specialize=["wave"])
def _attend_parts(
    query,  # [sequences, heads, DIM]
    table,  # addresses of blocks, all sequences in a row; ~n stands for block n in `fetched`
    starts,  # where each sequence begins in `table`
    lengths,
    item_sequences,  # the parts of all sequences, wave after wave
    item_parts,
    first_items,
    waves,
    wave,
    sums,  # [parts, heads, DIM], sequence after sequence
    largest,  # [parts, heads]
    totals,  # [parts, heads]
    layer_bytes,
    fetched,  # address of this layer of the wave's blocks; see `table`
    scale,
    num_programs,
    row_stride,
    head_stride,
    KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    GROUP_PAD: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    DIM_PAD: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    PART: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    ALIGN: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
    CAP: tl.constexpr,  # noqa: N803
):
    kind: tl.constexpr = query.dtype.element_ty
    stored: tl.constexpr = kind if FP8 == "" else tl.uint8
    item_bytes: tl.constexpr = stored.primitive_bitwidth // 8
    fetched_bytes: tl.constexpr = 2 * BLOCK_TOKENS * KV_HEADS * DIM * item_bytes
    members = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    is_member = members < GROUP
    is_dim = dims < DIM
    factor = scale if CAP > 0 else scale * _LOG2_E
    described = waves + wave * WAVE_NUMBERS
    first_of_wave = tl.load(described + 3)
    total_work = tl.load(described + 4) * KV_HEADS
    for work in range(tl.program_id(0), total_work, num_programs):
        item = first_of_wave + work // KV_HEADS
        head = work % KV_HEADS
        sequence = tl.load(item_sequences + item)
        part = tl.load(item_parts + item)
        place = tl.load(first_items + sequence) + part  # of the result, wherever the wave has it
        begin = part * PART
        end = tl.minimum(begin + PART, tl.load(lengths + sequence))
        if WINDOW:  # a part before the window has no tokens, and is not merged
            begin = tl.maximum(begin, tl.load(lengths + sequence) - WINDOW)
        places = table + tl.load(starts + sequence)
        mask = is_member[:, None] & is_dim[None, :]
        rows = (head * GROUP + members)[:, None] * head_stride + dims[None, :]
        q = tl.load(query + sequence * row_stride + rows, mask=mask, other=0.0)
        most = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PAD], tl.float32)
        values = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        for first in range(begin, end, TILE):
            tokens = first + tl.arange(0, TILE)
            inside = tokens < end
            address = tl.load(places + tokens // BLOCK_TOKENS, mask=inside, other=0)
            here = fetched + (-1 - address) * fetched_bytes
            keys = tl.where(address < 0, here, address + layer_bytes).to(tl.pointer_type(stored))
            # The compiler cannot know the alignment; without it, elements are read one by one.
            keys = tl.multiple_of(keys, [ALIGN])
            keys += (tokens % BLOCK_TOKENS * KV_HEADS + head) * DIM
            there = inside[:, None] & is_dim[None, :]
            k = tl.load(keys[:, None] + dims[None, :], mask=there, other=0)
            value_rows = keys + BLOCK_TOKENS * KV_HEADS * DIM
            v = tl.load(value_rows[:, None] + dims[None, :], mask=there, other=0)
            k, v = widen(k, kind, FP8), widen(v, kind, FP8)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
            if CAP > 0:
                scores = soften(scores, CAP) * _LOG2_E
            scores = tl.where(inside[None, :], scores, float("-inf"))
            new_most = tl.maximum(most, tl.max(scores, 1))
            shrink = tl.exp2(most - new_most)
            weights = tl.exp2(scores - new_most[:, None])
            total = total * shrink + tl.sum(weights, 1)
            values = values * shrink[:, None]
            values += tl.dot(weights.to(kind), v, input_precision=PRECISION)
            most = new_most
        at = place * (KV_HEADS * GROUP) + head * GROUP + members
        is_kept = is_member
        if WINDOW:
            is_kept = members < tl.where(begin < end, GROUP, 0)
            mask = is_kept[:, None] & is_dim[None, :]
        tl.store(sums + at[:, None] * DIM + dims[None, :], values, mask=mask)
        tl.store(largest + at, most, mask=is_kept)
        tl.store(totals + at, total, mask=is_kept)


@triton.jit
def _merge_parts(
    sums,
    largest,
    totals,
    first_items,
    lengths,
    out,  # [sequences, heads, DIM]
    sinks,  # [heads]; not read unless HAS_SINKS
    HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    DIM_PAD: tl.constexpr,  # noqa: N803
    PART: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
    HAS_SINKS: tl.constexpr,  # noqa: N803
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(first_items + sequence)
    num_parts = tl.cdiv(tl.load(lengths + sequence), PART)
    dims = tl.arange(0, DIM_PAD)
    is_dim = dims < DIM
    most = float("-inf")
    total = 0.0
    values = tl.zeros([DIM_PAD], tl.float32)
    if HAS_SINKS:
        most = tl.load(sinks + head).to(tl.float32) * _LOG2_E
        total = 1.0
    first_part = 0
    if WINDOW:
        first_part = tl.maximum(tl.load(lengths + sequence) - WINDOW, 0) // PART
    for start in range(first_part, num_parts, PARTS):
        parts = start + tl.arange(0, PARTS)
        inside = parts < num_parts
        at = (first + parts) * HEADS + head
        tops = tl.load(largest + at, mask=inside, other=float("-inf"))
        new_most = tl.maximum(most, tl.max(tops, 0))
        shares = tl.exp2(tops - new_most)
        shrink = tl.exp2(most - new_most)
        rows = tl.load(
            sums + at[:, None] * DIM + dims[None, :],
            mask=inside[:, None] & is_dim[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(shares * tl.load(totals + at, mask=inside, other=0.0), 0)
        values = values * shrink + tl.sum(shares[:, None] * rows, 0)
        most = new_most
    place = (sequence * HEADS + head) * DIM + dims
    tl.store(out + place, (values / total).to(out.dtype.element_ty), mask=is_dim)


@triton.jit(do_not_specialize_on_alignment=["addresses"])
def _store_tokens(
    key,  # [rows, kv_heads, DIM], both
    value,
    addresses,  # of each row's keys in the first layer; 0 if they are stored already
    key_row,
    key_head,
    value_row,
    value_head,
    layer_bytes,
    KV_HEADS: tl.constexpr,  # noqa: N803
    KV_HEADS_PAD: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    DIM_PAD: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    ALIGN: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    address = tl.load(addresses + row)
    heads = tl.arange(0, KV_HEADS_PAD)[:, None]
    dims = tl.arange(0, DIM_PAD)[None, :]
    mask = (heads < KV_HEADS) & (dims < DIM)
    stored: tl.constexpr = key.dtype.element_ty if FP8 == "" else tl.uint8
    if address != 0:
        first = tl.multiple_of((address + layer_bytes).to(tl.pointer_type(stored)), ALIGN)
        keys = first + heads * DIM + dims
        k = tl.load(key + row * key_row + heads * key_head + dims, mask=mask)
        v = tl.load(value + row * value_row + heads * value_head + dims, mask=mask)
        tl.store(keys, narrow(k, FP8), mask=mask)
        tl.store(keys + BLOCK_TOKENS * KV_HEADS * DIM, narrow(v, FP8), mask=mask)


# Blocks that are fetched ahead have a list of their own, which may be aligned otherwise.
@triton.jit(do_not_specialize=["wave"], do_not_specialize_on_alignment=["sources", "waves"])
def _fetch_layer(
    sources,  # addresses of blocks, wave after wave
    waves,
    wave,
    out,  # [blocks, SIZE]
    offset,  # where the layer begins in a block
    num_programs,
    IS_FIRST: tl.constexpr,  # noqa: N803
    HAS_WINDOW: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
    ALIGN: tl.constexpr,  # noqa: N803
):
    num_steps: tl.constexpr = (SIZE + STEP - 1) // STEP
    begin, end, first = wave_blocks(waves, wave, IS_FIRST, HAS_WINDOW)
    for work in range(begin * num_steps + tl.program_id(0), end * num_steps, num_programs):
        block = work // num_steps
        places = work % num_steps * STEP + tl.arange(0, STEP)
        inside = places < SIZE
        address = tl.load(sources + first + block) + offset
        source = tl.multiple_of(address.to(tl.pointer_type(out.dtype.element_ty)), ALIGN)
        copied = tl.load(source + places, mask=inside)
        tl.store(out + block * SIZE + places, copied, mask=inside)


# A layer with a window leaves out the first blocks of a table, which may then be aligned otherwise.
@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["table"])
def _copy_layer(
    table,
    out,  # [2, blocks, a layer's keys or values of a block]
    layer_bytes,
    packed_at,
    num_blocks,
    SIZE: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
    ALIGN: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    ROW: tl.constexpr,  # noqa: N803
    WORDS_PAD: tl.constexpr,  # noqa: N803
    REGION_ROWS: tl.constexpr,  # noqa: N803
    REGION_BYTES: tl.constexpr,  # noqa: N803
    MAX_EXCEPTIONS: tl.constexpr,  # noqa: N803
):
    kind: tl.constexpr = out.dtype.element_ty
    stored: tl.constexpr = kind if FP8 == "" else tl.uint8
    block = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    address = tl.load(table + block)
    source = (address + layer_bytes).to(tl.pointer_type(stored))
    source = tl.multiple_of(source, ALIGN)
    source += half * SIZE
    target = out + (half * num_blocks + block) * SIZE
    num_raw = SIZE
    if REGION_ROWS:
        num_raw = tl.where(are_packed(address), 0, SIZE)
        if num_raw == 0:
            rows: tl.constexpr = SIZE // ROW
            for first in range(0, rows, ROWS):
                unpack_rows_of_layer(
                    (address - 1 + packed_at).to(tl.pointer_type(tl.uint8)),
                    half * rows + first,
                    (half + 1) * rows,
                    (target + first * ROW).to(tl.pointer_type(tl.int32)),
                    ROWS,
                    ROW,
                    WORDS_PAD,
                    REGION_ROWS,
                    REGION_BYTES,
                    MAX_EXCEPTIONS,
                )
    for start in range(0, num_raw, STEP):
        places = start + tl.arange(0, STEP)
        inside = places < SIZE
        copied = tl.load(source + places, mask=inside)
        tl.store(target + places, widen(copied, kind, FP8), mask=inside)


@triton.jit
def _pull_part(source, target, begin, size, num_programs, WIDTH: tl.constexpr):  # noqa: N803
    for start in range(tl.program_id(0) * WIDTH, size, num_programs * WIDTH):
        places = start + tl.arange(0, WIDTH)
        inside = places < size
        numbers = tl.load(source + begin + places, mask=inside)
        tl.store(target + begin + places, numbers, mask=inside)


@triton.jit
def _pull_plan(
    staged,  # the plan's address in pinned DRAM
    sent,
    small_end,
    sequences,
    parts,
    table,
    fetched,
    waves,
    num_programs,
    WIDTH: tl.constexpr,  # noqa: N803
):
    source = staged.to(tl.pointer_type(tl.int64))
    num_items, num_blocks, num_fetched = tl.load(source), tl.load(source + 1), tl.load(source + 2)
    num_waves = tl.load(source + 3)
    _pull_part(source, sent, 0, small_end, num_programs, WIDTH)
    _pull_part(source, sent, sequences, num_items, num_programs, WIDTH)
    _pull_part(source, sent, parts, num_items, num_programs, WIDTH)
    _pull_part(source, sent, table, num_blocks, num_programs, WIDTH)
    _pull_part(source, sent, fetched, num_fetched, num_programs, WIDTH)
    _pull_part(source, sent, waves, num_waves * WAVE_NUMBERS, num_programs, WIDTH)


@triton.jit(
    do_not_specialize=["count", "num_kept"], do_not_specialize_on_alignment=["numbers", "target"]
)
def _push_numbers(numbers, target, count, kept, num_kept, WIDTH: tl.constexpr):  # noqa: N803
    places = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = places < count
    there = target.to(tl.pointer_type(tl.int64)) + places
    found = tl.load(numbers + places, mask=inside)
    tl.store(there, found, mask=inside)
    tl.store(kept + places, found, mask=inside & (places < num_kept))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["staged"])
def _pull_words(staged, words, count, WIDTH: tl.constexpr):  # noqa: N803
    places = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = places < count
    there = staged.to(tl.pointer_type(tl.int64)) + places
    tl.store(words + places, tl.load(there, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ids"])
def _take_kept(ids, kept, count, WIDTH: tl.constexpr):  # noqa: N803
    places = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = places < count
    found = tl.load(ids + places, mask=inside, other=0)
    is_kept = inside & (found < 0)
    tl.store(ids + places, tl.load(kept + (-1 - found), mask=is_kept, other=0), mask=is_kept)


def aligned_bytes(heads: Any, *, is_fp8: bool = False) -> int:
    """The alignment in bytes of every head's vector as it is stored; `heads` is [..., dim]."""
    return math.gcd(16, heads.shape[-1] * (1 if is_fp8 else heads.element_size()))


def attend_wave(
    query: Any,
    plan: Any,
    room: Any,
    layer_bytes: int,
    scale: float,
    kv_heads: int,
    block_tokens: int,
    num_programs: int,
    wave: int = 0,
    fetched: int = 0,
    rules: LayerRules = CAUSAL,
    *,
    is_fp8: bool = False,
) -> None:
    """Attend with query [sequences, heads, dim] to one wave of `plan` (see `DecodePlan`).

    The results are left in `room` (see `PartRoom`) for `merge_parts`. `fetched` is the address of
    the wave's blocks, `is_fp8` whether blocks hold e4m3 bytes. No tensor's content is read here.
    """
    heads, dim = query.shape[1:]
    group = heads // kv_heads
    dim_pad = triton.next_power_of_2(dim)
    cut = cut_for(query.device)
    _attend_parts[(num_programs,)](
        query,
        plan.table,
        plan.starts,
        plan.lengths,
        plan.item_sequences,
        plan.item_parts,
        plan.first_items,
        plan.waves,
        wave,
        room.sums,
        room.largest,
        room.totals,
        layer_bytes,
        fetched,
        scale,
        num_programs,
        query.stride(0),
        query.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK_TOKENS=block_tokens,
        PART=PART_TOKENS,
        TILE=_tile_tokens(cut, dim_pad, query.itemsize),
        ALIGN=aligned_bytes(query, is_fp8=is_fp8),
        PRECISION="ieee" if query.element_size() == 4 else "tf32",
        FP8=fp8_mode(query, is_fp8=is_fp8),
        WINDOW=rules.window,
        CAP=rules.cap,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )


def merge_parts(query: Any, plan: Any, room: Any, rules: LayerRules = CAUSAL) -> Any:
    """The attention of all waves together, in the query's shape. Sinks are added here, once."""
    heads, dim = query.shape[1:]
    out = query.new_empty(query.shape)
    _merge_parts[(query.shape[0], heads)](
        room.sums,
        room.largest,
        room.totals,
        plan.first_items,
        plan.lengths,
        out,
        out if rules.sinks is None else rules.sinks,
        HEADS=heads,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        PART=PART_TOKENS,
        PARTS=_MERGED_PARTS,
        WINDOW=rules.window,
        HAS_SINKS=rules.sinks is not None,
        num_warps=1,  # several would wait for each other longer than each works
    )
    return out


def store_tokens(
    key: Any,
    value: Any,
    addresses: Any,
    layer_bytes: int,
    block_tokens: int,
    *,
    is_fp8: bool = False,
) -> None:
    """Store each row's [kv_heads, dim] at its address; address 0 skips the row.

    `is_fp8`: as e4m3 bytes.
    """
    rows, kv_heads, dim = key.shape
    _store_tokens[(rows,)](
        key,
        value,
        addresses,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        layer_bytes,
        KV_HEADS=kv_heads,
        KV_HEADS_PAD=triton.next_power_of_2(kv_heads),
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        BLOCK_TOKENS=block_tokens,
        ALIGN=aligned_bytes(key, is_fp8=is_fp8),
        FP8=fp8_mode(key, is_fp8=is_fp8),
        num_warps=4,
    )


def fetch_layer(
    sources: Any,
    waves: Any,
    wave: int,
    offset: int,
    out: Any,
    num_programs: int,
    *,
    is_first: bool = False,
    has_window: bool = False,
) -> None:
    """Copy one layer of a wave's blocks to out [blocks, ...], from `offset` in each block.

    `is_first`: one of the layers that some of the wave's blocks have there already. `has_window`:
    one of the layers that do not read all of them.
    """
    size = out[0].numel()
    _fetch_layer[(num_programs,)](
        sources,
        waves,
        wave,
        out,
        offset,
        num_programs,
        IS_FIRST=is_first,
        HAS_WINDOW=has_window,
        SIZE=size,
        STEP=min(32768 // out.itemsize, triton.next_power_of_2(size)),
        ALIGN=aligned_bytes(out),
        num_warps=8,
    )


def copy_layer(
    table: Any,
    layer_bytes: int,
    out: Any,
    host_form: LosslessFormat | None = None,
    *,
    is_fp8: bool = False,
) -> None:
    """Gather one layer of the blocks into out [2, blocks, block_tokens, kv_heads, dim].

    Each byte of a cold block crosses the link once. Packed ones are unpacked. `is_fp8`: blocks hold
    e4m3 bytes, which are widened.
    """
    num_blocks = out.shape[1]
    _copy_layer[(num_blocks, 2)](
        table,
        out,
        layer_bytes,
        _packed_at(host_form, layer_bytes),
        num_blocks,
        SIZE=out[0, 0].numel(),
        STEP=2048,
        ALIGN=aligned_bytes(out, is_fp8=is_fp8),
        FP8=fp8_mode(out, is_fp8=is_fp8),
        ROWS=packed.rows_at_once(out.shape[-1]),
        ROW=out.shape[-1],
        num_warps=8,
        **packed.form_constants(host_form),
    )


def _packed_at(form: LosslessFormat | None, layer_bytes: int) -> int:
    return 0 if form is None else packed.packed_at(form, layer_bytes)


def pull_plan(staged: int, sent: Any, small_end: int, begins: Any) -> None:
    """Read the filled part of a step's plan (see `DecodePlan`) from pinned DRAM.

    A kernel does it because a copy would wait for running loads: a GPU's copy engines take turns.
    """
    num_programs = 32
    _pull_plan[(num_programs,)](staged, sent, small_end, *begins, num_programs, WIDTH=256)


def pull_words(staged: int, words: Any) -> None:
    """Read 64-bit words from pinned DRAM without the copy engines, as many as `words` has."""
    count, width = words.numel(), 256
    _pull_words[(triton.cdiv(count, width),)](staged, words, count, WIDTH=width)


def push_numbers(numbers: Any, target: int, kept: Any) -> None:
    """Write 64-bit numbers to pinned DRAM without the copy engines, and the first ones to `kept`,
    as many as it has room for."""
    count, width = numbers.numel(), 128
    grid = (triton.cdiv(count, width),)
    _push_numbers[grid](numbers, target, count, kept, kept.numel(), WIDTH=width)


def take_kept(ids: Any, kept: Any) -> None:
    """Replace each `~n` below zero by the n-th number in `kept`."""
    count, width = ids.numel(), 128
    _take_kept[(triton.cdiv(count, width),)](ids, kept, count, WIDTH=width)
