"""The lossless format (see `lossless_format`) with torch: where numba is missing, and in tests."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.codecs.lossless_format import EXCEPTION_CODE, ZERO_CODE, LosslessFormat


def pack_regions(raw: Tensor, packed: Tensor, first: int, form: LosslessFormat) -> bool:
    """Pack the values (int16) of neighboring regions into a whole part (uint8).

    `first` is the number of the first region. False if a region does not fit.
    """
    bits = raw.to(torch.int32).reshape(-1, form.region_rows, form.row_values) & 0xFFFF
    count = len(bits)
    exponents = bits >> 7 & 0xFF
    largest = exponents.amax(2, keepdim=True)
    below = largest - exponents
    codes = torch.where(below < ZERO_CODE, below, EXCEPTION_CODE)
    codes = torch.where(exponents == 0, ZERO_CODE, codes)
    is_exception = codes == EXCEPTION_CODE
    per_row = is_exception.sum(2)
    totals = per_row.sum(1)
    before = per_row.cumsum(1) - per_row

    regions = _regions(packed, form)[first : first + count]
    plain = (bits >> 8 & 0x80) | (bits & 0x7F)
    regions[:, : form.codes_at] = plain.reshape(count, -1).to(torch.uint8)
    pairs = codes.reshape(count, -1, 2)
    joined = pairs[:, :, 0] | pairs[:, :, 1] << 4
    regions[:, form.codes_at : form.exponents_at] = joined.to(torch.uint8)
    regions[:, form.exponents_at : form.counts_at] = largest[:, :, 0].to(torch.uint8)
    regions[:, form.counts_at : form.exceptions_at] = before.clamp(max=255).to(torch.uint8)
    regions[:, form.exceptions_at :] = 0
    for region, mask, values, total in zip(
        regions, is_exception, exponents, totals.tolist(), strict=True
    ):
        kept = min(total, form.max_exceptions)
        found = values[mask][:kept].to(torch.uint8)
        region[form.exceptions_at : form.exceptions_at + kept] = found
    header = packed[: 2 * form.num_regions].view(-1, 2)[first : first + count]
    header[:, 0] = (totals & 0xFF).to(torch.uint8)
    header[:, 1] = (totals >> 8).to(torch.uint8)
    return bool((totals <= form.max_exceptions).all())


def unpack_regions(packed: Tensor, raw: Tensor, first: int, form: LosslessFormat) -> None:
    """Unpack neighboring regions of a whole part (uint8) into `raw` (int16)."""
    count = len(raw) // form.region_values
    shape = (count, form.region_rows, form.row_values)
    regions = _regions(packed, form)[first : first + count].to(torch.int32)
    plain = regions[:, : form.codes_at].reshape(shape)
    joined = regions[:, form.codes_at : form.exponents_at]
    codes = torch.stack([joined & 15, joined >> 4], 2).reshape(shape)
    largest = regions[:, form.exponents_at : form.counts_at, None]
    before = regions[:, form.counts_at : form.exceptions_at, None]
    is_exception = codes == EXCEPTION_CODE
    # A damaged count must not lead outside the region.
    ranks = (before + is_exception.cumsum(2) - 1).clamp(0, form.max_exceptions - 1)
    exceptions = regions[:, form.exceptions_at :]
    exact = exceptions.gather(1, ranks.reshape(count, -1).long()).reshape(shape)
    exponents = torch.where(codes == ZERO_CODE, 0, largest - codes & 0xFF)
    exponents = torch.where(is_exception, exact, exponents)
    bits = (plain & 0x80) << 8 | exponents << 7 | plain & 0x7F
    raw[:] = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).reshape(-1).to(torch.int16)


def _regions(packed: Tensor, form: LosslessFormat) -> Tensor:
    body = packed[form.header_bytes : form.packed_bytes]
    return body.view(form.num_regions, form.region_bytes)
