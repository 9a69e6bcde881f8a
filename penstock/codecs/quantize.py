"""Quantization in torch: float32 values to the sections of `lossy_format`, and back.

Values are [block, layer, kind, head, token, dim], the sections [block, layer, ...]. A CPU and a
GPU produce the same bits, because every operation is elementwise and correctly rounded, or a
maximum or minimum, whose result does not depend on the order. What must be avoided:

- dividing by a Python number: on a GPU torch multiplies by the reciprocal instead. Dividing by a
  tensor is exact;
- minima over zeros of both signs: which one is returned depends on the order;
- scales that are denormal: code that was loaded into the process may have turned them off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.codecs.lossy_format import group_size

# A part with a larger magnitude, an infinity or a NaN is not packed. Below it neither a range of
# values (int4) nor a value that is slightly rounded up can overflow.
MAX_MAGNITUDE = 2.0**126
# No scale is smaller. Values whose codes would need a smaller one become 0, or their minimum.
MIN_SCALE = 2.0**-100

_FP8_MAX = 448.0


def _reciprocal(number: float) -> float:
    """As float32, so that CPU and GPU multiply by the same number."""
    return torch.tensor(1.0 / number, dtype=torch.float32).item()


_PER_FP8_MAX, _PER_127, _PER_15 = (_reciprocal(number) for number in (_FP8_MAX, 127.0, 15.0))


def are_packable(values: Tensor) -> Tensor:
    """For each block: whether all values can be quantized. NaN compares as false."""
    return (values.abs() <= MAX_MAGNITUDE).flatten(1).all(1)


def to_fp8(values: Tensor) -> list[Tensor]:
    """One scale per layer, kind and head: the largest magnitude becomes 448."""
    largest = values.abs().amax((-2, -1))
    scales = (largest * _PER_FP8_MAX).clamp_min(MIN_SCALE)
    # Above 464 the conversion gives NaN; rounding of the scale leaves at most 448.0001.
    codes = (values / scales[..., None, None]).clamp(-_FP8_MAX, _FP8_MAX)
    return [scales, codes.to(torch.float8_e4m3fn)]


def from_fp8(sections: Sequence[Tensor]) -> Tensor:
    scales, codes = sections
    return codes.float() * scales[..., None, None]


def to_int8(values: Tensor) -> list[Tensor]:
    """One scale per layer, kind, head and token: the largest magnitude becomes 127.

    A bfloat16 scale costs no precision: at most it is 1/257 too small. Then the largest code is
    127.496 before rounding, and 127 is still the nearest.
    """
    largest = values.abs().amax(-1)
    scales = (largest * _PER_127).clamp_min(MIN_SCALE).bfloat16()
    codes = (values / scales.float()[..., None]).round().clamp(-127.0, 127.0)
    return [scales, codes.to(torch.int8)]


def from_int8(sections: Sequence[Tensor]) -> Tensor:
    scales, codes = sections
    return codes.float() * scales.float()[..., None]


def to_int4(values: Tensor) -> list[Tensor]:
    """Keys: scale and minimum of each channel over the block's tokens. Values: of each token, in
    groups of channels. As in KIVI (arXiv 2402.02750): a few channels of keys are much larger than
    the others, in all tokens alike; values have no such channels.
    """
    values = values + 0.0  # -0 becomes 0
    keys, vectors = values[:, :, 0], values[:, :, 1]
    key_scales, key_minima, key_codes = _to_4_bits(keys, -2)
    size = group_size(values.shape[-1])
    value_scales, value_minima, value_codes = _to_4_bits(_in_groups(vectors, size), -1)
    return [
        key_scales.squeeze(-2),
        key_minima.squeeze(-2),
        value_scales.squeeze(-1),
        value_minima.squeeze(-1),
        _in_pairs(key_codes),
        _in_pairs(value_codes.flatten(-2)),
    ]


def from_int4(sections: Sequence[Tensor]) -> Tensor:
    key_scales, key_minima, value_scales, value_minima, key_pairs, value_pairs = sections
    keys = _from_4_bits(key_scales[..., None, :], key_minima[..., None, :], _apart(key_pairs))
    codes = _apart(value_pairs)
    groups = _in_groups(codes, codes.shape[-1] // value_scales.shape[-1])
    vectors = _from_4_bits(value_scales[..., None], value_minima[..., None], groups)
    return torch.stack((keys, vectors.flatten(-2)), 2)


def _to_4_bits(values: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """The minimum is one of the values, so it is exact in their dtype. A scale that was rounded
    down leaves at most 15.06 before rounding."""
    minima = values.amin(axis, keepdim=True)
    ranges = values.amax(axis, keepdim=True) - minima
    scales = (ranges * _PER_15).clamp_min(MIN_SCALE).bfloat16()
    codes = ((values - minima) / scales.float()).round().clamp(0.0, 15.0)
    return scales, minima, codes.to(torch.uint8)


def _from_4_bits(scales: Tensor, minima: Tensor, codes: Tensor) -> Tensor:
    # The product is exact, so nothing changes where it is fused with the sum.
    return minima.float() + codes.float() * scales.float()


def _in_pairs(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _apart(pairs: Tensor) -> Tensor:
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def _in_groups(values: Tensor, size: int) -> Tensor:
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)
