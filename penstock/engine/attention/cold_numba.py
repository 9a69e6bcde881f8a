"""Partial decode attention over whole blocks in DRAM, for `penstock.engine.cold_threads`.

The result of a run of blocks has the form of the GPU's parts (see `triton`): per query head the
largest score, the sum of weights and the weighted values, in float32, with scores in base 2. It
depends on the run alone: one thread computes it, in the order of the blocks.

A block's keys and values of one layer lie in one piece, which is read from its beginning to its end
and widened to float32 in the processor's cache. All query heads of a KV head share what was read.
Compiled by numba for a model's shape at first use, then cached on disk as part of the loop in
`cold_serving`, and only there: what is cached here would not be compiled again if `cold_vectors`
changed.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import carray  # type: ignore[attr-defined]

from penstock.engine.attention.cold_vectors import unpack_16, unpack_64

# Sums may be reordered, else nothing is vectorised; infinities must keep their meaning.
FAST = {"contract", "reassoc", "nsz", "arcp", "nnan"}


@numba.extending.intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    """Convert an address to a pointer, for `carray`."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], numba.core.cgutils.voidptr_t)

    return numba.types.voidptr(address), generate


@numba.njit(fastmath={"contract", "nsz"}, inline="always")
def _exp2(x: Any) -> Any:
    """2 ** x for x <= 0, to the last bits of a float32, and vectorisable."""
    x = max(x, np.float32(-126.0))
    n = np.floor(x + np.float32(0.5))
    x = x - n
    p = np.float32(1.535336188319500e-4)
    p = p * x + np.float32(1.339887440266574e-3)
    p = p * x + np.float32(9.618437357674640e-3)
    p = p * x + np.float32(5.550332471162809e-2)
    p = p * x + np.float32(2.402264791363012e-1)
    p = p * x + np.float32(6.931472028550421e-1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23))
    return (p * x + np.float32(1)) * power.view(np.float32)


@numba.njit(fastmath=FAST, nogil=True)
def _widen(narrow: Any, wide: Any) -> None:
    """The bits of a bfloat16 are the upper half of a float32."""
    for x in range(len(wide)):
        wide[x] = np.uint32(narrow[x]) << np.uint32(16)


