"""Copies that run in parallel with vLLM's computation: starting, polling and fencing them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from penstock.clock import SystemClock
from penstock.transfer.engine import TransferEngine
from penstock.transfer.io import Mover
from penstock.transfer.lanes import LaneSpec
from penstock.types import Outcome, Tier, Transfer, TransferId


class Copier(Protocol):
    """For one owner: the thread that computes."""

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Start transfers of one direction. Never waits for a copy."""

    def poll(self) -> list[Outcome]:
        """Transfers that have ended since the last call."""

    def fence(self, transfer_ids: Sequence[TransferId]) -> None:
        """Make everything computed or loaded from now on wait for these transfers."""

    def start_timer(self, step: int) -> None: ...

    def stop_timer(self, step: int) -> None: ...

    def take_times(self) -> dict[int, float]:
        """Seconds of each timed step that has ended, by step."""

    def close(self) -> None: ...


class ThreadCopier:
    """Runs a mover on threads, for a device that the processor can address."""

    def __init__(self, mover: Mover, num_threads: int) -> None:
        lanes = {Tier.HOST: LaneSpec(mover, num_threads)}
        self._engine = TransferEngine(lanes, SystemClock(), max_queued=1 << 30)
        self._under_way: set[TransferId] = set()
        self._ended: list[Outcome] = []
        self._started: dict[int, float] = {}
        self._times: dict[int, float] = {}

    def submit(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            if not self._engine.submit(transfer):
                raise RuntimeError("the copying threads are stopped")
            self._under_way.add(transfer.id)

    def poll(self) -> list[Outcome]:
        self._take()
        ended, self._ended = self._ended, []
        return ended

    def fence(self, transfer_ids: Sequence[TransferId]) -> None:
        while not self._under_way.isdisjoint(transfer_ids):
            self._engine.wait(0.1)
            self._take()

    def start_timer(self, step: int) -> None:
        self._started[step] = time.perf_counter()

    def stop_timer(self, step: int) -> None:
        if (started := self._started.pop(step, None)) is not None:
            self._times[step] = time.perf_counter() - started

    def take_times(self) -> dict[int, float]:
        times, self._times = self._times, {}
        return times

    def close(self) -> None:
        self._engine.close()

    def _take(self) -> None:
        outcomes = self._engine.poll()
        self._under_way.difference_update(outcome.transfer_id for outcome in outcomes)
        self._ended += outcomes


class NoCopier:
    """Refuses all transfers, for a worker that cannot copy but must keep running."""

    def submit(self, transfers: Sequence[Transfer]) -> None:
        raise RuntimeError("this worker cannot copy blocks; see the log for the reason")

    def poll(self) -> list[Outcome]:
        return []

    def fence(self, transfer_ids: Sequence[TransferId]) -> None:
        pass

    def start_timer(self, step: int) -> None:
        pass

    def stop_timer(self, step: int) -> None:
        pass

    def take_times(self) -> dict[int, float]:
        return {}

    def close(self) -> None:
        pass
