"""KV in 8 bits: float8_e4m3fn without scales, as vLLM stores it by default.

A value is rounded to the nearest even one and saturates at 448. Every NaN becomes the byte 0x7F:
the sign that a NaN keeps would depend on the kernel. `attention.fp8_triton` gives the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
_MOST = 448.0
_NAN = 0x7F


def narrow(numbers: Tensor) -> Tensor:
    """The bytes of `numbers` as e4m3, in the same shape."""
    found = numbers.clamp(-_MOST, _MOST).to(DTYPE).view(torch.uint8)
    return found.masked_fill_(found == _NAN | 0x80, _NAN)
