"""The lossless format (see `lossless_format`) on a CPU, compiled by numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.compiling import compiled


@compiled(nogil=True)
def pack_regions(
    raw: Any,  # u16: the values of whole regions
    packed: Any,  # u8: the whole part
    first: int,  # the number of the first of these regions
    row_values: int,
    region_rows: int,
    max_exceptions: int,
    header_bytes: int,
    region_bytes: int,
) -> bool:
    """Pack neighboring regions, with their counts in the header. False if one does not fit."""
    fits = True
    region_values = row_values * region_rows
    half = row_values // 2
    for region in range(first, first + len(raw) // region_values):
        at = header_bytes + region * region_bytes
        values = raw[(region - first) * region_values :]
        plain = packed[at : at + region_values]
        codes = packed[at + region_values : at + region_values + region_values // 2]
        at += region_values + region_values // 2
        exponents = packed[at : at + region_rows]
        counts = packed[at + region_rows : at + 2 * region_rows]
        ends = header_bytes + (region + 1) * region_bytes
        exceptions = packed[at + 2 * region_rows : ends]
        exceptions[:] = 0
        total = 0
        for row in range(region_rows):
            mine = values[row * row_values : (row + 1) * row_values]
            out = plain[row * row_values : (row + 1) * row_values]
            pairs = codes[row * half : (row + 1) * half]
            largest = np.uint16(0)
            for x in range(row_values):
                value = mine[x]
                largest = max(largest, np.uint16(value & np.uint16(0x7F80)))
                out[x] = np.uint8((value >> np.uint16(8)) & np.uint16(0x80)) | np.uint8(
                    value & np.uint16(0x7F)
                )
            largest = np.uint16(largest >> np.uint16(7))
            widest = np.uint8(0)
            for x in range(half):
                a = np.uint16((mine[2 * x] >> np.uint16(7)) & np.uint16(0xFF))
                b = np.uint16((mine[2 * x + 1] >> np.uint16(7)) & np.uint16(0xFF))
                code = np.uint8(min(np.uint16(largest - a), np.uint16(15)))
                other = np.uint8(min(np.uint16(largest - b), np.uint16(15)))
                code = np.uint8(15) if code == 14 else code
                other = np.uint8(15) if other == 14 else other
                code = np.uint8(14) if a == 0 else code
                other = np.uint8(14) if b == 0 else other
                widest = max(widest, max(code, other))
                pairs[x] = code | np.uint8(other << np.uint8(4))
            exponents[row] = np.uint8(largest)
            counts[row] = np.uint8(min(total, 255))
            if widest == 15:
                for x in range(row_values):
                    code = (pairs[x // 2] >> np.uint8(4 * (x % 2))) & np.uint8(15)
                    if code == 15:
                        if total < max_exceptions:
                            exceptions[total] = np.uint8(
                                (mine[x] >> np.uint16(7)) & np.uint16(0xFF)
                            )
                        total += 1
        packed[2 * region] = np.uint8(total & 0xFF)
        packed[2 * region + 1] = np.uint8(min(total >> 8, 255))
        fits &= total <= max_exceptions
    return fits


@compiled(nogil=True)
def unpack_rows(
    region: Any,  # u8: one whole region
    first_row: int,
    raw: Any,  # u16: the values of whole rows
    row_values: int,
    region_rows: int,
    max_exceptions: int,
) -> None:
    """Unpack neighboring rows of one region."""
    region_values = row_values * region_rows
    half = row_values // 2
    codes = region[region_values : region_values + region_values // 2]
    exponents_at = region_values + region_values // 2
    exceptions = region[exponents_at + 2 * region_rows :]
    for index in range(len(raw) // row_values):
        row = first_row + index
        plain = region[row * row_values : (row + 1) * row_values]
        pairs = codes[row * half : (row + 1) * half]
        out = raw[index * row_values : (index + 1) * row_values]
        largest = np.uint16(region[exponents_at + row])
        widest = np.uint8(0)
        for x in range(half):
            a, b = pairs[x] & np.uint8(15), pairs[x] >> np.uint8(4)
            widest = max(widest, max(a, b))
            e = np.uint16(0) if a == 14 else np.uint16((largest - a) & np.uint16(0xFF))
            f = np.uint16(0) if b == 14 else np.uint16((largest - b) & np.uint16(0xFF))
            v, w = np.uint16(plain[2 * x]), np.uint16(plain[2 * x + 1])
            out[2 * x] = (
                np.uint16((v & np.uint16(0x80)) << np.uint16(8))
                | np.uint16(e << np.uint16(7))
                | (v & np.uint16(0x7F))
            )
            out[2 * x + 1] = (
                np.uint16((w & np.uint16(0x80)) << np.uint16(8))
                | np.uint16(f << np.uint16(7))
                | (w & np.uint16(0x7F))
            )
        if widest == 15:
            place = int(region[exponents_at + region_rows + row])
            for x in range(row_values):
                if (pairs[x // 2] >> np.uint8(4 * (x % 2))) & np.uint8(15) == 15:
                    # A damaged count must not lead outside the region.
                    e = np.uint16(exceptions[min(place, max_exceptions - 1)])
                    out[x] = (out[x] & np.uint16(0x807F)) | np.uint16(e << np.uint16(7))
                    place += 1


@compiled(nogil=True)
def unpack_regions(
    packed: Any,  # u8: the whole part
    raw: Any,  # u16: the values of whole regions
    first: int,  # the number of the first of these regions
    row_values: int,
    region_rows: int,
    max_exceptions: int,
    header_bytes: int,
    region_bytes: int,
) -> None:
    region_values = row_values * region_rows
    for index in range(len(raw) // region_values):
        at = header_bytes + (first + index) * region_bytes
        unpack_rows(
            packed[at : at + region_bytes],
            0,
            raw[index * region_values : (index + 1) * region_values],
            row_values,
            region_rows,
            max_exceptions,
        )
