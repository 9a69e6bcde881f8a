"""The lossless format (see `lossless_format`) on a GPU, and in Triton's interpreter.

Packing is part of gathering scattered blocks into a buffer, unpacking of scattering them. One
program packs one region of one block, in a fixed order: the bytes are the same as on a CPU.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.codecs.lossless_format import LosslessFormat

_PACKED_VALUES = 1024  # at once, by one program
_PACK_WARPS = 1
_UNPACKED_VALUES = 1024
_UNPACK_WARPS = 2


@triton.jit
def unpack_words(
    region,  # a pointer to bytes: of all rows, or of each one as [rows, 1]
    rows,  # [rows, 1]: the number of each row in its region
    is_row,  # [rows, 1]
    ROW: tl.constexpr,  # noqa: N803
    WORDS_PAD: tl.constexpr,  # noqa: N803
    REGION_ROWS: tl.constexpr,  # noqa: N803
    MAX_EXCEPTIONS: tl.constexpr,  # noqa: N803
):
    """The bits of some rows, two values in each int32 [rows, WORDS_PAD].

    A word's two values have their codes in one byte, so nothing is reshaped.
    """
    values: tl.constexpr = REGION_ROWS * ROW
    exponents_at: tl.constexpr = values + values // 2
    exceptions_at: tl.constexpr = exponents_at + 2 * REGION_ROWS
    words = tl.arange(0, WORDS_PAD)[None, :]
    inside = is_row & (words < ROW // 2)
    at = rows * (ROW // 2) + words
    plain = tl.load(region.to(tl.pointer_type(tl.int16)) + at, mask=inside, other=0).to(tl.int32)
    codes = tl.load(region + (values + at), mask=inside, other=0).to(tl.int32)
    largest = tl.load(region + (exponents_at + rows), mask=is_row, other=0).to(tl.int32)
    # Most tiles have exceptions, and a second read over the link would begin only after the first.
    before = tl.load(region + (exponents_at + REGION_ROWS + rows), mask=is_row, other=0)
    low, high = codes & 15, codes >> 4
    low_exponents = tl.where(low == 14, 0, (largest - low) & 0xFF)
    high_exponents = tl.where(high == 14, 0, (largest - high) & 0xFF)
    low_marks, high_marks = (low == 15).to(tl.int32), (high == 15).to(tl.int32)
    marks = low_marks + high_marks
    if tl.max(tl.max(marks, 1), 0) != 0:
        places = before.to(tl.int32) + tl.cumsum(marks, 1) - marks
        # A damaged count must not lead outside the region.
        last: tl.constexpr = MAX_EXCEPTIONS - 1
        exact = tl.load(
            region + (exceptions_at + tl.minimum(places, last)), mask=low == 15, other=0
        )
        low_exponents = tl.where(low == 15, exact.to(tl.int32), low_exponents)
        places += low_marks
        exact = tl.load(
            region + (exceptions_at + tl.minimum(places, last)), mask=high == 15, other=0
        )
        high_exponents = tl.where(high == 15, exact.to(tl.int32), high_exponents)
    low_half = ((plain & 0x80) << 8) | (low_exponents << 7) | (plain & 0x7F)
    high_half = ((plain & 0x8000) << 16) | (high_exponents << 23) | ((plain & 0x7F00) << 8)
    return low_half | high_half


@triton.jit
def _codes(below, exponents):
    return tl.where(exponents == 0, 14, tl.where(below < 14, below, 15))


@triton.jit(do_not_specialize_on_alignment=["blocks"])
def _pack(
    addresses,  # of each region in block 0
    strides,  # in bytes, from one block to the next
    blocks,
    buffer,  # bytes: [blocks, block_bytes]
    block_bytes,
    part_at,  # where this part begins in each block of the buffer
    header_bytes,
    region_bytes,
    ROW: tl.constexpr,  # noqa: N803
    WORDS_PAD: tl.constexpr,  # noqa: N803
    REGION_ROWS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    MAX_EXCEPTIONS: tl.constexpr,  # noqa: N803
    EXCEPTIONS_PAD: tl.constexpr,  # noqa: N803
    REGION_TAIL: tl.constexpr,  # noqa: N803
):
    index = tl.program_id(0).to(tl.int64)
    region = tl.program_id(1)
    values: tl.constexpr = REGION_ROWS * ROW
    exponents_at: tl.constexpr = values + values // 2
    exceptions_at: tl.constexpr = exponents_at + 2 * REGION_ROWS
    address = tl.load(addresses + region) + tl.load(blocks + index) * tl.load(strides + region)
    source = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 4)
    part = buffer + index * block_bytes + part_at
    target = tl.multiple_of(part + header_bytes + region * region_bytes, 16)
    exceptions = target + exceptions_at
    words = tl.arange(0, WORDS_PAD)[None, :]
    tail = tl.arange(0, EXCEPTIONS_PAD)
    tl.store(exceptions + tail, tl.zeros([EXCEPTIONS_PAD], tl.uint8), mask=tail < REGION_TAIL)
    tl.debug_barrier()  # exceptions are stored after the zeros, by other threads
    total = 0
    for first in range(0, REGION_ROWS, ROWS):
        rows = (first + tl.arange(0, ROWS))[:, None]
        is_row = rows < REGION_ROWS
        inside = is_row & (words < ROW // 2)
        at = rows * (ROW // 2) + words
        bits = tl.load(source + at, mask=inside, other=0)
        low_exponents, high_exponents = (bits >> 7) & 0xFF, (bits >> 23) & 0xFF
        largest = tl.max(tl.maximum(low_exponents, high_exponents), 1)[:, None]
        low = _codes(largest - low_exponents, low_exponents)
        high = _codes(largest - high_exponents, high_exponents)
        plain = (
            (bits & 0x7F) | ((bits >> 8) & 0x80) | ((bits >> 8) & 0x7F00) | ((bits >> 16) & 0x8000)
        )
        tl.store(target.to(tl.pointer_type(tl.int16)) + at, plain.to(tl.int16), mask=inside)
        tl.store(target + (values + at), (low | (high << 4)).to(tl.uint8), mask=inside)
        tl.store(target + (exponents_at + rows), largest.to(tl.uint8), mask=is_row)
        low_marks = (inside & (low == 15)).to(tl.int32)
        high_marks = (inside & (high == 15)).to(tl.int32)
        marks = low_marks + high_marks
        per_row = tl.sum(marks, 1)
        before = (total + tl.cumsum(per_row, 0) - per_row)[:, None]
        counts = tl.minimum(before, 255).to(tl.uint8)
        tl.store(target + (exponents_at + REGION_ROWS + rows), counts, mask=is_row)
        added = tl.sum(per_row, 0)
        if added != 0:
            places = before + tl.cumsum(marks, 1) - marks
            fits = (low_marks != 0) & (places < MAX_EXCEPTIONS)
            tl.store(exceptions + places, low_exponents.to(tl.uint8), mask=fits)
            places += low_marks
            fits = (high_marks != 0) & (places < MAX_EXCEPTIONS)
            tl.store(exceptions + places, high_exponents.to(tl.uint8), mask=fits)
        total += added
    tl.store(part.to(tl.pointer_type(tl.uint16)) + region, tl.minimum(total, 65535).to(tl.uint16))


@triton.jit(do_not_specialize_on_alignment=["blocks"])
def _unpack(
    addresses,
    strides,
    blocks,
    buffer,
    block_bytes,
    part_at,
    header_bytes,
    region_bytes,
    ROW: tl.constexpr,  # noqa: N803
    WORDS_PAD: tl.constexpr,  # noqa: N803
    REGION_ROWS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    MAX_EXCEPTIONS: tl.constexpr,  # noqa: N803
):
    index = tl.program_id(0).to(tl.int64)
    region = tl.program_id(1)
    address = tl.load(addresses + region) + tl.load(blocks + index) * tl.load(strides + region)
    target = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 4)
    packed = buffer + index * block_bytes + part_at + header_bytes + region * region_bytes
    packed = tl.multiple_of(packed, 16)
    words = tl.arange(0, WORDS_PAD)[None, :]
    rows = (tl.program_id(2) * ROWS + tl.arange(0, ROWS))[:, None]
    is_row = rows < REGION_ROWS
    bits = unpack_words(packed, rows, is_row, ROW, WORDS_PAD, REGION_ROWS, MAX_EXCEPTIONS)
    tl.store(target + (rows * (ROW // 2) + words), bits, mask=is_row & (words < ROW // 2))


def row_constants(form: LosslessFormat) -> dict[str, int]:
    """What `unpack_words` must know at compile time."""
    return {
        "ROW": form.row_values,
        "WORDS_PAD": triton.next_power_of_2(form.row_values // 2),
        "REGION_ROWS": form.region_rows,
        "MAX_EXCEPTIONS": form.max_exceptions,
    }


def pack_blocks(
    form: LosslessFormat, addresses: Any, strides: Any, blocks: Any, buffer: Any, part_at: int = 0
) -> None:
    """Gather and pack blocks into buffer [blocks, bytes], on the current stream.

    `addresses` and `strides` have one entry per region, `blocks` the blocks' numbers. A region that
    does not fit has more than `max_exceptions` in the header.
    """
    tail = form.region_bytes - form.exceptions_at
    _pack[(len(blocks), form.num_regions)](
        addresses,
        strides,
        blocks,
        buffer,
        buffer.stride(0),
        part_at,
        form.header_bytes,
        form.region_bytes,
        ROWS=_rows_at_once(form, _PACKED_VALUES),
        EXCEPTIONS_PAD=triton.next_power_of_2(tail),
        REGION_TAIL=tail,
        num_warps=_PACK_WARPS,
        **row_constants(form),
    )


def unpack_blocks(
    form: LosslessFormat, addresses: Any, strides: Any, blocks: Any, buffer: Any, part_at: int = 0
) -> None:
    """Unpack blocks from buffer [blocks, bytes] to where they belong, on the current stream."""
    rows = _rows_at_once(form, _UNPACKED_VALUES)
    _unpack[(len(blocks), form.num_regions, triton.cdiv(form.region_rows, rows))](
        addresses,
        strides,
        blocks,
        buffer,
        buffer.stride(0),
        part_at,
        form.header_bytes,
        form.region_bytes,
        ROWS=rows,
        num_warps=_UNPACK_WARPS,
        **row_constants(form),
    )


def _rows_at_once(form: LosslessFormat, num_values: int) -> int:
    most = max(1, num_values // triton.next_power_of_2(form.row_values))
    whole: int = triton.next_power_of_2(form.region_rows)
    return most if most < whole else whole
