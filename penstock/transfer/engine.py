"""TransferEngine: runs transfers in bounded queues, loads before saves.

Each link (named by its lower tier) has a lane of its own, so that a hanging disk never blocks
copies from DRAM. The engine makes no decisions: it runs transfers, refuses them if a queue is full,
and reports each exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue

from penstock.clock import Clock
from penstock.transfer.asking import Asker
from penstock.transfer.lanes import FedLane, Lane, LaneSpec, ThreadLane
from penstock.types import Answer, Direction, Outcome, Question, Tier, Transfer, TransferId


class TransferEngine:
    """Implements `Transfers`. For one owner: `submit`, `cancel` and `poll` never block."""

    def __init__(
        self,
        lanes: Mapping[Tier, LaneSpec],
        clock: Clock,
        *,
        max_queued: int = 256,
        notify: Callable[[], None] | None = None,
    ) -> None:
        """`notify` is called on any thread when there is something to poll."""
        self._outcomes: SimpleQueue[Outcome | Answer] = SimpleQueue()
        self._notify = notify
        # Taken from the queue by `wait`, and returned by the next `poll`.
        self._awaited: list[Outcome | Answer] = []
        self._answers: list[Answer] = []
        self._lanes = {
            tier: _lane(tier, spec, clock, max_queued, self._put) for tier, spec in lanes.items()
        }
        self._askers = {
            tier: Asker(spec.exists, self._put)
            for tier, spec in lanes.items()
            if spec.exists is not None
        }

    def ask(self, question: Question) -> None:
        self._askers[question.tier].ask(question)

    def take_answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def has_room(self, link: Tier, direction: Direction) -> bool:
        return self._lanes[link].has_room(direction)

    def depth(self, link: Tier, direction: Direction) -> int:
        return self._lanes[link].depth(direction)

    def submit(self, transfer: Transfer) -> bool:
        return self._lanes[transfer.link].submit(transfer)

    def cancel(self, transfer_id: TransferId) -> None:
        for lane in self._lanes.values():
            lane.cancel(transfer_id)

    def poll(self) -> list[Outcome]:
        ended, self._awaited = self._awaited, []
        with suppress(Empty):
            while True:
                ended.append(self._outcomes.get_nowait())
        self._answers += [answer for answer in ended if isinstance(answer, Answer)]
        return [outcome for outcome in ended if isinstance(outcome, Outcome)]

    def wait(self, timeout_seconds: float) -> bool:
        if not self._awaited:
            with suppress(Empty):
                self._awaited.append(self._outcomes.get(timeout=timeout_seconds))
        return bool(self._awaited)

    def _put(self, ended: Outcome | Answer) -> None:
        self._outcomes.put(ended)
        if self._notify is not None:
            self._notify()

    def close(self, timeout_seconds: float = 10.0) -> bool:
        deadline = time.monotonic() + timeout_seconds
        for asker in self._askers.values():
            asker.close()
        for lane in self._lanes.values():
            lane.stop()
        return all(lane.join(deadline) for lane in self._lanes.values())


def _lane(
    tier: Tier, spec: LaneSpec, clock: Clock, max_queued: int, report: Callable[[Outcome], None]
) -> Lane:
    ahead = spec.mover.max_ahead
    if ahead is not None:
        return FedLane(spec.mover, ahead, clock, max_queued, report)
    return ThreadLane(tier, spec, clock, max_queued, report)
