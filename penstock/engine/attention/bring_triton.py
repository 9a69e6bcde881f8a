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


def words_of(tensor: Any, num_bytes: int) -> Any:
    """The same memory as the largest words of which `num_bytes` are a multiple."""
    import torch

    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(words.get(gcd(_ALIGN, num_bytes), torch.int64))


def unpack_constants(form: LosslessFormat, layer_bytes: int) -> dict[str, int]:
    """What `unpack_blocks` must know at compile time. `layer_bytes`: of a raw block's layer."""
    return {
        "ALIGN": gcd(_ALIGN, layer_bytes),
        "LAYER_ROWS": layer_bytes // 2 // form.row_values,
        "ROWS": packed.rows_at_once(form.row_values, _ROW_VALUES),
        "ROW": form.row_values,
        **packed.form_constants(form),
    }


def copy_blocks(
    blocks: Any,
    words: Any,
    source_at: int,
    target_at: int | None,
    num_bytes: int,
    num_programs: int,
) -> None:
    """Copy `num_bytes` of each block from `source_at` on.

    They go to `target_at` in its place on the device; if that is None, to words [blocks, ...].
    Otherwise only the type of `words` counts (see `words_of`).
    """
    size = num_bytes // words.element_size()
    _copy_blocks[(num_programs,)](
        blocks,
        words,
        source_at,
        target_at or 0,
        num_programs,
        TO_DEVICE=target_at is not None,
        SIZE=size,
        STEP=min(_STEP_BYTES // words.element_size(), triton.next_power_of_2(size)),
        ALIGN=gcd(_ALIGN, num_bytes),
        num_warps=8,
    )


def unpack_blocks(
    blocks: Any, arrived: Any, layer_at: int, num_programs: int, constants: dict[str, int]
) -> None:
    """Unpack a layer of all blocks from arrived [blocks, bytes]. See `unpack_constants`."""
    _unpack_blocks[(num_programs,)](
        blocks,
        arrived,
        layer_at,
        num_programs,
        PACKED_LAYER=arrived.shape[1],
        num_warps=4,
        **constants,
    )
