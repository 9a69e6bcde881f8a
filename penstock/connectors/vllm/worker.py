"""A worker's side: copies between its device and the DRAM that all share.

A step's hooks come in this order: `begin` (saves that must come first, and the fence), `load`,
the forward pass, `save`, `results`. Copies run beside the computation; `results` only asks which
have ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.connectors.vllm.orders import Orders, Report, Reports
from penstock.transfer.copiers import Copier, NoCopier
from penstock.transfer.seals import Seals
from penstock.types import Outcome, Slot, Transfer, TransferId, Verdict

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 0.003  # vLLM sleeps 1 ms after a step without computation, and takes several
_LOOK_SECONDS = 0.00005
_STEPS_UNTIL_HEARD = 3  # steps overlap


@dataclass(slots=True)
class _Waiting:
    """A request that waits for its blocks."""

    num_under_way: int = 0
    is_complete: bool = False  # no further load will come
    bad: set[Slot] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        return self.is_complete and self.num_under_way == 0


class Results(NamedTuple):
    """What vLLM is told: requests whose load has ended, and blocks that did not arrive."""

    ready: set[str]
    bad_blocks: set[int]


class WorkerSide:
    def __init__(self, copier: Copier, seals: Seals | None = None) -> None:
        self._copier = copier
        self._seals = seals
        self._bad_now: set[int] = set()  # of loads that the step itself waited for
        self._distrusted_steps = 0  # up to this one, nothing is saved
        self._waiting: dict[str, _Waiting] = {}
        self._loads: dict[TransferId, tuple[str, Transfer]] = {}
        self._now: dict[TransferId, Transfer] = {}
        self._under_way: dict[TransferId, Transfer] = {}
        self._reports = Reports()
        self._saved_step = 0
        self._has_complained = False  # once is enough: it may be so at every step
        self._num_steps = 0
        self._last_ready: dict[str, int] = {}  # and in which step they were reported

    def begin(self, orders: Orders) -> None:
        self._expect(orders.saves_before)
        if orders.saves_before:
            self._save(orders.saves_before, orders.step)
        if orders.fence:
            self._copier.fence(orders.fence)
        if orders.is_timed:
            self._copier.start_timer(orders.step)

    def load(self, orders: Orders) -> None:
        self._num_steps += 1
        self._expect_loads(orders)
        if orders.loads_now:
            self._load_now(orders.loads_now)
        if self._bad_now:
            # What is computed from them is wrong, until vLLM has heard of it and begun anew.
            self._distrusted_steps = orders.step + _STEPS_UNTIL_HEARD
        by_request: dict[str, list[Transfer]] = {}
        for request_id, transfer in orders.loads:
            by_request.setdefault(request_id, []).append(transfer)
        for transfers in by_request.values():
            self._submit(transfers)

    def save(self, orders: Orders) -> None:
        """Called once or twice a step: only the first call counts."""
        if orders.step == self._saved_step:
            return
        self._saved_step = orders.step
        self._expect(orders.saves_after)
        if orders.is_timed:
            self._copier.stop_timer(orders.step)
        if orders.saves_after:
            self._save(orders.saves_after, orders.step)

    def results(self, *, is_idle: bool = False) -> Results:
        """What has ended. With nothing to compute, a load's end is worth waiting for a little."""
        self._poll()
        if is_idle and self._loads:
            end = time.monotonic() + _PATIENCE_SECONDS
            while not self._num_ready and self._loads and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS)
                self._poll()
        self._reports.step_seconds.update(self._copier.take_times())
        ready = {name for name, waiting in self._waiting.items() if waiting.is_ready}
        oldest = self._num_steps - _STEPS_UNTIL_HEARD
        self._last_ready = {n: step for n, step in self._last_ready.items() if step >= oldest}
        bad, self._bad_now = self._bad_now, set()
        for request_id in ready:
            bad.update(self._waiting.pop(request_id).bad)
            self._last_ready[request_id] = self._num_steps
        return Results(ready, bad)

    def take_reports(self) -> Reports:
        reports, self._reports = self._reports, Reports()
        return reports

    def close(self) -> None:
        self._copier.close()

    def give_up(self) -> None:
        """After an error that nobody foresaw: what is under way is lost, and nothing follows."""
        copier, self._copier = self._copier, NoCopier()
        try:
            copier.close()  # no copy may write to blocks that are computed anew
        except Exception:
            log.exception("the copies could not be ended")
        self._fail(list(self._under_way.values()), "this worker has given up")

    def _expect(self, transfers: Sequence[Transfer]) -> None:
        """Before anything is copied: whatever goes wrong, each of them is reported."""
        self._under_way |= {transfer.id: transfer for transfer in transfers}

    def _expect_loads(self, orders: Orders) -> None:
        self._bad_now.update(orders.bad_now)
        self._now |= {transfer.id: transfer for transfer in orders.loads_now}
        self._expect(orders.loads_now)
        for request_id, transfer in orders.loads:
            self._waiting.setdefault(request_id, _Waiting()).num_under_way += 1
            self._loads[transfer.id] = (request_id, transfer)
        self._expect([load.transfer for load in orders.loads])
        for request_id, bad in orders.complete.items():
            if orders.is_last_resort and self._is_being_heard(request_id):
                continue
            waiting = self._waiting.setdefault(request_id, _Waiting())
            waiting.is_complete = True
            waiting.bad.update(bad)

    def _is_being_heard(self, request_id: str) -> bool:
        """vLLM is about to hear that a request is ready, and must not hear it twice."""
        reported = self._last_ready.get(request_id)
        is_new = reported is not None and self._num_steps - reported <= _STEPS_UNTIL_HEARD
        return is_new and request_id not in self._waiting

    def _load_now(self, transfers: Sequence[Transfer]) -> None:
        """What is computed next waits for these. Identity is looked at before, not after."""
        if self._seals is not None:
            for transfer in transfers:
                verdicts = self._seals.verdicts(transfer.keys, transfer.source_slots)
                self._bad_now.update(_not_ok(transfer.target_slots, verdicts))
        self._submit(transfers)
        self._copier.fence([transfer.id for transfer in transfers])
        self._poll()  # where the fence waited, a copy that failed is known now

    def _save(self, transfers: Sequence[Transfer], step: int) -> None:
        if step <= self._distrusted_steps:
            self._fail(transfers, "computed from blocks that did not arrive")
        else:
            self._submit(transfers)

    def _poll(self) -> None:
        for outcome in self._copier.poll():
            self._end(outcome)

    @property
    def _num_ready(self) -> int:
        return sum(waiting.is_ready for waiting in self._waiting.values())

    def _submit(self, transfers: Sequence[Transfer]) -> None:
        try:
            self._copier.submit(transfers)
        except Exception as error:  # its blocks are lost, and nothing else
            if not self._has_complained:
                log.exception("copies between device and DRAM cannot be started")
            self._has_complained = True
            self._fail(transfers, repr(error))

    def _fail(self, transfers: Sequence[Transfer], error: str) -> None:
        for transfer in transfers:
            verdicts = (Verdict.FAILED,) * len(transfer.keys)
            self._end(Outcome(transfer.id, verdicts, 0.0, error))

    def _end(self, outcome: Outcome) -> None:
        self._under_way.pop(outcome.transfer_id, None)
        self._reports.transfers[outcome.transfer_id] = Report(
            outcome.verdicts, outcome.seconds, outcome.error
        )
        if (now := self._now.pop(outcome.transfer_id, None)) is not None:
            self._bad_now.update(_not_ok(now.target_slots, outcome.verdicts))
            return
        loaded = self._loads.pop(outcome.transfer_id, None)
        if loaded is None:
            return
        request_id, transfer = loaded
        waiting = self._waiting[request_id]
        waiting.num_under_way -= 1
        waiting.bad.update(_not_ok(transfer.target_slots, outcome.verdicts))


def _not_ok(slots: Sequence[Slot], verdicts: Sequence[Verdict]) -> Iterator[Slot]:
    return (
        slot for slot, verdict in zip(slots, verdicts, strict=True) if verdict is not Verdict.OK
    )
