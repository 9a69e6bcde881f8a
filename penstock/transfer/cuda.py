"""HOST to and from a GPU's memory: asynchronous copies on streams of their own.

Each transfer thread has a stream for loads and one for saves. Before it copies, a stream waits for
all that compute had been given by then: a block is never saved before it is written, nor loaded
over while a step still reads what lay there. The thread then waits for its own copies alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.transfer.io import Moved, Seals
from penstock.types import Direction, Slot, Transfer, Verdict
from penstock.units import format_bytes

_cuda: Any = torch.cuda  # carries no types


class CudaMover:
    def __init__(self, device: DevicePool, host: HostArena, seals: Seals) -> None:
        self._device = device.tensor.device
        self._blocks = device.tensor.view(torch.uint8).view(device.num_slots, device.block_bytes)
        self._slots = _pinned(host)
        self._host = host
        self._seals = seals
        self._streams = threading.local()

    def move(self, transfer: Transfer) -> Moved:
        keys, sources, targets = transfer.keys, transfer.source_slots, transfer.target_slots
        if transfer.direction is Direction.LOAD:
            self._copy(self._slots, sources, self._blocks, targets, Direction.LOAD)
            # After the copy: a slot that changed under it has lost its seal by now.
            return Moved(self._seals.verdicts(keys, sources))
        self._seals.open(targets)
        self._copy(self._blocks, sources, self._slots, targets, Direction.SAVE)
        self._seals.seal(keys, targets)
        return Moved([Verdict.OK] * len(keys))

    def close(self) -> None:
        _cuda.cudart().cudaHostUnregister(self._host.address)

    def _copy(
        self,
        source: torch.Tensor,
        sources: Sequence[Slot],
        target: torch.Tensor,
        targets: Sequence[Slot],
        direction: Direction,
    ) -> None:
        stream = self._stream(direction)
        with torch.cuda.stream(stream), torch.inference_mode():
            stream.wait_stream(torch.cuda.default_stream(self._device))
            for from_slot, to_slot in zip(sources, targets, strict=True):
                target[to_slot].copy_(source[from_slot], non_blocking=True)
        stream.synchronize()

    def _stream(self, direction: Direction) -> torch.cuda.Stream:
        streams = getattr(self._streams, "by_direction", None)
        if streams is None:
            streams = {
                # A request waits for a load; nobody waits for a save.
                Direction.LOAD: _cuda.Stream(self._device, priority=-1),
                Direction.SAVE: _cuda.Stream(self._device, priority=0),
            }
            self._streams.by_direction = streams
        stream: torch.cuda.Stream = streams[direction]
        return stream


def _pinned(host: HostArena) -> torch.Tensor:
    """The arena as a tensor [slots, block_bytes] of locked pages, which the GPU reads by itself."""
    error = _cuda.cudart().cudaHostRegister(host.address, host.num_bytes, 0)
    if int(error) != 0:
        raise ConfigError(
            f"{format_bytes(host.num_bytes)} of DRAM cannot be pinned for the GPU (CUDA error "
            f"{int(error)}); lower host.size, or raise the limit on locked memory (ulimit -l)."
        )
    flat = torch.frombuffer(host.buffer, dtype=torch.uint8)
    return flat.view(host.num_slots, host.stride_bytes)[:, : host.block_bytes]
