"""Buffers on the GPU into which kernels gather scattered blocks, and from which they scatter them.

Packing is part of gathering, and unpacking of scattering, if HOST holds packed blocks.

A block's piece in one layer may be as small as 64 KiB. Copying such pieces over the link one by one
reaches two thirds of its rate, and queueing them can take longer than the copies. The kernel
gathers or scatters them at the speed of the GPU's memory, and whole blocks cross the link.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.codecs.base import Codec
from penstock.codecs.lossless import LosslessCodec
from penstock.codecs.lossless_format import LosslessFormat
from penstock.codecs.lossless_triton import pack_blocks, unpack_blocks
from penstock.codecs.lossy import LossyCodec
from penstock.transfer.cuda_link import StageBuffer
from penstock.transfer.paged import PagedMemory

_WORD_BYTES = 8
_PAIR_BYTES = 4  # two bfloat16: what packing reads at once
_WORDS = 1024  # per iteration of a program


@triton.jit(do_not_specialize_on_alignment=["blocks"])  # else some pieces would wait for a compiler
def _move(
    addresses,
    strides,
    offsets,
    lengths,
    blocks,
    buffer,
    block_words,
    TO_BUFFER: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    block = tl.load(blocks + row)
    address = tl.load(addresses + stretch) + block * tl.load(strides + stretch)
    scattered = address.to(tl.pointer_type(tl.int64))
    whole = buffer + row * block_words + tl.load(offsets + stretch)
    length = tl.load(lengths + stretch)
    words = tl.arange(0, WORDS)
    for start in range(0, length, WORDS):
        places = start + words
        inside = places < length
        if TO_BUFFER:
            tl.store(whole + places, tl.load(scattered + places, mask=inside), mask=inside)
        else:
            tl.store(scattered + places, tl.load(whole + places, mask=inside), mask=inside)


class CopyStage:
    """A buffer of whole blocks on the GPU, filled from or copied to its scattered memory."""

    def __init__(self, memory: PagedMemory, num_blocks: int, gpu: Any) -> None:
        if not _is_multiple_of(memory, _WORD_BYTES):
            raise ValueError(f"KV on the device is not in words of {_WORD_BYTES} bytes")
        self.num_blocks = num_blocks
        self.block_bytes = memory.block_bytes
        self._buffer = torch.empty(
            num_blocks * memory.block_bytes // _WORD_BYTES, dtype=torch.int64, device=gpu
        )
        self.bytes = self._buffer.view(torch.uint8).view(num_blocks, memory.block_bytes)
        self.address = self._buffer.data_ptr()
        stretches = memory.stretches
        self._addresses = _table([stretch.address for stretch in stretches], gpu)
        self._strides = _table([stretch.stride_bytes for stretch in stretches], gpu)
        lengths = [stretch.num_bytes // _WORD_BYTES for stretch in stretches]
        self._lengths = _table(lengths, gpu)
        self._offsets = _table([sum(lengths[:index]) for index in range(len(lengths))], gpu)

    def gather(self, blocks: Any) -> None:
        """Copy blocks, given as a tensor of their numbers, to the buffer, on the current stream."""
        self._run(blocks, to_buffer=True)

    def scatter(self, blocks: Any) -> None:
        self._run(blocks, to_buffer=False)

    def _run(self, blocks: Any, *, to_buffer: bool) -> None:
        _move[(len(blocks), len(self._lengths))](
            self._addresses,
            self._strides,
            self._offsets,
            self._lengths,
            blocks,
            self._buffer,
            self.block_bytes // _WORD_BYTES,
            TO_BUFFER=to_buffer,
            WORDS=_WORDS,
        )


class LosslessStage:
    """A buffer of blocks packed without loss (see `penstock.codecs.lossless_format`)."""

    def __init__(
        self, memory: PagedMemory, num_blocks: int, gpu: Any, form: LosslessFormat
    ) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = form.packed_bytes
        self._form = form
        # Zeros: a kernel does not write the padding of the header.
        shape = (num_blocks, form.packed_bytes)
        self.bytes = torch.zeros(shape, dtype=torch.uint8, device=gpu)
        self.address = self.bytes.data_ptr()
        size = form.region_values * 2
        pieces = [
            (stretch.address + offset, stretch.stride_bytes)
            for stretch in memory.stretches
            for offset in range(0, stretch.num_bytes, size)
        ]
        if len(pieces) != form.num_regions:
            raise ValueError(f"{len(pieces)} regions on the device, expected {form.num_regions}")
        if not _is_multiple_of(memory, _PAIR_BYTES):
            raise ValueError(f"KV on the device is not in pairs of {_PAIR_BYTES} bytes")
        self._addresses = _table([address for address, _ in pieces], gpu)
        self._strides = _table([stride for _, stride in pieces], gpu)

    def gather(self, blocks: Any) -> None:
        pack_blocks(self._form, self._addresses, self._strides, blocks, self.bytes)

    def scatter(self, blocks: Any) -> None:
        unpack_blocks(self._form, self._addresses, self._strides, blocks, self.bytes)


class LossyStage:
    """A buffer of blocks quantized by torch, behind one of raw blocks."""

    def __init__(self, memory: PagedMemory, num_blocks: int, gpu: Any, codec: LossyCodec) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = codec.packed_bytes
        self._codec = codec
        self._raw = CopyStage(memory, num_blocks, gpu)
        shape = (num_blocks, codec.packed_bytes)
        self._buffer = torch.empty(shape, dtype=torch.uint8, device=gpu)
        self.address = self._buffer.data_ptr()

    def gather(self, blocks: Any) -> Any:
        self._raw.gather(blocks)
        count = len(blocks)
        packed, fits = self._codec.pack_tensor(self._raw.bytes[:count])
        self._buffer[:count] = packed
        # Arrives with the blocks: to fetch it later would wait for everything that is computed.
        return fits.to("cpu", non_blocking=True)

    def scatter(self, blocks: Any) -> None:
        count = len(blocks)
        self._raw.bytes[:count] = self._codec.unpack_tensor(self._buffer[:count])
        self._raw.scatter(blocks)


def make_stage(memory: PagedMemory, num_blocks: int, gpu: Any, codec: Codec | None) -> StageBuffer:
    if codec is None:
        return CopyStage(memory, num_blocks, gpu)
    if isinstance(codec, LosslessCodec):
        return LosslessStage(memory, num_blocks, gpu, codec.form)
    if isinstance(codec, LossyCodec):
        return LossyStage(memory, num_blocks, gpu, codec)
    raise NotImplementedError(codec.name)


def can_stage(memory: PagedMemory) -> bool:
    """Whether staging helps, and all addresses and sizes are multiples of a word."""
    return len(memory.stretches) > 1 and _is_multiple_of(memory, _WORD_BYTES)


def _is_multiple_of(memory: PagedMemory, size: int) -> bool:
    numbers = [n for s in memory.stretches for n in (s.address, s.stride_bytes, s.num_bytes)]
    return all(number % size == 0 for number in numbers)


def _table(numbers: list[int], gpu: Any) -> Any:
    return torch.tensor(numbers, dtype=torch.int64, device=gpu)
