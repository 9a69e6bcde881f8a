"""Copies between HOST and the engine's pool on a GPU.

Each direction has a link (see `cuda_link`) and a thread that waits for its copies to end. Several
transfers are queued on the link's streams ahead of the running one, so the link never waits for
Python. Before a copy, the stream waits for everything that had been launched for computing when the
transfer was queued: a block is never saved before it is computed, nor overwritten while a step
still reads it. Later steps run in parallel with the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from penstock.codecs.base import BlockCodec
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.transfer.cuda_link import CopyAll, DeviceLink, QueuedCopies, new_streams
from penstock.transfer.cuda_stages import make_stages
from penstock.transfer.io import Mover, MoveResult
from penstock.transfer.paged import PagedMemory, PageStretch, Part, PartPlace
from penstock.transfer.pinning import PinnedSlots
from penstock.transfer.pool import DaemonPool
from penstock.transfer.seals import Seals
from penstock.types import BlockKey, Direction, Slot, Transfer, Verdict

_cuda: Any = torch.cuda  # has no type annotations


class CudaMover(Mover):
    max_ahead = 8  # about 20 ms at 128 MiB each; queued copies cannot be cancelled

    def __init__(
        self,
        device: DevicePool,
        host: HostArena,
        seals: Seals,
        codec: BlockCodec | None = None,
        copy_all: CopyAll | None = None,
    ) -> None:
        self._gpu = device.tensor.device
        self._host = host
        stretch = PageStretch(device.address, device.stride_bytes, device.block_bytes)
        memory = PagedMemory((stretch,), device.num_slots)
        packing = None if codec is None or not codec.version else codec.parts[0]
        part = Part(memory, host, PartPlace(0, host.block_bytes), packing)
        self._pins = PinnedSlots(host, self._gpu)
        self._pins.start()
        self._seals = seals
        with _cuda.device(self._gpu):
            stages = make_stages(memory, self._gpu, packing)
            self._ways = {}
            for way, stream in new_streams().items():
                link = DeviceLink(part, host, way, stream, stages[way], self._gpu, copy_all)
                self._ways[way] = _Way(link, way, self._gpu)
        self._computed: Any = None  # recorded when a transfer was last queued

    def queued(self, transfer: Transfer) -> None:
        with _cuda.device(self._gpu):
            event = _cuda.Event()
            event.record(_cuda.default_stream())
        self._computed = event

    def move(self, transfer: Transfer) -> Future[MoveResult]:
        keys, sources, targets = transfer.keys, transfer.source_slots, transfer.target_slots
        way = self._ways[transfer.direction]
        judge: Callable[[QueuedCopies], list[Verdict]]
        if transfer.direction is Direction.LOAD:
            in_host, on_device = sources, targets

            def judge(_: QueuedCopies) -> list[Verdict]:
                # After the copy: a slot that was overwritten during it has lost its seal.
                return self._seals.verdicts(keys, sources)
        else:
            in_host, on_device = targets, sources
            self._seals.open(targets)
            judge = partial(self._seal, way.link, keys, targets)
        queue = partial(way.queue, in_host, on_device, self._computed, judge)
        if self._pins.has(in_host):
            return way.waiter.submit(queue())

        def queue_when_pinned() -> MoveResult:
            self._pins.wait_for(in_host)
            return queue()()

        return way.waiter.submit(queue_when_pinned)

    def remap(self, replace_memory: Callable[[], None]) -> None:
        """Unpin DRAM, and pin its new memory. Raises ConfigError if that cannot be pinned.

        No kernel reads DRAM now: none of its blocks is pinned for reading.
        """
        _cuda.synchronize(self._gpu)
        self._pins.close()
        try:
            replace_memory()
        finally:
            self._pins = PinnedSlots(self._host, self._gpu)
            self._pins.start()

    def close(self) -> None:
        for way in self._ways.values():
            way.waiter.close()
        self._pins.close()

    def _seal(
        self,
        link: DeviceLink,
        keys: Sequence[BlockKey],
        slots: Sequence[Slot],
        queued: QueuedCopies,
    ) -> list[Verdict]:
        verdicts = link.saved(slots, queued)
        sound = [index for index, verdict in enumerate(verdicts) if verdict is Verdict.OK]
        self._seals.seal([keys[index] for index in sound], [slots[index] for index in sound])
        return verdicts


class _Way:
    """One direction of the link, and the thread that waits for its copies."""

    def __init__(self, link: DeviceLink, direction: Direction, gpu: Any) -> None:
        self.link = link
        self._gpu = gpu
        # The owner queues copies, and the waiter those whose DRAM had to be pinned first. A
        # buffer's events have the right order only if one of them is queued as a whole.
        self._lock = threading.Lock()
        self.waiter = DaemonPool(1, f"penstock-gpu-{direction.value}")

    def queue(
        self,
        in_host: Sequence[Slot],
        on_device: Sequence[Slot],
        after: Any,
        judge: Callable[[QueuedCopies], list[Verdict]],
    ) -> Callable[[], MoveResult]:
        """Queue copies after earlier ones and after `after`. The result waits for them to end."""
        link = self.link
        with self._lock, _cuda.device(self._gpu):
            # Blocking events: a thread that spins would slow down the one that computes.
            began, ended = (_cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
            link.first.wait_event(after)
            link.last.wait_event(after)
            began.record(link.first)
            try:
                queued = link.queue(in_host, on_device)
            except Exception:
                # Copies queued before the error still write.
                link.first.synchronize()
                link.last.synchronize()
                raise
            ended.record(link.last)

        def finish() -> MoveResult:
            ended.synchronize()
            # The time of the copies alone, without waiting for earlier work.
            seconds = float(began.elapsed_time(ended)) / 1e3
            return MoveResult(judge(queued), seconds=seconds)

        return finish
