"""Copies between HOST and a GPU's memory: one batch of asynchronous copies per transfer.

Each direction has a stream and a thread that waits for its copies to end. Several transfers are
queued on the stream ahead of the running one, so the link never waits for Python. Before a copy,
the stream waits for everything that had been launched for computing when the transfer was queued: a
block is never saved before it is computed, nor overwritten while a step still reads it. Later steps
run in parallel with the copy.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.transfer.io import Mover, MoveResult
from penstock.transfer.pinning import PinnedSlots
from penstock.transfer.pool import DaemonPool
from penstock.transfer.seals import Seals
from penstock.types import BlockKey, Direction, Slot, Transfer, Verdict

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


class CudaMover(Mover):
    max_ahead = 8  # about 20 ms at 128 MiB each; queued copies cannot be cancelled

    def __init__(
        self, device: DevicePool, host: HostArena, seals: Seals, copy_all: CopyAll | None = None
    ) -> None:
        self._gpu = device.tensor.device
        self._block_bytes = device.block_bytes
        self._device = Memory(device.address, device.stride_bytes)
        self._host = Memory(host.address, host.stride_bytes)
        self._pins = PinnedSlots(host, self._gpu)
        self._pins.start()
        self._seals = seals
        self._copy_all = copy_all or best_copy()
        with _cuda.device(self._gpu):
            self._ways = {d: _Way(d, stream, self._gpu) for d, stream in new_streams().items()}
        self._computed: Any = None  # recorded when a transfer was last queued

    def queued(self, transfer: Transfer) -> None:
        with _cuda.device(self._gpu):
            event = _cuda.Event()
            event.record(_cuda.default_stream())
        self._computed = event

    def move(self, transfer: Transfer) -> Future[MoveResult]:
        keys, sources, targets = transfer.keys, transfer.source_slots, transfer.target_slots
        if transfer.direction is Direction.LOAD:
            in_host, of, to = sources, self._host, self._device
            # After the copy: a slot that was overwritten during it has lost its seal.
            judge = partial(self._seals.verdicts, keys, sources)
        else:
            in_host, of, to = targets, self._device, self._host
            self._seals.open(targets)
            judge = partial(self._seal, keys, targets)
        lengths = np.full(len(keys), self._block_bytes, np.uint64)
        way = self._ways[transfer.direction]
        queue = partial(
            way.queue,
            partial(self._copy_all, to.addresses(targets), of.addresses(sources), lengths),
            self._computed,
            judge,
        )
        if self._pins.has(in_host):
            return way.waiter.submit(queue())

        def queue_when_pinned() -> MoveResult:
            self._pins.wait_for(in_host)
            return queue()()

        return way.waiter.submit(queue_when_pinned)

    def close(self) -> None:
        for way in self._ways.values():
            way.waiter.close()
        self._pins.close()

    def _seal(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> list[Verdict]:
        self._seals.seal(keys, slots)
        return [Verdict.OK] * len(keys)


class _Way:
    """One direction of the link."""

    def __init__(self, direction: Direction, stream: Any, gpu: Any) -> None:
        self._stream = stream
        self._gpu = gpu
        self.waiter = DaemonPool(1, f"penstock-gpu-{direction.value}")

    def queue(
        self, copy: Callable[[int], None], after: Any, judge: Callable[[], list[Verdict]]
    ) -> Callable[[], MoveResult]:
        """Queue copies after earlier ones and after `after`. The result waits for them to end."""
        with _cuda.device(self._gpu):
            # Blocking events: a thread that spins would slow down the one that computes.
            began, ended = (_cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
            self._stream.wait_event(after)
            began.record(self._stream)
            try:
                copy(self._stream.cuda_stream)
            except Exception:
                self._stream.synchronize()  # copies queued before the error still write
                raise
            ended.record(self._stream)

        def finish() -> MoveResult:
            ended.synchronize()
            # The time of the copies alone, without waiting for earlier work.
            seconds = float(began.elapsed_time(ended)) / 1e3
            return MoveResult(judge(), seconds=seconds)

        return finish


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
