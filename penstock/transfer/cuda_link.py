"""One direction of the link between HOST and a GPU's blocks: copies on streams of its own.

A block that is scattered over layers, or packed in HOST, crosses the link in one piece, through
buffers on the GPU: while one is on the link, a kernel fills or empties another (see `cuda_stage`).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from penstock.codecs.lossless import LosslessCodec
from penstock.stores.host import HostArena
from penstock.transfer.paged import Part
from penstock.types import Direction, Slot, Verdict

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # has no type annotations

Addresses = Any  # a NumPy array of 64-bit addresses
CopyAll = Callable[[Addresses, Addresses, Addresses, int], None]
"""Takes targets, sources, lengths in bytes and a stream's handle. Queues all copies."""


class Memory(NamedTuple):
    """The addresses of the blocks on one side of the link."""

    address: int
    stride_bytes: int

    def addresses(self, slots: Sequence[Slot]) -> Addresses:
        return np.uint64(self.address) + np.asarray(slots, np.uint64) * np.uint64(self.stride_bytes)


class StageBuffer(Protocol):
    """A buffer on the GPU for some blocks, as HOST holds them. Works on the current stream."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def address(self) -> int: ...

    def gather(self, blocks: Any) -> Any:
        """Fill the buffer from blocks, given as a tensor of their numbers.

        Returns a tensor on the CPU that will say which of them fit, once the stream has come so
        far; None if HOST's bytes will say so.
        """

    def scatter(self, blocks: Any) -> None: ...


class QueuedCopies(NamedTuple):
    """Memory that running copies use, and what they say about the blocks' fit."""

    kept: Any = None
    fits: tuple[Any, ...] = ()


class DeviceLink:
    """One direction: a stream for copies, another for kernels if there are buffers."""

    def __init__(
        self,
        part: Part,
        host: HostArena,
        direction: Direction,
        stream: Any,
        stages: Sequence[StageBuffer],
        gpu: Any,
        copy_all: CopyAll | None = None,
    ) -> None:
        self.copies = stream
        self._part = part
        self._arena = host
        self._host = Memory(host.address, host.stride_bytes)
        self._direction = direction
        self._copy_all = copy_all or best_copy()
        self._gpu = gpu
        self._buffers: list[_Buffer] = []
        if stages:
            self._kernels = _cuda.Stream(priority=stream.priority)
            self._buffers = [_Buffer(stage, _cuda.Event(), _cuda.Event()) for stage in stages]
        elif part.codec is not None:
            raise ValueError("blocks that HOST holds packed need buffers on the GPU")
        self._turn = 0
        stretches = part.device.stretches
        self._addresses = np.array([s.address for s in stretches], np.uint64)
        self._strides = np.array([s.stride_bytes for s in stretches], np.uint64)
        self._lengths = np.array([s.num_bytes for s in stretches], np.uint64)
        ends = np.cumsum(self._lengths)
        self._offsets = (ends - self._lengths + np.uint64(part.offset)).astype(np.uint64)

    @property
    def first(self) -> Any:
        """The stream on which a transfer starts."""
        return self._kernels if self._begins_with_kernel else self.copies

    @property
    def last(self) -> Any:
        """The stream on which a transfer ends."""
        if not self._buffers:
            return self.copies
        return self.copies if self._begins_with_kernel else self._kernels

    @property
    def _begins_with_kernel(self) -> bool:
        return bool(self._buffers) and self._direction is Direction.SAVE

    def queue(self, slots: Sequence[Slot], blocks: Sequence[Slot]) -> QueuedCopies:
        """Queue the copies of all blocks. The result must be kept until they have ended."""
        if not self._buffers:
            self._queue_pieces(slots, blocks)
            return QueuedCopies()
        # Kernels read the numbers from pinned DRAM: a copy to the GPU would wait for the copies of
        # other transfers.
        numbers = torch.tensor(blocks, dtype=torch.int64).pin_memory()
        size = self._buffers[0].stage.num_blocks
        fits = []
        for start in range(0, len(slots), size):
            self._turn = (self._turn + 1) % len(self._buffers)
            some = slice(start, start + size)
            fit = self._queue_staged(self._buffers[self._turn], slots[some], numbers[some])
            if fit is not None:
                fits.append(fit)
        return QueuedCopies(numbers, tuple(fits))

    def saved(self, slots: Sequence[Slot], queued: QueuedCopies) -> list[Verdict]:
        """The verdict of each block whose save has ended: whether it fit its codec."""
        codec = self._part.codec
        if codec is None or not slots:
            return [Verdict.OK] * len(slots)
        if isinstance(codec, LosslessCodec):
            memory = np.frombuffer(self._arena.buffer, np.uint8)
            header = memory.reshape(self._arena.num_slots, -1)[
                np.asarray(slots)[:, None],
                self._part.offset + np.arange(2 * codec.form.num_regions)[None, :],
            ]
            fit = (header.view("<u2") <= codec.form.max_exceptions).all(1)
        else:
            fit = torch.cat(queued.fits).numpy()
        if bool(fit.all()):
            return [Verdict.OK] * len(slots)
        return [Verdict.OK if ok else Verdict.UNFIT for ok in fit.tolist()]

    def _queue_staged(self, buffer: _Buffer, slots: Sequence[Slot], numbers: Any) -> Any:
        in_host = self._host.addresses(slots) + np.uint64(self._part.offset)
        in_stage = np.uint64(buffer.stage.address) + np.arange(len(slots), dtype=np.uint64) * (
            np.uint64(buffer.stage.block_bytes)
        )
        lengths = np.full(len(slots), buffer.stage.block_bytes, np.uint64)
        self.first.wait_event(buffer.is_free)
        fits = None
        if self._direction is Direction.LOAD:
            self._copy_all(in_stage, in_host, lengths, self.copies.cuda_stream)
            buffer.is_full.record(self.copies)
            self._kernels.wait_event(buffer.is_full)
            with _cuda.stream(self._kernels):
                buffer.stage.scatter(numbers)
        else:
            with _cuda.stream(self._kernels):
                fits = buffer.stage.gather(numbers)
            buffer.is_full.record(self._kernels)
            self.copies.wait_event(buffer.is_full)
            self._copy_all(in_host, in_stage, lengths, self.copies.cuda_stream)
        buffer.is_free.record(self.last)
        return fits

    def _queue_pieces(self, slots: Sequence[Slot], blocks: Sequence[Slot]) -> None:
        in_host = (self._host.addresses(slots)[:, None] + self._offsets[None, :]).reshape(-1)
        numbers = np.asarray(blocks, np.uint64)
        on_device = self._addresses[None, :] + numbers[:, None] * self._strides[None, :]
        on_device = on_device.reshape(-1)
        lengths = np.tile(self._lengths, len(slots))
        load = self._direction is Direction.LOAD
        targets, sources = (on_device, in_host) if load else (in_host, on_device)
        self._copy_all(targets, sources, lengths, self.copies.cuda_stream)


