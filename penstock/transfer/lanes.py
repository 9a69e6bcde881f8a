"""Lanes: the queues of one link, and how their transfers are run.

Most movers block, and run on threads. A mover that only queues copies on a device is fed instead:
by the thread that submits a transfer, and by the thread that learns that one has ended. An extra
thread would first have to wait for the GIL, while the link is idle.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.transfer.asking import Exists
from penstock.transfer.io import Mover, MoveResult
from penstock.types import Direction, Outcome, Tier, Transfer, TransferId, Verdict

log = logging.getLogger(__name__)

_Report = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class LaneSpec:
    mover: Mover
    num_threads: int  # ignored if the mover is fed
    exists: Exists | None = None  # for a tier that other instances write to


class Lane(ABC):
    """The queues of one link; subclasses decide which thread runs a transfer."""

    def __init__(self, mover: Mover, clock: Clock, max_queued: int, report: _Report) -> None:
        self._mover = mover
        self._clock = clock
        self._max_queued = max_queued
        self._report = report
        self._queues: dict[Direction, deque[Transfer]] = {
            Direction.LOAD: deque(),
            Direction.SAVE: deque(),
        }
        self._running: dict[TransferId, Transfer] = {}
        self._lock = threading.Lock()
        self._stopping = False

    def has_room(self, direction: Direction) -> bool:
        return not self._stopping and len(self._queues[direction]) < self._max_queued

    def depth(self, direction: Direction) -> int:
        return len(self._queues[direction])

    def submit(self, transfer: Transfer) -> bool:
        with self._lock:
            if not self.has_room(transfer.direction):
                return False
            self._mover.queued(transfer)
            self._queues[transfer.direction].append(transfer)
        self._wake(transfer.direction)
        return True

    def cancel(self, transfer_id: TransferId) -> None:
        with self._lock:
            for queue in self._queues.values():
                for transfer in queue:
                    if transfer.id == transfer_id:
                        queue.remove(transfer)
                        self._report(_all(transfer, Verdict.CANCELLED))
                        return

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            loads = self._queues[Direction.LOAD]
            while loads:
                self._report(_all(loads.popleft(), Verdict.CANCELLED))

    def join(self, deadline: float) -> bool:
        """Wait for all transfers to end, and close the mover. False if some have not in time."""
        while (self._running or any(self._queues.values())) and time.monotonic() < deadline:
            time.sleep(0.001)
        ended = not self._running and not any(self._queues.values())
        if ended:
            self._mover.close()
        return ended

    @abstractmethod
    def _wake(self, direction: Direction) -> None:
        """Called after a transfer was queued, or has ended and made room for another."""

    def _take(self, direction: Direction) -> Transfer | None:
        """Move the next transfer from the queue to `_running`. The lock must be held."""
        if not self._queues[direction]:
            return None
        transfer = self._queues[direction].popleft()
        self._running[transfer.id] = transfer
        return transfer

    def _run(self, transfer: Transfer) -> None:
        if transfer.deadline is not None and self._clock.now() >= transfer.deadline:
            self._end(transfer, _all(transfer, Verdict.EXPIRED))
            return
        started = time.perf_counter()
        try:
            moved = self._mover.move(transfer)
        except Exception as error:  # a bug in a mover fails its blocks, but not the thread
            self._end(transfer, _failed(transfer, error))
            return
        if isinstance(moved, MoveResult):
            self._end(transfer, _outcome(transfer, moved, started))
        else:
            moved.add_done_callback(lambda f: self._end(transfer, _late(transfer, f, started)))

    def _end(self, transfer: Transfer, outcome: Outcome) -> None:
        self._report(outcome)
        with self._lock:
            del self._running[transfer.id]


class ThreadLane(Lane):
    """Threads that each run one transfer at a time, loads before saves."""

    def __init__(
        self, tier: Tier, spec: LaneSpec, clock: Clock, max_queued: int, report: _Report
    ) -> None:
        super().__init__(spec.mover, clock, max_queued, report)
        self._ready = threading.Condition(self._lock)
        # Daemons: a thread stuck on a dead disk must not keep the process from exiting.
        self._threads = [
            threading.Thread(target=self._work, name=f"penstock-{tier.label}-{n}", daemon=True)
            for n in range(spec.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        super().stop()
        with self._ready:
            self._ready.notify_all()

    def join(self, deadline: float) -> bool:
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        return super().join(deadline)

    def _wake(self, direction: Direction) -> None:
        with self._ready:
            self._ready.notify()

    def _work(self) -> None:
        while (transfer := self._next()) is not None:
            self._run(transfer)

    def _next(self) -> Transfer | None:
        with self._ready:
            while True:
                for direction in self._queues:
                    if (transfer := self._take(direction)) is not None:
                        return transfer
                if self._stopping:
                    return None
                self._ready.wait()


class FedLane(Lane):
    """No threads: the mover is given up to `max_ahead` transfers of each direction at once."""

    def __init__(
        self, mover: Mover, max_ahead: int, clock: Clock, max_queued: int, report: _Report
    ) -> None:
        super().__init__(mover, clock, max_queued, report)
        self._max_ahead = max_ahead
        self._num_ahead = dict.fromkeys(Direction, 0)
        self._is_fed = dict.fromkeys(Direction, False)

    def _wake(self, direction: Direction) -> None:
        with self._lock:
            if self._is_fed[direction]:
                return  # by another thread or an outer call, which will check the queue again
            self._is_fed[direction] = True
        while (transfer := self._next(direction)) is not None:
            self._run(transfer)

    def _next(self, direction: Direction) -> Transfer | None:
        with self._lock:
            has_room = self._num_ahead[direction] < self._max_ahead
            transfer = self._take(direction) if has_room else None
            if transfer is None:
                self._is_fed[direction] = False
            else:
                self._num_ahead[direction] += 1
            return transfer

    def _end(self, transfer: Transfer, outcome: Outcome) -> None:
        super()._end(transfer, outcome)
        with self._lock:
            self._num_ahead[transfer.direction] -= 1
        self._wake(transfer.direction)


def _outcome(transfer: Transfer, moved: MoveResult, started: float) -> Outcome:
    ended = time.perf_counter()
    seconds = ended - started if moved.seconds is None else moved.seconds
    return Outcome(transfer.id, tuple(moved.verdicts), seconds, moved.error, ended)


def _late(transfer: Transfer, future: Future[MoveResult], started: float) -> Outcome:
    error = future.exception()
    if error is not None:
        return _failed(transfer, error)
    return _outcome(transfer, future.result(), started)


def _failed(transfer: Transfer, error: BaseException) -> Outcome:
    log.error("transfer %d failed", transfer.id, exc_info=error)
    return _all(transfer, Verdict.FAILED, repr(error))


def _all(transfer: Transfer, verdict: Verdict, error: str = "") -> Outcome:
    return Outcome(transfer.id, (verdict,) * len(transfer.keys), 0.0, error)
