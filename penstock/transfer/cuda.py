"""HOST to and from a GPU's memory: one batch of asynchronous copies a transfer.

Each transfer thread has a stream for loads and one for saves. Before it copies, a stream waits for
all that compute had been given by then: a block is never saved before it is written, nor loaded
over while a step still reads what lay there. The thread then waits for its own copies alone.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from penstock.errors import ConfigError
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.transfer.io import Moved, Seals
from penstock.types import Direction, Slot, Transfer, Verdict
from penstock.units import format_bytes

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # carries no types


class Memory(NamedTuple):
    """Blocks of one side: a row of bytes each, and where they lie."""

    rows: torch.Tensor  # [slots, block_bytes]
    address: int
    stride_bytes: int


CopyAll = Callable[[Memory, Sequence[Slot], Memory, Sequence[Slot], Any], None]
"""Source, its slots, target, its slots, stream: queue all copies, wait for none."""


class CudaMover:
    def __init__(
        self, device: DevicePool, host: HostArena, seals: Seals, copy_all: CopyAll | None = None
    ) -> None:
        self._gpu = device.tensor.device
        self._device = Memory(
            device.tensor.view(torch.uint8).view(device.num_slots, device.block_bytes),
            device.address,
            device.stride_bytes,
        )
        self._host = Memory(_pinned(host), host.address, host.stride_bytes)
        self._seals = seals
        self._copy_all = copy_all or best_copy()
        self._streams = threading.local()

    def move(self, transfer: Transfer) -> Moved:
        keys, sources, targets = transfer.keys, transfer.source_slots, transfer.target_slots
        if transfer.direction is Direction.LOAD:
            self._copy(self._host, sources, self._device, targets, Direction.LOAD)
            # After the copy: a slot that changed under it has lost its seal by now.
            return Moved(self._seals.verdicts(keys, sources))
        self._seals.open(targets)
        self._copy(self._device, sources, self._host, targets, Direction.SAVE)
        self._seals.seal(keys, targets)
        return Moved([Verdict.OK] * len(keys))

    def close(self) -> None:
        _cuda.cudart().cudaHostUnregister(self._host.address)

    def _copy(
        self,
        source: Memory,
        sources: Sequence[Slot],
        target: Memory,
        targets: Sequence[Slot],
        direction: Direction,
    ) -> None:
        with _cuda.device(self._gpu):
            stream = self._stream(direction)
            stream.wait_stream(_cuda.default_stream())
            try:
                self._copy_all(source, sources, target, targets, stream)
            finally:
                stream.synchronize()  # also after an error: copies queued before it still write

    def _stream(self, direction: Direction) -> Any:
        streams = getattr(self._streams, "by_direction", None)
        if streams is None:
            # A request waits for a load; nobody waits for a save.
            streams = {
                Direction.LOAD: _cuda.Stream(priority=-1),
                Direction.SAVE: _cuda.Stream(priority=0),
            }
            self._streams.by_direction = streams
        return streams[direction]


def best_copy() -> CopyAll:
    """One call for all blocks where cuda-bindings knows it; else a call a block."""
    try:
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        batch = runtime.cudaMemcpyBatchAsync
    except (ImportError, AttributeError):
        log.info("there is no cudaMemcpyBatchAsync (cuda-bindings 13): blocks are copied singly")
        return copy_each

    def copy_batch(
        source: Memory,
        sources: Sequence[Slot],
        target: Memory,
        targets: Sequence[Slot],
        stream: Any,
    ) -> None:
        count = len(sources)
        (error,) = batch(
            [target.address + slot * target.stride_bytes for slot in targets],
            [source.address + slot * source.stride_bytes for slot in sources],
            [source.rows.shape[1]] * count,
            count,
            [attributes],
            [0],
            1,
            stream.cuda_stream,
        )
        if int(error) != 0:
            raise RuntimeError(f"cudaMemcpyBatchAsync failed with CUDA error {int(error)}")

    return copy_batch


def copy_each(
    source: Memory, sources: Sequence[Slot], target: Memory, targets: Sequence[Slot], stream: Any
) -> None:
    with _cuda.stream(stream), torch.inference_mode():
        for from_slot, to_slot in zip(sources, targets, strict=True):
            target.rows[to_slot].copy_(source.rows[from_slot], non_blocking=True)


def _pinned(host: HostArena) -> torch.Tensor:
    """The arena's blocks, their pages locked, so that the GPU reads and writes them by itself."""
    error = _cuda.cudart().cudaHostRegister(host.address, host.num_bytes, 0)
    if int(error) != 0:
        raise ConfigError(
            f"{format_bytes(host.num_bytes)} of DRAM cannot be pinned for the GPU (CUDA error "
            f"{int(error)}); lower host.size, or raise the limit on locked memory (ulimit -l)."
        )
    flat = torch.frombuffer(host.buffer, dtype=torch.uint8)
    return flat.view(host.num_slots, host.stride_bytes)[:, : host.block_bytes]
