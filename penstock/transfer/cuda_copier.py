"""Copies between a GPU's scattered blocks and shared DRAM, in parallel with vLLM's computation.

Uses no threads and never waits: the thread that computes queues copies on our own streams and later
queries an event to see whether they have ended. A save's stream first waits for everything launched
before it. A load need not wait, because nothing launched so far uses its target blocks; if such a
block is still being saved, the fence makes both streams wait for the save.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.stores.host import HostArena
from penstock.transfer.cuda_link import DeviceLink, QueuedCopies, StageBuffer, new_streams
from penstock.transfer.cuda_stages import make_stages
from penstock.transfer.paged import Part
from penstock.transfer.pinning import PinnedSlots
from penstock.transfer.seals import Seals
from penstock.types import Direction, Outcome, Slot, Transfer, TransferId, Verdict

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # has no type annotations


@dataclass(frozen=True, slots=True)
class _Flight:
    transfers: Sequence[Transfer]
    began: Any
    ended: Any
    queued: QueuedCopies


class CudaCopier:
    def __init__(
        self,
        part: Part,
        host: HostArena,
        seals: Seals,
        gpu: Any,
        stages: Mapping[Direction, Sequence[StageBuffer]] | None = None,
    ) -> None:
        self._seals = seals
        self._writes = part.writes
        stages = make_stages(part.device, gpu, part.codec) if stages is None else stages
        self._links = {
            direction: DeviceLink(part, host, direction, stream, stages[direction], gpu)
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
            queued = link.queue(slots, blocks)
        except Exception:
            _cuda.synchronize()  # copies queued before the error still write
            raise
        ended.record(link.last)
        self._flights[direction].append(_Flight(transfers, began, ended, queued))

    def _outcomes(self, flight: _Flight) -> list[Outcome]:
        seconds = flight.began.elapsed_time(flight.ended) / 1e3
        num_blocks = sum(len(transfer.keys) for transfer in flight.transfers)
        saved: list[Verdict] = []
        if flight.transfers[0].direction is Direction.SAVE:
            slots = [slot for transfer in flight.transfers for slot in transfer.target_slots]
            saved = self._links[Direction.SAVE].saved(slots, flight.queued)
        outcomes = []
        for transfer in flight.transfers:
            if transfer.direction is Direction.LOAD:
                # After the copy: a slot that was overwritten during it has lost its seal.
                verdicts = self._seals.verdicts(transfer.keys, transfer.source_slots)
            else:
                verdicts, saved = saved[: len(transfer.keys)], saved[len(transfer.keys) :]
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