@numba.njit(nogil=True)
def _unpack(region: Any, form: Any, wide: Any) -> None:
    """Unpack a whole region (see `penstock.codecs.lossless_format`) to the bits of float32."""
    _, _, row_values, region_rows, max_exceptions = form
    region_values = row_values * region_rows
    half = row_values // 2
    codes = region[region_values : region_values + region_values // 2]
    exponents_at = region_values + region_values // 2
    exceptions = region[exponents_at + 2 * region_rows :]
    plain_at = region.ctypes.data
    out_at = wide.ctypes.data
    for row in range(region_rows):
        pairs = codes[row * half : (row + 1) * half]
        out = wide[row * row_values : (row + 1) * row_values]
        largest = int(region[exponents_at + row])
        exceptions_here = 0
        x = 0
        while x < row_values:
            at = row * row_values + x
            codes_at = plain_at + region_values + at // 2
            if x + 64 <= row_values:
                exceptions_here |= unpack_64(plain_at + at, codes_at, largest, out_at + 4 * at)
                x += 64
            else:
                exceptions_here |= unpack_16(plain_at + at, codes_at, largest, out_at + 4 * at)
                x += 16
        if exceptions_here:
            place = int(region[exponents_at + region_rows + row])
            for x in range(row_values):
                if (pairs[x // 2] >> np.uint8(4 * (x % 2))) & np.uint8(15) == 15:
                    # A damaged count must not lead outside the region.
                    e = np.uint32(exceptions[min(place, max_exceptions - 1)])
                    out[x] = (out[x] & np.uint32(0x807FFFFF)) | e << np.uint32(23)
                    place += 1


@numba.njit(nogil=True)
def _read(place: int, layer: int, item_bytes: int, form: Any, wide: Any) -> None:
    """Read a layer of the block at an address, which is odd if the block is packed."""
    if place & 1:
        header_bytes, region_bytes, row_values, region_rows, _ = form
        size = row_values * region_rows
        num_regions = len(wide) // size
        first = place - 1 + header_bytes + layer * num_regions * region_bytes
        for number in range(num_regions):
            address = first + number * region_bytes
            region = carray(_pointer(address), (region_bytes,), np.uint8)  # type: ignore[call-arg]
            _unpack(region, form, wide[number * size : (number + 1) * size])
        return
    address = place + layer * len(wide) * item_bytes
    if item_bytes == 2:
        narrow = carray(_pointer(address), (len(wide),), np.uint16)  # type: ignore[call-arg]
        _widen(narrow, wide)
    else:
        wide[:] = carray(_pointer(address), (len(wide),), np.uint32)  # type: ignore[call-arg]


@numba.njit(fastmath=FAST, inline="always")
def attend(
    query: Any,  # [heads, dim], times the scale
    blocks: Any,  # addresses
    layer: int,
    item_bytes: int,
    form: Any,  # the numbers of the packed blocks' form
    wide: Any,  # scratch: u32, one layer of a block
    scores: Any,  # scratch: [group, block_tokens]
    largest: Any,  # [heads]
    totals: Any,  # [heads]
    sums: Any,  # [heads, dim]
    kv_heads: int,
    group: int,
    dim: int,
    block_tokens: int,
) -> None:
    """Attend to a run of blocks. Inlined, so that the compiler knows the shape."""
    step = kv_heads * dim
    largest[:] = -np.inf
    totals[:] = 0
    sums[:] = 0
    keys = wide[: block_tokens * step].view(np.float32)
    values = wide[block_tokens * step :].view(np.float32)
    for place in blocks:
        _read(place, layer, item_bytes, form, wide)
        for head in range(kv_heads):
            first = head * group
            j = 0
            while j + 4 <= group:
                q0, q1 = query[first + j], query[first + j + 1]
                q2, q3 = query[first + j + 2], query[first + j + 3]
                for o in range(block_tokens):
                    k = keys[o * step + head * dim : o * step + head * dim + dim]
                    s0 = s1 = s2 = s3 = np.float32(0)
                    for x in range(dim):
                        s0 += q0[x] * k[x]
                        s1 += q1[x] * k[x]
                        s2 += q2[x] * k[x]
                        s3 += q3[x] * k[x]
                    scores[j, o], scores[j + 1, o] = s0, s1
                    scores[j + 2, o], scores[j + 3, o] = s2, s3
                j += 4
            while j < group:
                q0 = query[first + j]
                for o in range(block_tokens):
                    k = keys[o * step + head * dim : o * step + head * dim + dim]
                    s0 = np.float32(0)
                    for x in range(dim):
                        s0 += q0[x] * k[x]
                    scores[j, o] = s0
                j += 1
            for j in range(group):
                row, value = scores[j], sums[first + j]
                most = largest[first + j]
                for o in range(block_tokens):
                    most = max(most, row[o])
                if most > largest[first + j]:
                    shrink = _exp2(largest[first + j] - most)
                    largest[first + j] = most
                    totals[first + j] *= shrink
                    for x in range(dim):
                        value[x] *= shrink
                added = np.float32(0)
                for o in range(block_tokens):
                    weight = _exp2(row[o] - most)
                    row[o] = weight
                    added += weight
                totals[first + j] += added
            j = 0
            while j + 2 <= group:
                a, b = scores[j], scores[j + 1]
                u, w = sums[first + j], sums[first + j + 1]
                o = 0
                while o + 4 <= block_tokens:
                    at = o * step + head * dim
                    v0, v1 = values[at : at + dim], values[at + step : at + step + dim]
                    at += 2 * step
                    v2, v3 = values[at : at + dim], values[at + step : at + step + dim]
                    a0, a1, a2, a3 = a[o], a[o + 1], a[o + 2], a[o + 3]
                    b0, b1, b2, b3 = b[o], b[o + 1], b[o + 2], b[o + 3]
                    for x in range(dim):
                        u[x] += a0 * v0[x] + a1 * v1[x] + a2 * v2[x] + a3 * v3[x]
                        w[x] += b0 * v0[x] + b1 * v1[x] + b2 * v2[x] + b3 * v3[x]
                    o += 4
                while o < block_tokens:
                    v0 = values[o * step + head * dim : o * step + head * dim + dim]
                    for x in range(dim):
                        u[x] += a[o] * v0[x]
                        w[x] += b[o] * v0[x]
                    o += 1
                j += 2
            while j < group:
                a, u = scores[j], sums[first + j]
                for o in range(block_tokens):
                    v0 = values[o * step + head * dim : o * step + head * dim + dim]
                    for x in range(dim):
                        u[x] += a[o] * v0[x]
                j += 1
