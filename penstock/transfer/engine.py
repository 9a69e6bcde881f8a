"""TransferEngine: bounded queues, loads before saves, threads that run movers.

A lane serves one link (named by its lower tier) with threads of its own, so that a disk that
hangs never holds up copies from DRAM. The engine decides nothing: it runs orders, refuses them
when a queue is full, and reports each exactly once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from penstock.clock import Clock
from penstock.transfer.asking import Asker, Exists
from penstock.transfer.io import Moved, Mover
from penstock.types import (
    Answer,
    Direction,
    Outcome,
    Question,
    Tier,
    Transfer,
    TransferId,
    Verdict,
)

log = logging.getLogger(__name__)

_Report = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class LaneSpec:
    mover: Mover
    num_threads: int  # for each direction where the mover is duplex
    exists: Exists | None = None  # for a tier that others write to


class TransferEngine:
    """For one owner: `submit`, `cancel` and `poll` never block."""

    def __init__(
        self, lanes: Mapping[Tier, LaneSpec], clock: Clock, *, max_queued: int = 256
    ) -> None:
        self._outcomes: SimpleQueue[Outcome | Answer] = SimpleQueue()
        # Taken from the queue by `wait`, for the next `poll`.
        self._awaited: list[Outcome | Answer] = []
        self._answers: list[Answer] = []
        self._lanes = {
            tier: _Lane(tier, spec, clock, max_queued, self._outcomes.put)
            for tier, spec in lanes.items()
        }
        self._askers = {
            tier: Asker(spec.exists, self._outcomes.put)
            for tier, spec in lanes.items()
            if spec.exists is not None
        }

    def ask(self, question: Question) -> None:
        """Have a tier asked; `take_answers` tells."""
        self._askers[question.tier].ask(question)

    def take_answers(self) -> list[Answer]:
        """Those met by `poll` so far."""
        answers, self._answers = self._answers, []
        return answers

    def has_room(self, link: Tier, direction: Direction) -> bool:
        return self._lanes[link].has_room(direction)

    def depth(self, link: Tier, direction: Direction) -> int:
        """Transfers queued, not counting those that run."""
        return self._lanes[link].depth(direction)

    def submit(self, transfer: Transfer) -> bool:
        """Queue a transfer; False, and nothing queued, when its queue is full or closed."""
        return self._lanes[transfer.link].submit(transfer)

    def cancel(self, transfer_id: TransferId) -> None:
        """Drop a queued transfer; one that runs is left to end. Either way it is reported."""
        for lane in self._lanes.values():
            lane.cancel(transfer_id)

    def poll(self) -> list[Outcome]:
        """What has ended since the last call."""
        ended, self._awaited = self._awaited, []
        with suppress(Empty):
            while True:
                ended.append(self._outcomes.get_nowait())
        self._answers += [answer for answer in ended if isinstance(answer, Answer)]
        return [outcome for outcome in ended if isinstance(outcome, Outcome)]

    def wait(self, timeout_seconds: float) -> bool:
        """Block until there is something to poll."""
        if not self._awaited:
            with suppress(Empty):
                self._awaited.append(self._outcomes.get(timeout=timeout_seconds))
        return bool(self._awaited)

    def close(self, timeout_seconds: float = 10.0) -> bool:
        """Cancel queued loads, finish queued saves, stop the threads. False if one hangs."""
        deadline = time.monotonic() + timeout_seconds
        for asker in self._askers.values():
            asker.close()
        for lane in self._lanes.values():
            lane.stop()
        return all(lane.join(deadline) for lane in self._lanes.values())


class _Lane:
    def __init__(
        self, tier: Tier, spec: LaneSpec, clock: Clock, max_queued: int, report: _Report
    ) -> None:
        self._mover = spec.mover
        self._clock = clock
        self._max_queued = max_queued
        self._report = report
        self._queues: dict[Direction, deque[Transfer]] = {
            Direction.LOAD: deque(),
            Direction.SAVE: deque(),
        }
        self._lock = threading.Lock()
        # The threads of a duplex link serve one direction each, and wait for that alone.
        served = [list(self._queues)]
        if spec.mover.is_duplex:
            served = [[direction] for direction in self._queues]
        self._ready: dict[Direction, threading.Condition] = {}
        for directions in served:
            self._ready |= dict.fromkeys(directions, threading.Condition(self._lock))
        self._running: dict[TransferId, Transfer] = {}
        self._stopping = False
        # Daemons: a thread stuck in a dead disk must not keep the process from ending.
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(directions,),
                name=f"penstock-{tier.label}-{number}",
                daemon=True,
            )
            for directions in served
            for number in range(spec.num_threads)
        ]
        for thread in self._threads:
            thread.start()

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
            self._ready[transfer.direction].notify()
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
            for ready in self._ready.values():
                ready.notify_all()

    def join(self, deadline: float) -> bool:
        """Whether everything has ended in time; then the mover is closed too."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        while self._running and time.monotonic() < deadline:
            time.sleep(0.001)  # checksums of what was read last
        ended = not self._running and not any(thread.is_alive() for thread in self._threads)
        if ended:
            self._mover.close()
        return ended

    def _work(self, directions: Sequence[Direction]) -> None:
        while (transfer := self._next(directions)) is not None:
            if transfer.deadline is not None and self._clock.now() >= transfer.deadline:
                self._end(_all(transfer, Verdict.EXPIRED))
            else:
                self._run(transfer)

    def _next(self, directions: Sequence[Direction]) -> Transfer | None:
        with self._lock:
            while True:
                for direction in directions:  # loads first
                    if self._queues[direction]:
                        transfer = self._queues[direction].popleft()
                        self._running[transfer.id] = transfer
                        return transfer
                if self._stopping:
                    return None
                self._ready[directions[0]].wait()

    def _run(self, transfer: Transfer) -> None:
        started = time.perf_counter()
        try:
            moved = self._mover.move(transfer)
        except Exception as error:  # a mover's bug costs its blocks, never the thread
            self._end(_failed(transfer, error))
            return
        if isinstance(moved, Moved):
            self._end(_outcome(transfer, moved, started))
        else:
            moved.add_done_callback(lambda future: self._end(_late(transfer, future, started)))

    def _end(self, outcome: Outcome) -> None:
        self._report(outcome)
        del self._running[outcome.transfer_id]


def _outcome(transfer: Transfer, moved: Moved, started: float) -> Outcome:
    ended = time.perf_counter()
    seconds = ended - started if moved.seconds is None else moved.seconds
    return Outcome(transfer.id, tuple(moved.verdicts), seconds, moved.error, ended)


def _late(transfer: Transfer, future: Future[Moved], started: float) -> Outcome:
    error = future.exception()
    if error is not None:
        return _failed(transfer, error)
    return _outcome(transfer, future.result(), started)


def _failed(transfer: Transfer, error: BaseException) -> Outcome:
    log.error("transfer %d failed", transfer.id, exc_info=error)
    return _all(transfer, Verdict.FAILED, repr(error))


def _all(transfer: Transfer, verdict: Verdict, error: str = "") -> Outcome:
    return Outcome(transfer.id, (verdict,) * len(transfer.keys), 0.0, error)
