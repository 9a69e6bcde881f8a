"""What a worker owes: each transfer is reported once, each request is told to vLLM once.

Pure, and taken on before anything is copied, so that nothing that goes wrong afterwards can leave a
request waiting for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.connectors.vllm.orders import Orders, Reports
from penstock.transfer.delegate import Report
from penstock.types import Outcome, Slot, Transfer, TransferId, Verdict


class Results(NamedTuple):
    """What vLLM is told: requests whose load has ended, and blocks that did not arrive."""

    ready: set[str]
    bad_blocks: set[int]


@dataclass(slots=True)
class _Waiting:
    """A request that waits for its blocks."""

    num_under_way: int = 0
    is_complete: bool = False  # no further load will come
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
        self._told: set[str] = set()  # ready, and not yet known to have reached vLLM
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
        """Before anything of a step is done. A second call with the same orders changes nothing."""
        self._told.difference_update(orders.heard)
        if orders.is_last_resort:
            # vLLM asserts that it hears of a request once: those on their way to it are left out.
            self._complete({n: b for n, b in orders.complete.items() if n not in self._told})
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
        """A transfer has ended. The first outcome counts."""
        transfer = self._under_way.get(outcome.transfer_id)
        if transfer is None:
            return
        # Before anything is taken off the list: what raises here is failed with all the rest.
        pairs = list(zip(transfer.target_slots, outcome.verdicts, strict=True))
        del self._under_way[outcome.transfer_id]
        self._reports.transfers[outcome.transfer_id] = Report(
            outcome.verdicts, outcome.seconds, outcome.error
        )
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
        """Of everything that is under way nothing will arrive any more."""
        self.fail(list(self._under_way.values()), error)

    def timed(self, seconds: Mapping[int, float]) -> None:
        self._reports.step_seconds.update(seconds)

    def take_results(self) -> Results:
        ready = {name for name, waiting in self._waiting.items() if waiting.is_ready}
        bad: set[int] = set()
        for request_id in ready:
            bad.update(self._waiting.pop(request_id).bad)
        self._told |= ready
        return Results(ready, bad)

    def take_reports(self) -> Reports:
        reports, self._reports = self._reports, Reports()
        return reports

    def _complete(self, bad_blocks: Mapping[str, Sequence[Slot]]) -> None:
        for request_id, bad in bad_blocks.items():
            waiting = self._waiting.setdefault(request_id, _Waiting())
            waiting.is_complete = True
            waiting.bad.update(bad)
