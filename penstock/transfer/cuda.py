"""HOST to and from a GPU's memory: one batch of asynchronous copies a transfer.

Each transfer thread has a stream for loads and one for saves. Before it copies, a stream waits for
all that compute had been given when the transfer was queued: a block is never saved before it is
written, nor loaded over while a step still reads what lay there; but the steps that follow run
beside the copy. The thread then waits for its own copies alone.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.transfer.io import Moved, Mover
from penstock.transfer.pinning import PinnedSlots
from penstock.transfer.seals import Seals
from penstock.types import Direction, Slot, Transfer, Verdict

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # carries no types

Addresses = Any  # a NumPy array of 64-bit addresses
CopyAll = Callable[[Addresses, Addresses, Addresses, int], None]
"""Targets, sources, lengths in bytes, a stream's handle: queue all copies, wait for none."""


class Memory(NamedTuple):
    """Blocks of one side: where they lie."""

    address: int
    stride_bytes: int

    def addresses(self, slots: Sequence[Slot]) -> Addresses:
        return np.uint64(self.address) + np.asarray(slots, np.uint64) * np.uint64(self.stride_bytes)


class CudaMover(Mover):
    is_duplex = True

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
        self._streams = threading.local()
        self._computed: Any = None  # all that compute had been given when one was last queued

    def queued(self, transfer: Transfer) -> None:
        with _cuda.device(self._gpu):
            event = _cuda.Event()
            event.record(_cuda.default_stream())
        self._computed = event

    def move(self, transfer: Transfer) -> Moved:
        keys, sources, targets = transfer.keys, transfer.source_slots, transfer.target_slots
        self._pins.wait_for(sources if transfer.direction is Direction.LOAD else targets)
        if transfer.direction is Direction.LOAD:
            seconds = self._copy(self._host, sources, self._device, targets, Direction.LOAD)
            # After the copy: a slot that changed under it has lost its seal by now.
            return Moved(self._seals.verdicts(keys, sources), seconds=seconds)
        self._seals.open(targets)
        seconds = self._copy(self._device, sources, self._host, targets, Direction.SAVE)
        self._seals.seal(keys, targets)
        return Moved([Verdict.OK] * len(keys), seconds=seconds)

    def close(self) -> None:
        self._pins.close()

    def _copy(
        self,
        source: Memory,
        sources: Sequence[Slot],
        target: Memory,
        targets: Sequence[Slot],
        direction: Direction,
    ) -> float:
        """Returns what the copies took, without the wait for what is being computed."""
        to, of = target.addresses(targets), source.addresses(sources)
        lengths = np.full(len(sources), self._block_bytes, np.uint64)
        with _cuda.device(self._gpu):
            stream = self._stream(direction)
            # To wait asleep: a thread that spins takes the processor from the one that computes.
            began, ended = (_cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
            stream.wait_event(self._computed)
            began.record(stream)
            try:
                self._copy_all(to, of, lengths, stream.cuda_stream)
            finally:  # also after an error: copies queued before it still write
                ended.record(stream)
                ended.synchronize()
            return float(began.elapsed_time(ended)) / 1e3

    def _stream(self, direction: Direction) -> Any:
        streams = getattr(self._streams, "by_direction", None)
        if streams is None:
            streams = new_streams()
            self._streams.by_direction = streams
        return streams[direction]


def new_streams() -> dict[Direction, Any]:
    """A request waits for a load; nobody waits for a save."""
    return {
        Direction.LOAD: _cuda.Stream(priority=-1),
        Direction.SAVE: _cuda.Stream(priority=0),
    }


def best_copy() -> CopyAll:
    """One call for all blocks where the driver knows it (CUDA 12.8 and later); else a call each.

    The driver is called directly: a list of thousands of addresses through a Python wrapper takes
    longer than the copy of some blocks.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    for name, tells_failure in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
        try:
            function = getattr(driver, name)
        except AttributeError:
            continue
        return _batch_copy(function, tells_failure)
    log.info("the CUDA driver has no cuMemcpyBatchAsync: blocks are copied singly")
    return copy_each


def _batch_copy(function: Any, tells_failure: bool) -> CopyAll:
    # CUmemcpyAttributes: the order in which sources are read (1: as the stream comes to them),
    # then hints and flags, all of them zero.
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
