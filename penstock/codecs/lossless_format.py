"""The lossless format of bfloat16 KV: its bytes, and how many it needs. Pure numbers.

A bfloat16 has a sign, 8 bits of exponent and 7 of mantissa. In KV the exponents of neighboring
values are close together, so 4 bits are enough for almost all of them. One worker's part of a block
is a header and regions of equal size:

    part     header | region 0 | region 1 | ...
    header   the number of exceptions of each region, u16 little-endian; zeros to a multiple of 16

    region   of `region_rows` rows of `row_values` values (n values; at most 16,384)
    bytes          content
    n              sign and mantissa of each value: sign << 7 | mantissa
    n / 2          the code of each value, 4 bits; the first of two values in the lower bits
    region_rows    the largest exponent of each row
    region_rows    how many exceptions the region has before each row, at most 255
    max_exceptions the exponents of the exceptions, in the order of the values; then zeros
    0 to 15        zeros up to a multiple of 16

    code     exponent
    0 to 13  the row's largest exponent minus the code
    14       0: zeros and denormals
    15       an exception

A row is one head's vector, or 64 or 128 neighboring values. It can be unpacked without its region:
the n-th exception of a row is the n-th after those before the row. A region with more than
`max_exceptions` does not fit, and its block is not kept. The bytes depend on the values alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.types import round_up

VALUE_BYTES = 2
MAX_REGION_VALUES = 16_384  # exceptions are counted in one byte: 1 in 64 values
MAX_EXCEPTIONS = 255
MAX_RATIO = 0.78
ALIGN = 16  # bytes: what a GPU reads at once
ZERO_CODE = 14
EXCEPTION_CODE = 15

_VALUES_PER_EXCEPTION = 64
_COUNT_BYTES = 2
_USUAL_ROWS = (128, 64)
_MIN_ROW, _MAX_ROW = 48, 256  # shorter rows need too many bytes for their exponents


@dataclass(frozen=True, slots=True)
class LosslessFormat:
    """The format of one part: `num_regions` regions of `region_rows` rows of `row_values`."""

    row_values: int
    region_rows: int
    num_regions: int

    @property
    def region_values(self) -> int:
        return self.region_rows * self.row_values

    @property
    def max_exceptions(self) -> int:
        """Of one region."""
        return min(MAX_EXCEPTIONS, self.region_values // _VALUES_PER_EXCEPTION)

    # Where things begin within a region.

    @property
    def codes_at(self) -> int:
        return self.region_values

    @property
    def exponents_at(self) -> int:
        """The largest exponent of each row."""
        return self.codes_at + self.region_values // 2

    @property
    def counts_at(self) -> int:
        """How many exceptions there are before each row."""
        return self.exponents_at + self.region_rows

    @property
    def exceptions_at(self) -> int:
        return self.counts_at + self.region_rows

    @property
    def region_bytes(self) -> int:
        return round_up(self.exceptions_at + self.max_exceptions, ALIGN)

    # The whole part.

    @property
    def header_bytes(self) -> int:
        return round_up(self.num_regions * _COUNT_BYTES, ALIGN)

    @property
    def raw_bytes(self) -> int:
        return self.num_regions * self.region_values * VALUE_BYTES

    @property
    def packed_bytes(self) -> int:
        return self.header_bytes + self.num_regions * self.region_bytes

    @property
    def version(self) -> str:
        return f"lossless 1 of {self.num_regions} x {self.region_rows} x {self.row_values}"

    def region_at(self, region: int) -> int:
        """Where a region begins within a part."""
        return self.header_bytes + region * self.region_bytes


def fit_lossless(
    stretch_bytes: Iterable[int], head_dim: int | None = None
) -> LosslessFormat | None:
    """The format for a part of bfloat16 values in stretches of these sizes; None if none pays.

    No region reaches over the end of a stretch. If possible, a row is one head's vector: then
    attention can read it.
    """
    sizes = tuple(stretch_bytes)
    common = math.gcd(*sizes)
    if common % VALUE_BYTES:
        return None
    rows = _USUAL_ROWS if head_dim is None else (head_dim, *_USUAL_ROWS)
    for row in rows:
        if not _MIN_ROW <= row <= _MAX_ROW or row % 2 or common // VALUE_BYTES % row:
            continue
        region_rows = _largest_divisor(common // VALUE_BYTES // row, MAX_REGION_VALUES // row)
        num_regions = sum(sizes) // (region_rows * row * VALUE_BYTES)
        found = LosslessFormat(row, region_rows, num_regions)
        if found.packed_bytes <= MAX_RATIO * found.raw_bytes:
            return found
    return None


def _largest_divisor(number: int, limit: int) -> int:
    return next(size for size in range(min(number, limit), 0, -1) if number % size == 0)
