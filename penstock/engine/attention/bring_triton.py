"""Copies one layer of blocks from pinned DRAM to where they belong on the device.

Packed blocks (see `packed_triton`) arrive in a buffer and are unpacked from there: a kernel that
unpacks what it reads over the link waits for it several times. The list of blocks is a tensor at a
fixed address, because a captured graph always replays with the same addresses. It begins with the
number of blocks; then follow, for each, its address in DRAM and that of its place on the device.
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
_ROW_VALUES = 2048  # unpacked at a time
_ALIGN = 16


@triton.jit
def _copy_blocks(
    blocks,
    arrived,  # [blocks, SIZE]; if TO_DEVICE, only its type counts: that of the words to copy
    source_at,  # where the layer begins in a block, in bytes
    target_at,
    num_programs,
    TO_DEVICE: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
    ALIGN: tl.constexpr,  # noqa: N803
):
    num_steps: tl.constexpr = (SIZE + STEP - 1) // STEP
    pointer: tl.constexpr = tl.pointer_type(arrived.dtype.element_ty)
    for work in range(tl.program_id(0), tl.load(blocks) * num_steps, num_programs):
        block = work // num_steps
        places = work % num_steps * STEP + tl.arange(0, STEP)
        inside = places < SIZE
        source = tl.multiple_of((tl.load(blocks + 1 + 2 * block) + source_at).to(pointer), ALIGN)
        target = arrived + block * SIZE
        if TO_DEVICE:
            there = tl.load(blocks + 2 + 2 * block) + target_at
            target = tl.multiple_of(there.to(pointer), ALIGN)
        tl.store(target + places, tl.load(source + places, mask=inside), mask=inside)


@triton.jit
def _unpack_blocks(
    blocks,
    arrived,  # bytes: [blocks, PACKED_LAYER]
    layer_at,
    num_programs,
    PACKED_LAYER: tl.constexpr,  # noqa: N803
    ALIGN: tl.constexpr,  # noqa: N803
    LAYER_ROWS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    ROW: tl.constexpr,  # noqa: N803
    WORDS_PAD: tl.constexpr,  # noqa: N803
    REGION_ROWS: tl.constexpr,  # noqa: N803
    REGION_BYTES: tl.constexpr,  # noqa: N803
    MAX_EXCEPTIONS: tl.constexpr,  # noqa: N803
):
    num_steps: tl.constexpr = (LAYER_ROWS + ROWS - 1) // ROWS
    for work in range(tl.program_id(0), tl.load(blocks) * num_steps, num_programs):
        block = work // num_steps
        row = work % num_steps * ROWS
        target = (tl.load(blocks + 2 + 2 * block) + layer_at).to(tl.pointer_type(tl.int32))
        unpack_rows_of_layer(
            arrived + block * PACKED_LAYER,
            row,
            LAYER_ROWS,
            tl.multiple_of(target, ALIGN) + row * (ROW // 2),
            ROWS,
            ROW,
            WORDS_PAD,
            REGION_ROWS,
            REGION_BYTES,
            MAX_EXCEPTIONS,
        )


def bring_raw(blocks: Any, layer: int, layer_bytes: int, num_programs: int) -> None:
    """Copy one layer of all `blocks`. `layer_bytes`: its size in a block."""
    align = gcd(_ALIGN, layer_bytes)
    words = blocks.view(_word(align))
    at = layer * layer_bytes
    _copy(blocks, words, at, at, num_programs, layer_bytes, align, to_device=True)


def bring_packed(
    blocks: Any,
    arrived: Any,
    layer: int,
    layer_bytes: int,
    num_programs: int,
    num_unpacking: int,
    form: LosslessFormat,
) -> None:
    """Copy one layer of all `blocks` to arrived [blocks, bytes], and unpack it from there.

    `layer_bytes`: its size in a raw block. `num_unpacking`: programs that unpack.
    """
    at = layer * layer_bytes
    # The address of a packed block is odd.
    source_at = packed.packed_at(form, at) - 1
    words = arrived.view(_word(8))
    _copy(blocks, words, source_at, 0, num_programs, arrived.shape[1], 8, to_device=False)
    _unpack_blocks[(num_unpacking,)](
        blocks,
        arrived,
        at,
        num_unpacking,
        PACKED_LAYER=arrived.shape[1],
        ALIGN=gcd(_ALIGN, layer_bytes),
        LAYER_ROWS=layer_bytes // 2 // form.row_values,
        ROWS=packed.rows_at_once(form.row_values, _ROW_VALUES),
        ROW=form.row_values,
        num_warps=4,
        **packed.form_constants(form),
    )


def _copy(
    blocks: Any,
    words: Any,
    source_at: int,
    target_at: int,
    num_programs: int,
    num_bytes: int,
    align: int,
    *,
    to_device: bool,
) -> None:
    size = num_bytes // words.element_size()
    _copy_blocks[(num_programs,)](
        blocks,
        words,
        source_at,
        target_at,
        num_programs,
        TO_DEVICE=to_device,
        SIZE=size,
        STEP=min(_STEP_BYTES // words.element_size(), triton.next_power_of_2(size)),
        ALIGN=align,
        num_warps=8,
    )


def _word(align: int) -> Any:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(align, torch.int64)