@dataclass(frozen=True, slots=True)
class _Buffer:
    stage: StageBuffer
    is_full: Any
    is_free: Any


def new_streams() -> dict[Direction, Any]:
    """One stream per direction. Loads have priority, because requests wait for them."""
    return {Direction.LOAD: _cuda.Stream(priority=-1), Direction.SAVE: _cuda.Stream(priority=0)}


def best_copy() -> CopyAll:
    """One driver call for all blocks if the driver has it (CUDA 12.8 and later), else one each.

    The driver is called directly: passing thousands of addresses through a Python wrapper can take
    longer than the copies.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    for name, tells_failure in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
        try:
            function = getattr(driver, name)
        except AttributeError:
            continue
        return _batch_copy(function, tells_failure)
    log.info("the CUDA driver has no cuMemcpyBatchAsync; blocks are copied one by one")
    return copy_each


def _batch_copy(function: Any, tells_failure: bool) -> CopyAll:
    # CUmemcpyAttributes: the order in which sources are read (1: stream order), then hints and
    # flags, all zero.
    attributes = (ctypes.c_int * 16)(1)
    first = ctypes.c_size_t(0)
    failed = ctypes.c_size_t(0)
    extra = (ctypes.byref(failed),) if tells_failure else ()

    def copy_batch(targets: Addresses, sources: Addresses, lengths: Addresses, stream: int) -> None:
        error = function(
            ctypes.c_void_p(targets.ctypes.data),
            ctypes.c_void_p(sources.ctypes.data),
            ctypes.c_void_p(lengths.ctypes.data),
            ctypes.c_size_t(len(lengths)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *extra,
            ctypes.c_void_p(stream),
        )
        if error != 0:
            raise RuntimeError(f"cuMemcpyBatchAsync failed with CUDA error {error}")

    return copy_batch


def copy_each(targets: Addresses, sources: Addresses, lengths: Addresses, stream: int) -> None:
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    for target, source, length in zip(
        targets.tolist(), sources.tolist(), lengths.tolist(), strict=True
    ):
        error = copy(
            ctypes.c_void_p(target),
            ctypes.c_void_p(source),
            ctypes.c_size_t(length),
            ctypes.c_void_p(stream),
        )
        if error != 0:
            raise RuntimeError(f"cuMemcpyAsync failed with CUDA error {error}")
