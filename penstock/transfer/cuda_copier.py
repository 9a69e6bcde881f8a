"""Copies between a GPU's scattered blocks and shared DRAM, in parallel with vLLM's computation.

Uses no threads and never waits: the thread that computes queues copies on our own streams and later
queries an event to see whether they have ended. A save's stream first waits for everything launched
before it. A load need not wait, because nothing launched so far uses its target blocks; if such a
block is still being saved, the fence makes both streams wait for the save.

A block that is scattered over layers crosses the link in one piece, through one of two buffers on
the GPU: while one is on the link, a kernel fills or empties the other (see `cuda_stage`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.stores.host import HostArena
from penstock.transfer.cuda import Memory, best_copy, new_streams
from penstock.transfer.paged import PagedMemory, Part
from penstock.transfer.pinning import PinnedSlots
from penstock.transfer.seals import Seals
from penstock.types import Direction, Outcome, Slot, Transfer, TransferId, Verdict
from penstock.units import MiB

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # has no type annotations

_STAGE_BYTES = 32 * MiB  # size of each buffer; there are two per direction


class _Link:
    """One direction: a stream for copies, and buffers if blocks are scattered."""

    def __init__(
        self,
        part: Part,
        host: HostArena,
        direction: Direction,
        stream: Any,
        stages: Sequence[Any],
        gpu: Any,
    ) -> None:
        self.copies = stream
        self._part = part
        self._host = Memory(host.address, host.stride_bytes)
        self._direction = direction
        self._copy_all = best_copy()
        self._gpu = gpu
        self._buffers: list[_Buffer] = []
        if stages:
            self._kernels = _cuda.Stream(priority=stream.priority)
            self._buffers = [_Buffer(stage, _cuda.Event(), _cuda.Event()) for stage in stages]
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

    def queue(self, slots: Sequence[Slot], blocks: Sequence[Slot]) -> Any:
        """Queue the copies of all blocks. The result must be kept until they have ended."""
        if not self._buffers:
            self._queue_pieces(slots, blocks)
            return None
        with _cuda.stream(self._kernels):
            numbers = torch.tensor(blocks, dtype=torch.int64).pin_memory()
            numbers = numbers.to(self._gpu, non_blocking=True)
        size = self._buffers[0].stage.num_blocks
        for turn, start in enumerate(range(0, len(slots), size)):
            buffer = self._buffers[turn % len(self._buffers)]
            self._queue_staged(buffer, slots[start : start + size], numbers[start : start + size])
        return numbers

    def _queue_staged(self, buffer: _Buffer, slots: Sequence[Slot], numbers: Any) -> None:
        in_host = self._host.addresses(slots) + np.uint64(self._part.offset)
        in_stage = np.uint64(buffer.stage.address) + np.arange(len(slots), dtype=np.uint64) * (
            np.uint64(buffer.stage.block_bytes)
        )
        lengths = np.full(len(slots), buffer.stage.block_bytes, np.uint64)
        self.first.wait_event(buffer.is_free)
        if self._direction is Direction.LOAD:
            self._copy_all(in_stage, in_host, lengths, self.copies.cuda_stream)
            buffer.is_full.record(self.copies)
            self._kernels.wait_event(buffer.is_full)
            with _cuda.stream(self._kernels):
                buffer.stage.scatter(numbers)
        else:
            with _cuda.stream(self._kernels):
                buffer.stage.gather(numbers)
            buffer.is_full.record(self._kernels)
            self.copies.wait_event(buffer.is_full)
            self._copy_all(in_host, in_stage, lengths, self.copies.cuda_stream)
        buffer.is_free.record(self.last)

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
    stage: Any
    is_full: Any
    is_free: Any


def make_stages(memory: PagedMemory, gpu: Any) -> dict[Direction, list[Any]]:
    """Two buffers per direction; none if blocks are contiguous or cannot be staged.

    Compiles the kernels now, so that the first request does not wait for them.
    """
    stages: dict[Direction, list[Any]] = {direction: [] for direction in Direction}
    try:
        from penstock.transfer.cuda_stage import CopyStage, can_stage
    except ImportError:
        log.info("triton is not installed; blocks are copied layer by layer")
        return stages
    if can_stage(memory):
        num_blocks = max(1, _STAGE_BYTES // memory.block_bytes)
        for made in stages.values():
            made += [CopyStage(memory, num_blocks, gpu) for _ in range(2)]
        first = torch.zeros(1, dtype=torch.int64, device=gpu)
        stage = stages[Direction.SAVE][0]
        stage.gather(first)
        stage.scatter(first)  # writes back the same bytes
        _cuda.synchronize()
    return stages


@dataclass(frozen=True, slots=True)
class _Flight:
    transfers: Sequence[Transfer]
    began: Any
    ended: Any
    kept: Any  # keeps memory that the copies use


class CudaCopier:
    def __init__(
        self,
        part: Part,
        host: HostArena,
        seals: Seals,
        gpu: Any,
        stages: Mapping[Direction, Sequence[Any]] | None = None,
    ) -> None:
        self._seals = seals
        self._writes = part.writes
        stages = make_stages(part.device, gpu) if stages is None else stages
        self._links = {
            direction: _Link(part, host, direction, stream, stages[direction], gpu)
            for direction, stream in new_streams().items()
        }
        self._flights: dict[Direction, deque[_Flight]] = {d: deque() for d in Direction}
        self._held: deque[Sequence[Transfer]] = deque()  # waiting until their DRAM is pinned
        self._ended: list[Outcome] = []  # without a copy
        self._timers: dict[int, tuple[Any, Any]] = {}
        self._pins = PinnedSlots(host, gpu)
        self._pins.start_in_background()

    def submit(self, transfers: Sequence[Transfer]) -> None:
        if not self._writes and transfers[0].direction is Direction.SAVE:
            # Another worker writes the same bytes.
            self._ended += [Outcome(t.id, (Verdict.OK,) * len(t.keys)) for t in transfers]
        elif self._is_pinned(transfers):
            self._start(transfers)
        elif self._pins.error is not None:
            raise ConfigError(f"DRAM could not be pinned: {self._pins.error}")
        else:
            self._held.append(transfers)

    def poll(self) -> list[Outcome]:
        self._start_held()
        ended, self._ended = self._ended, []
        for flights in self._flights.values():
            while flights and flights[0].ended.query():
                ended += self._outcomes(flights.popleft())
        return ended

    def fence(self, transfer_ids: Sequence[TransferId]) -> None:
        wanted = set(transfer_ids)
        while any(t.id in wanted for transfers in self._held for t in transfers):
            self._start_held()
            time.sleep(0.001)
        for direction, flights in self._flights.items():
            for flight in flights:
                if any(transfer.id in wanted for transfer in flight.transfers):
                    _cuda.current_stream().wait_event(flight.ended)
                    if direction is Direction.SAVE:
                        self._links[Direction.LOAD].last.wait_event(flight.ended)

    def start_timer(self, step: int) -> None:
        began, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        self._timers[step] = (began, ended)

    def stop_timer(self, step: int) -> None:
        if step in self._timers:
            self._timers[step][1].record()

    def take_times(self) -> dict[int, float]:
        times = {}
        for step, (began, ended) in list(self._timers.items()):
            if not ended.query():
                break
            times[step] = began.elapsed_time(ended) / 1e3
            del self._timers[step]
        return times

    def close(self) -> None:
        _cuda.synchronize()
        self._pins.close()

    def _is_pinned(self, transfers: Sequence[Transfer]) -> bool:
        return all(self._pins.has(_host_slots(transfer)) for transfer in transfers)

    def _start_held(self) -> None:
        while self._held and (self._pins.error is not None or self._is_pinned(self._held[0])):
            transfers = self._held.popleft()
            if self._pins.error is None:
                self._start(transfers)
                continue
            for transfer in transfers:
                verdicts = (Verdict.FAILED,) * len(transfer.keys)
                self._ended.append(Outcome(transfer.id, verdicts, 0.0, str(self._pins.error)))

    def _start(self, transfers: Sequence[Transfer]) -> None:
        direction = transfers[0].direction
        link = self._links[direction]
        slots = [slot for transfer in transfers for slot in _host_slots(transfer)]
        blocks = [slot for transfer in transfers for slot in _device_slots(transfer)]
        if direction is Direction.SAVE:
            link.first.wait_stream(_cuda.current_stream())
        began, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
        began.record(link.first)
        try:
            kept = link.queue(slots, blocks)
        except Exception:
            _cuda.synchronize()  # copies queued before the error still write
            raise
        ended.record(link.last)
        self._flights[direction].append(_Flight(transfers, began, ended, kept))

    def _outcomes(self, flight: _Flight) -> list[Outcome]:
        seconds = flight.began.elapsed_time(flight.ended) / 1e3
        num_blocks = sum(len(transfer.keys) for transfer in flight.transfers)
        outcomes = []
        for transfer in flight.transfers:
            verdicts = [Verdict.OK] * len(transfer.keys)
            if transfer.direction is Direction.LOAD:
                # After the copy: a slot that was overwritten during it has lost its seal.
                verdicts = self._seals.verdicts(transfer.keys, transfer.source_slots)
            share = seconds * len(transfer.keys) / num_blocks
            outcomes.append(Outcome(transfer.id, tuple(verdicts), share))
        return outcomes


def _host_slots(transfer: Transfer) -> Sequence[Slot]:
    if transfer.direction is Direction.LOAD:
        return transfer.source_slots
    return transfer.target_slots


def _device_slots(transfer: Transfer) -> Sequence[Slot]:
    if transfer.direction is Direction.LOAD:
        return transfer.target_slots
    return transfer.source_slots
