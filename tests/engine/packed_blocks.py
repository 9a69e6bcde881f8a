"""Blocks for tests of packed HOST: ordinary values and everything that a 16-bit number can be."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.codecs.base import Codec
from penstock.codecs.lossless import LosslessCodec
from penstock.codecs.lossless_format import LosslessFormat, fit_lossless

ALIGNED = 512


def form_of(pool: Tensor) -> LosslessFormat:
    """The form of the blocks of pool [blocks, layers, 2, block_tokens, kv_heads, head_dim]."""
    num_layers, _, block_tokens, kv_heads, dim = pool.shape[1:]
    form = fit_lossless([block_tokens * kv_heads * dim * 2] * (2 * num_layers), dim)
    assert form is not None
    return form


def strange_pool(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random blocks with exceptions, zeros, denormals, infinities and NaNs with payloads.

    float16 stands for bfloat16 in Triton's interpreter. The format knows only bits; float16 from 1
    to 2 differ little in those that it takes for an exponent.
    """
    values = torch.randn(shape)
    if dtype is torch.float16:
        values = values.sign() * (1 + values.abs() % 1)
    bits = values.to(dtype).view(torch.int16)
    rows = bits.view(-1, shape[-1])
    dims = torch.randint(shape[-1], (len(rows),))
    every = torch.arange(len(rows))
    for kind, number in enumerate((0, -32768, 0x0003, -32767, 0x0500, 0x0A80)):
        mine = every[every % 11 == kind]  # +0, -0, denormals, tiny ones: exceptions
        rows[mine, dims[mine]] = number
    rows[every % 23 == 7] = 0
    infinity = 0x7C00 if dtype is torch.float16 else 0x7F80
    strange = bits[:, :, 1, ::7]  # values only: one such key would hide everything else
    strange[:] = 0
    strange[..., 0] = infinity + 5
    strange[..., 1] = -32768 | infinity
    strange[..., 2] = -32768 | (infinity + 0x55)
    strange[..., 3] = 0x0001
    return bits.view(dtype)


class PackedHost:
    """Packed blocks in DRAM, at addresses that are further apart than the blocks are long."""

    def __init__(self, pool: Tensor) -> None:
        self.form = form_of(pool)
        stride = (-(-self.form.packed_bytes // ALIGNED) + 1) * ALIGNED
        whole = torch.full((len(pool) * stride + ALIGNED,), 0xFF, dtype=torch.uint8)
        if pool.is_cuda:
            whole = whole.pin_memory()
        start = -whole.data_ptr() % ALIGNED
        self._slots = whole[start : start + len(pool) * stride].view(len(pool), stride)
        self._codec = LosslessCodec(self.form)
        self.address = self._slots.data_ptr()
        self.stride_bytes = stride

    def put(self, slot: int, block: Tensor) -> None:
        pack_into(self._codec, block, self._slots[slot].numpy().data)


def pack_into(codec: Codec, block: Tensor, target: memoryview) -> None:
    raw = bytearray(block.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    assert codec.pack(memoryview(raw), target), "too many exceptions"


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
