"""Unpacks layers of blocks (see `penstock.codecs.lossless_format`) on a GPU.

Decode unpacks what has been fetched to the device; the attention of prompts reads packed blocks
where they are, in HOST.

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

# How much one program unpacks at a time: from HOST, where all of a tile's bytes cross the link
# together, so larger tiles hide more of its latency; and from the device.
_TILE_VALUES = 8192
_ARRIVED_VALUES = 2048
_NUM_WARPS = 4
WAVE_NUMBERS = tl.constexpr(6)  # that describe a wave; see `DecodePlan`


@triton.jit
def are_packed(addresses):
    """Which addresses are those of packed blocks. False for the numbers of fetched blocks."""
    return (addresses > 0) & ((addresses & 1) != 0)


@triton.jit
def unpack_rows_of_layer(
    layer,  # a pointer to bytes: the layer's first region
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
    # The compiler cannot know the alignment; without it, bytes are read one by one.
    regions = tl.multiple_of(layer + rows // REGION_ROWS * REGION_BYTES, [16])
    numbers = (rows % REGION_ROWS)[:, None]
    found = unpack_words(
        regions[:, None], numbers, is_row[:, None], ROW, WORDS_PAD, REGION_ROWS, MAX_EXCEPTIONS
    )
    mask = is_row[:, None] & (words < ROW // 2)[None, :]
    tl.store(target + places[:, None] * (ROW // 2) + words[None, :], found, mask=mask)


@triton.jit
def wave_blocks(waves, wave, IS_FIRST: tl.constexpr, HAS_WINDOW: tl.constexpr):  # noqa: N803
    """The first block of a wave to fetch, the last, and the wave's place in the list of all."""
    described = waves + wave * WAVE_NUMBERS
    begin = tl.load(described + 2) if IS_FIRST else 0
    end = tl.load(described + 5) if HAS_WINDOW else tl.load(described + 1)
    return begin, end, tl.load(described)


@triton.jit(do_not_specialize=["wave"], do_not_specialize_on_alignment=["waves"])
def _unpack_layer(
    arrived,  # bytes: [blocks, PACKED_LAYER]
    waves,
    wave,
    out,  # int32: [blocks, LAYER_ROWS, ROW / 2]
    num_programs,
    IS_FIRST: tl.constexpr,  # noqa: N803
    HAS_WINDOW: tl.constexpr,  # noqa: N803
    PACKED_LAYER: tl.constexpr,  # noqa: N803
    LAYER_ROWS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    ROW: tl.constexpr,  # noqa: N803
    WORDS_PAD: tl.constexpr,  # noqa: N803
    REGION_ROWS: tl.constexpr,  # noqa: N803
    REGION_BYTES: tl.constexpr,  # noqa: N803
    MAX_EXCEPTIONS: tl.constexpr,  # noqa: N803
):
    num_steps: tl.constexpr = (LAYER_ROWS + ROWS - 1) // ROWS
    begin, end, _ = wave_blocks(waves, wave, IS_FIRST, HAS_WINDOW)
    for work in range(begin * num_steps + tl.program_id(0), end * num_steps, num_programs):
        block = work // num_steps
        row = work % num_steps * ROWS
        unpack_rows_of_layer(
            arrived + block * PACKED_LAYER,
            row,
            LAYER_ROWS,
            out + block * (LAYER_ROWS * (ROW // 2)) + row * (ROW // 2),
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


def rows_at_once(row_values: int, num_values: int = _TILE_VALUES) -> int:
    """How many rows one program unpacks at a time."""
    rows: int = num_values // triton.next_power_of_2(row_values)
    return rows


def packed_layer_bytes(form: LosslessFormat, layer_bytes: int) -> int:
    """The size of a layer in a packed block; `layer_bytes`: in a raw one."""
    return layer_bytes // (form.region_values * VALUE_BYTES) * form.region_bytes


def unpack_layer(
    arrived: Any,
    waves: Any,
    wave: int,
    out: Any,
    num_programs: int,
    form: LosslessFormat,
    *,
    is_first: bool = False,
    has_window: bool = False,
) -> None:
    """Unpack a wave's blocks from arrived [blocks, bytes] to out [blocks, ...] (`fetch_layer`)."""
    _unpack_layer[(num_programs,)](
        arrived,
        waves,
        wave,
        as_words(out),
        num_programs,
        IS_FIRST=is_first,
        HAS_WINDOW=has_window,
        PACKED_LAYER=arrived.shape[1],
        LAYER_ROWS=out[0].numel() // form.row_values,
        ROWS=rows_at_once(form.row_values, _ARRIVED_VALUES),
        ROW=form.row_values,
        num_warps=_NUM_WARPS,
        **form_constants(form),
    )


def as_words(values: Any) -> Any:
    """The same memory as int32, two values in each."""
    import torch

    return values.view(torch.int32)
