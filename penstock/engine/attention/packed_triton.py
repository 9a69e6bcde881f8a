"""Reads packed blocks of HOST (see `penstock.codecs.lossless_format`) by their addresses, on a GPU.

The regions of a layer lie next to each other in a packed block: first the keys', then the values'.
So rows are numbered through the layer, and a row is the vector of one token and head. The address
of a packed block is odd (see `penstock.engine.table`).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.codecs.lossless_format import VALUE_BYTES, LosslessFormat
from penstock.codecs.lossless_triton import row_constants, unpack_words

# How much one program unpacks at a time. All of a tile's bytes cross the link together, so larger
# tiles hide more of its latency; registers are the limit.
_TILE_VALUES = 8192
_NUM_WARPS = 4


@triton.jit
def are_packed(addresses):
    """Which addresses are those of packed blocks. False for the numbers of fetched blocks."""
    return (addresses > 0) & ((addresses & 1) != 0)


@triton.jit
def _read_rows(
    layer,  # the packed blocks' addresses, moved to the layer's first region; one, or one per row
    rows,  # int32, numbered through the layer
    is_row,
    ROW: tl.constexpr,  # noqa: N803
    WORDS_PAD: tl.constexpr,  # noqa: N803
    REGION_ROWS: tl.constexpr,  # noqa: N803
    REGION_BYTES: tl.constexpr,  # noqa: N803
    MAX_EXCEPTIONS: tl.constexpr,  # noqa: N803
):
    """Two values in each int32 [rows, WORDS_PAD]."""
    regions = (layer - 1) + rows // REGION_ROWS * REGION_BYTES
    # The compiler cannot know the alignment; without it, bytes are read one by one.
    regions = tl.multiple_of(regions.to(tl.pointer_type(tl.uint8)), [16])
    numbers = (rows % REGION_ROWS)[:, None]
    return unpack_words(
        regions[:, None], numbers, is_row[:, None], ROW, WORDS_PAD, REGION_ROWS, MAX_EXCEPTIONS
    )


@triton.jit
def row_of_room(
    tokens,  # counted from the beginning of a part
    PART: tl.constexpr,  # noqa: N803
    HALF_ROWS: tl.constexpr,  # noqa: N803
):
    """Where this program unpacks the keys of tokens to; their values are HALF_ROWS later.

    HALF_ROWS is the distance of keys and values in a raw block, so that the attention kernel can
    find both in the same way, wherever a block is.
    """
    row = tl.program_id(0) * PART + tokens.to(tl.int32)
    return row // HALF_ROWS * (2 * HALF_ROWS) + row % HALF_ROWS


@triton.jit
def unpack_tokens(
    places,  # addresses of a sequence's blocks
    begin,
    end,
    head,
    packed_at,  # where the layer's first region begins in a packed block
    room,  # int32: [rows, ROW / 2], two values in each (see `row_of_room`)
    PART: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    ROW: tl.constexpr,  # noqa: N803
    WORDS_PAD: tl.constexpr,  # noqa: N803
    REGION_ROWS: tl.constexpr,  # noqa: N803
    REGION_BYTES: tl.constexpr,  # noqa: N803
    MAX_EXCEPTIONS: tl.constexpr,  # noqa: N803
):
    """Unpack one head's keys and values of the tokens that are in packed blocks."""
    both = tl.arange(0, 2 * TILE)
    half_rows: tl.constexpr = BLOCK_TOKENS * KV_HEADS
    from_half = both // TILE * half_rows  # keys, then values
    words = tl.arange(0, WORDS_PAD)
    for first in range(begin, end, TILE):
        tokens = first + both % TILE
        address = tl.load(places + tokens // BLOCK_TOKENS, mask=tokens < end, other=0)
        is_row = are_packed(address)
        if tl.max(is_row.to(tl.int32), 0) != 0:
            rows = tokens % BLOCK_TOKENS * KV_HEADS + head
            found = _read_rows(
                address + packed_at,
                rows.to(tl.int32) + from_half,
                is_row,
                ROW,
                WORDS_PAD,
                REGION_ROWS,
                REGION_BYTES,
                MAX_EXCEPTIONS,
            )
            there = room + (row_of_room(tokens - begin, PART, half_rows) + from_half) * (ROW // 2)
            mask = is_row[:, None] & (words < ROW // 2)[None, :]
            tl.store(there[:, None] + words[None, :], found, mask=mask)


@triton.jit
def unpack_rows_of_layer(
    layer,
    begin,  # the first row
    end,
    target,  # int32: where the values of row `begin` belong
    ROWS: tl.constexpr,  # noqa: N803
    ROW: tl.constexpr,  # noqa: N803
    WORDS_PAD: tl.constexpr,  # noqa: N803
    REGION_ROWS: tl.constexpr,  # noqa: N803
    REGION_BYTES: tl.constexpr,  # noqa: N803
    MAX_EXCEPTIONS: tl.constexpr,  # noqa: N803
):
    """Unpack up to ROWS neighboring rows of one block."""
    places = tl.arange(0, ROWS)
    words = tl.arange(0, WORDS_PAD)
    rows = (begin + places).to(tl.int32)
    is_row = rows < end
    found = _read_rows(
        layer, rows, is_row, ROW, WORDS_PAD, REGION_ROWS, REGION_BYTES, MAX_EXCEPTIONS
    )
    mask = is_row[:, None] & (words < ROW // 2)[None, :]
    tl.store(target + places[:, None] * (ROW // 2) + words[None, :], found, mask=mask)


@triton.jit
def _fetch_packed_layer(
    sources,  # addresses of blocks
    first,  # the first block to fetch; those before it were fetched already
    num_sources,
    out,  # int32: [blocks, LAYER_ROWS, ROW / 2]
    packed_at,
    num_programs,
    LAYER_ROWS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    ROW: tl.constexpr,  # noqa: N803
    WORDS_PAD: tl.constexpr,  # noqa: N803
    REGION_ROWS: tl.constexpr,  # noqa: N803
    REGION_BYTES: tl.constexpr,  # noqa: N803
    MAX_EXCEPTIONS: tl.constexpr,  # noqa: N803
):
    num_steps: tl.constexpr = (LAYER_ROWS + ROWS - 1) // ROWS
    size: tl.constexpr = LAYER_ROWS * (ROW // 2)
    begin = tl.load(first) * num_steps
    end = tl.load(num_sources) * num_steps
    for work in range(begin + tl.program_id(0), end, num_programs):
        block = work // num_steps
        row = work % num_steps * ROWS
        unpack_rows_of_layer(
            tl.load(sources + block) + packed_at,
            row,
            LAYER_ROWS,
            out + block * size + row * (ROW // 2),
            ROWS,
            ROW,
            WORDS_PAD,
            REGION_ROWS,
            REGION_BYTES,
            MAX_EXCEPTIONS,
        )


def packed_at(form: LosslessFormat, layer_bytes: int) -> int:
    """Where a layer's first region begins in a packed block; `layer_bytes`: in a raw one."""
    return form.region_at(layer_bytes // (form.region_values * VALUE_BYTES))


def form_constants(form: LosslessFormat | None) -> dict[str, int]:
    """What kernels must know at compile time. REGION_ROWS is 0 if no block is packed."""
    if form is None:
        return dict.fromkeys(("WORDS_PAD", "REGION_ROWS", "REGION_BYTES", "MAX_EXCEPTIONS"), 0)
    constants = {**row_constants(form), "REGION_BYTES": form.region_bytes}
    del constants["ROW"]  # kernels of attention know it as the head's size
    return constants


def rows_at_once(row_values: int) -> int:
    """How many rows one program unpacks at a time."""
    rows: int = _TILE_VALUES // triton.next_power_of_2(row_values)
    return rows


def make_room(num_programs: int, part_tokens: int, half_rows: int, like: Any) -> Any:
    """Room for one part's unpacked keys and values per program (see `row_of_room`).

    `half_rows`: the number of rows of a layer's keys in a block; `like` is [..., dim].
    """
    num_rows = 2 * half_rows * triton.cdiv(num_programs * part_tokens, half_rows)
    return like.new_empty((num_rows, like.shape[-1]))


def fetch_packed_layer(
    sources: Any,
    first: Any,
    num_sources: Any,
    layer_bytes: int,
    out: Any,
    num_programs: int,
    form: LosslessFormat,
) -> None:
    """Unpack one layer of packed blocks; else the same as `fetch_layer`."""
    _fetch_packed_layer[(num_programs,)](
        sources,
        first,
        num_sources,
        as_words(out),
        packed_at(form, layer_bytes),
        num_programs,
        LAYER_ROWS=out[0].numel() // form.row_values,
        ROWS=rows_at_once(form.row_values),
        ROW=form.row_values,
        num_warps=_NUM_WARPS,
        **form_constants(form),
    )


def as_words(values: Any) -> Any:
    """The same memory as int32, two values in each."""
    import torch

    return values.view(torch.int32)
