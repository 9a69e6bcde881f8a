"""Rounds KV to 8 bits and widens it again, in Triton kernels (see `engine.fp8`).

A kernel's `FP8` says how its KV is stored: "" in the type in which it computes, else as e4m3 bytes.
"native": the GPU converts them. "bits": integer arithmetic does, on GPUs before compute capability
8.9 and in Triton's interpreter. Both give the same values.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_SMALLEST_NORMAL = tl.constexpr(2.0**-6)


def fp8_mode(like: Any, *, is_fp8: bool) -> str:
    """The value of `FP8` for kernels on the device of the tensor `like`."""
    if not is_fp8:
        return ""
    return "native" if like.is_cuda and _has_e4m3(like.device) else "bits"


@cache
def _has_e4m3(device: Any) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def narrow(numbers, FP8: tl.constexpr):  # noqa: N803
    """Convert to what is stored. Never the GPU's own conversion: its NaN may differ."""
    if FP8 == "":
        return numbers
    else:  # noqa: RET505 - without it, Triton compiles what follows too
        return _round(numbers)


@triton.jit
def _round(numbers):
    bits = numbers.to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    size = tl.minimum(size, 0x43E00000)  # 448
    # To the nearest, ties to even: 3 of 23 bits of mantissa remain. The exponent's bias is 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2**-6 the steps are 2**-9: those of float32 at 2**14, so that adding it rounds.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    rounded = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(is_nan, 0x7F, rounded).to(tl.uint8)


@triton.jit
def widen(stored, kind: tl.constexpr, FP8: tl.constexpr):  # noqa: N803
    """Convert what was stored to `kind`. All e4m3 values are exact in it."""
    if FP8 == "":
        return stored
    elif FP8 == "native":  # noqa: RET505
        return stored.to(tl.float8e4nv, bitcast=True).to(kind)
    else:
        byte = stored.to(tl.int32)
        size = (byte & 0x7F) << 20
        normal = size + ((127 - 7) << 23)
        # Exponent 0 means m * 2**-9: read m as the mantissa of 2**-6, and subtract that.
        small = (size + ((128 - 7) << 23)).to(tl.float32, bitcast=True) - _SMALLEST_NORMAL
        bits = tl.where(size < (1 << 23), small.to(tl.int32, bitcast=True), normal)
        bits = tl.where(size == (0x7F << 20), 0x7FC00000, bits) | ((byte & 0x80) << 24)
        return bits.to(tl.float32, bitcast=True).to(kind)
