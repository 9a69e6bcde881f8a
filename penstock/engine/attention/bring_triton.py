"""Copies one layer of blocks from pinned DRAM to where they belong on the device.

Packed blocks (see `packed_triton`) are unpacked on the way: each byte crosses the link once and is
never stored in between. The list of blocks is a tensor at a fixed address, because a captured graph
always replays with the same addresses.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import triton
import triton.language as tl

from penstock.codecs.lossless_format import LosslessFormat
from penstock.engine.attention import packed_triton as packed
from penstock.engine.attention.packed_triton import unpack_rows_of_layer

_STEP_BYTES = 32768
_ROW_VALUES = 8192  # unpacked at a time: larger tiles hide more of the link's latency
_ALIGN = 16


@triton.jit
def _bring_layer(
    blocks,  # how many; then of each its address in DRAM, and that of its place on the device
    like,  # only its type counts: that of the words in which raw blocks are copied
    layer_at,  # where the layer begins in a block, in bytes
    packed_at,  # and in a packed one
    num_programs,
    SIZE: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
    ALIGN: tl.constexpr,  # noqa: N803
    LAYER_ROWS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    ROW: tl.constexpr,  # noqa: N803
    WORDS_PAD: tl.constexpr,  # noqa: N803
    REGION_ROWS: tl.constexpr,  # noqa: N803
    REGION_BYTES: tl.constexpr,  # noqa: N803
    MAX_EXCEPTIONS: tl.constexpr,  # noqa: N803
):
    length: tl.constexpr = LAYER_ROWS if REGION_ROWS else SIZE
    stride: tl.constexpr = ROWS if REGION_ROWS else STEP
    num_steps: tl.constexpr = (length + stride - 1) // stride
    for work in range(tl.program_id(0), tl.load(blocks) * num_steps, num_programs):
        block = work // num_steps
        first = work % num_steps * stride
        source = tl.load(blocks + 1 + 2 * block)
        target = tl.load(blocks + 2 + 2 * block) + layer_at
        if REGION_ROWS:
            values = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), ALIGN)
            unpack_rows_of_layer(
                (source - 1 + packed_at).to(tl.pointer_type(tl.uint8)),  # its address is odd
                first,
                LAYER_ROWS,
                values + first * (ROW // 2),
                ROWS,
                ROW,
                WORDS_PAD,
                REGION_ROWS,
                REGION_BYTES,
                MAX_EXCEPTIONS,
            )
        else:
            word: tl.constexpr = like.dtype.element_ty
            here = tl.multiple_of((source + layer_at).to(tl.pointer_type(word)), ALIGN)
            there = tl.multiple_of(target.to(tl.pointer_type(word)), ALIGN)
            places = first + tl.arange(0, STEP)
            inside = places < SIZE
            tl.store(there + places, tl.load(here + places, mask=inside), mask=inside)


def bring_layer(
    blocks: Any,
    layer: int,
    layer_bytes: int,
    num_programs: int,
    form: LosslessFormat | None = None,
) -> None:
    """Copy one layer of all `blocks` (see `bringing`). `layer_bytes`: of a raw block's layer.

    `form`: of the blocks in DRAM, if they are packed.
    """
    align = gcd(_ALIGN, layer_bytes)
    at = layer * layer_bytes
    like = blocks.view(_word(align))
    word_bytes = like.element_size()
    size = layer_bytes // word_bytes
    row = 0 if form is None else form.row_values
    _bring_layer[(num_programs,)](
        blocks,
        like,
        at,
        0 if form is None else packed.packed_at(form, at),
        num_programs,
        SIZE=size,
        STEP=min(_STEP_BYTES // word_bytes, triton.next_power_of_2(size)),
        ALIGN=align,
        LAYER_ROWS=layer_bytes // 2 // row if row else 0,
        ROWS=packed.rows_at_once(row, _ROW_VALUES) if row else 0,
        ROW=row,
        num_warps=8,
        **packed.form_constants(form),
    )


def _word(align: int) -> Any:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(align, torch.int64)
