"""What a worker still has to report: each transfer once, and each loaded request once to vLLM.

Pure. Orders are recorded before anything is copied, so that no later error can leave a request
waiting forever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.connectors.vllm.orders import Orders, Reports
from penstock.types import Outcome, Slot, Transfer, TransferId, Verdict


class Results(NamedTuple):
    """What is reported to vLLM: requests whose load has ended, and blocks that failed."""

    ready: set[str]
    bad_blocks: set[int]
    failed: set[str]  # of those that are ready


@dataclass(slots=True)
class _Waiting:
    """A request that waits for its load."""

    num_under_way: int = 0
    is_complete: bool = False  # no further transfer will follow
    bad: set[Slot] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        return self.is_complete and self.num_under_way == 0


class Promises:
    def __init__(self) -> None:
        self._step = 0
        self._under_way: dict[TransferId, Transfer] = {}
        self._request_of: dict[TransferId, str] = {}  # of loads under way
        self._waiting: dict[str, _Waiting] = {}
        self._reported: set[str] = set()  # reported as ready, not yet confirmed by vLLM
        self._reports = Reports()

    @property
    def is_loading(self) -> bool:
        return bool(self._request_of)

    @property
    def under_way(self) -> list[TransferId]:
        return list(self._under_way)

    @property
    def has_ready(self) -> bool:
        return any(waiting.is_ready for waiting in self._waiting.values())

    def take_on(self, orders: Orders) -> None:
        """Record a step's orders before it does anything. A second call changes nothing."""
        self._reported.difference_update(orders.confirmed)
        if orders.is_last_resort:
            # vLLM asserts that a request is reported once: leave out those already reported.
            self._complete({n: b for n, b in orders.complete.items() if n not in self._reported})
            return
        if orders.step == self._step:
            return
        self._step = orders.step
        loads = [load.transfer for load in orders.loads]
        for transfer in (*orders.saves_before, *loads, *orders.saves_after):
            self._under_way[transfer.id] = transfer
        for request_id, transfer in orders.loads:
            self._request_of[transfer.id] = request_id
            self._waiting.setdefault(request_id, _Waiting()).num_under_way += 1
        self._complete(orders.complete)

    def end(self, outcome: Outcome) -> None:
        """A transfer has ended. Only the first outcome counts."""
        transfer = self._under_way.get(outcome.transfer_id)
        if transfer is None:
            return
        # Before any change: if this raises, the transfer still fails with all others.
        pairs = list(zip(transfer.target_slots, outcome.verdicts, strict=True))
        del self._under_way[outcome.transfer_id]
        # Without its end, which is a time of this process: the books measure in another.
        self._reports.outcomes.append(replace(outcome, ended=None))
        request_id = self._request_of.pop(outcome.transfer_id, None)
        if request_id is None:
            return
        waiting = self._waiting[request_id]
        waiting.num_under_way -= 1
        waiting.bad.update(slot for slot, verdict in pairs if verdict is not Verdict.OK)

    def fail(self, transfers: Sequence[Transfer], error: str) -> None:
        for transfer in transfers:
            self.end(Outcome(transfer.id, (Verdict.FAILED,) * len(transfer.keys), 0.0, error))

    def fail_all(self, error: str) -> None:
        """Report everything under way as failed."""
        self.fail(list(self._under_way.values()), error)

    def timed(self, seconds: Mapping[int, float]) -> None:
        self._reports.step_seconds.update(seconds)

    def take_results(self) -> Results:
        ready = {name for name, waiting in self._waiting.items() if waiting.is_ready}
        bad: set[int] = set()
        failed: set[str] = set()
        for request_id in ready:
            missing = self._waiting.pop(request_id).bad
            bad |= missing
            if missing:
                failed.add(request_id)
        self._reported |= ready
        return Results(ready, bad, failed)

    def take_reports(self) -> Reports:
        reports, self._reports = self._reports, Reports()
        return reports

    def _complete(self, bad_blocks: Mapping[str, Sequence[Slot]]) -> None:
        for request_id, bad in bad_blocks.items():
            waiting = self._waiting.setdefault(request_id, _Waiting())
            waiting.is_complete = True
            waiting.bad.update(bad)
