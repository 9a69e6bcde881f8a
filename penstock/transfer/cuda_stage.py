"""A kernel that gathers scattered blocks into a buffer on the GPU, and scatters them back.

A block's piece in one layer may be as small as 64 KiB. Copying such pieces over the link one by one
reaches two thirds of its rate, and queueing them can take longer than the copies. The kernel
gathers or scatters them at the speed of the GPU's memory, and whole blocks cross the link.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.transfer.paged import PagedMemory

_WORD_BYTES = 8
_WORDS = 1024  # per iteration of a program


@triton.jit
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
        self.num_blocks = num_blocks
        self.block_bytes = memory.block_bytes
        self._buffer = torch.empty(
            num_blocks * memory.block_bytes // _WORD_BYTES, dtype=torch.int64, device=gpu
        )
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


def can_stage(memory: PagedMemory) -> bool:
    """Whether staging helps, and all addresses and sizes are multiples of a word."""
    numbers = [n for s in memory.stretches for n in (s.address, s.stride_bytes, s.num_bytes)]
    return len(memory.stretches) > 1 and all(number % _WORD_BYTES == 0 for number in numbers)


def _table(numbers: list[int], gpu: Any) -> Any:
    return torch.tensor(numbers, dtype=torch.int64, device=gpu)
