"""TransferEngine: bounded queues, loads before saves, lanes that run movers.

A lane serves one link (named by its lower tier), so that a disk that hangs never holds up copies
from DRAM. The engine decides nothing: it runs orders, refuses them when a queue is full, and
reports each exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue

from penstock.clock import Clock
from penstock.transfer.asking import Asker
from penstock.transfer.lanes import FedLane, Lane, LaneSpec, ThreadLane
from penstock.types import (
    Answer,
    Direction,
    Outcome,
    Question,
    Tier,
    Transfer,
    TransferId,
)


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
            tier: _lane(tier, spec, clock, max_queued, self._outcomes.put)
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


def _lane(
    tier: Tier, spec: LaneSpec, clock: Clock, max_queued: int, report: Callable[[Outcome], None]
) -> Lane:
    ahead = spec.mover.max_ahead
    if ahead is not None:
        return FedLane(spec.mover, ahead, clock, max_queued, report)
    return ThreadLane(tier, spec, clock, max_queued, report)
