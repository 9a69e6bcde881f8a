"""A worker's side: copies between its device and the shared DRAM.

The order of calls in a step: `begin` (saves that must come first, and the fence), the forward pass,
`load`, `save`, `poll`. Copies run in parallel to the computation; `poll` only checks which have
ended. A step never reads what it loads: vLLM schedules a request after its load has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from penstock.connectors.vllm.orders import Orders
from penstock.connectors.vllm.promises import Promises
from penstock.transfer.copiers import Copier, NoCopier
from penstock.types import Transfer

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 0.003  # vLLM sleeps 1 ms after an empty step, and needs several steps
_POLL_SECONDS = 0.00005


class WorkerSide:
    def __init__(self, copier: Copier, promises: Promises) -> None:
        self._copier = copier
        self._promises = promises
        self._unsaved: Orders | None = None  # whose saves have not started
        self._has_complained = False  # log it once: it may happen at every step

    def begin(self, orders: Orders) -> None:
        if self._unsaved is not None:
            # With drafts, the stages of a pipeline before the last end a step without a save.
            self.save(self._unsaved)
        self._unsaved = orders
        if orders.saves_before:
            self._submit(orders.saves_before)
        if orders.fence:
            self._copier.fence(orders.fence)
        if orders.is_timed:
            self._copier.start_timer(orders.step)

    def load(self, orders: Orders) -> None:
        by_request: dict[str, list[Transfer]] = {}
        for request_id, transfer in orders.loads:
            by_request.setdefault(request_id, []).append(transfer)
        for transfers in by_request.values():
            self._submit(transfers)

    def save(self, orders: Orders) -> None:
        """Submit the saves after a step. A second call in the same step does nothing."""
        if self._unsaved is None or orders.step != self._unsaved.step:
            return
        self._unsaved = None
        if orders.is_timed:
            self._copier.stop_timer(orders.step)
        if orders.saves_after:
            self._submit(orders.saves_after)
            if orders.ends_saves:
                self._copier.fence([transfer.id for transfer in orders.saves_after])

    def poll(self, *, is_idle: bool = False) -> None:
        """Collect finished copies. An idle step waits briefly for a load, which saves a step."""
        self._take_outcomes()
        if is_idle and self._promises.is_loading:
            end = time.monotonic() + _PATIENCE_SECONDS
            while not self._promises.has_ready and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
                self._take_outcomes()
        self._promises.timed(self._copier.take_times())

    def change_copier(self, copier: Copier) -> None:
        """Copy to and from other memory from now on. No copy should be under way."""
        if self._unsaved is not None:
            self.save(self._unsaved)
        old, self._copier = self._copier, copier
        try:
            old.fence(self._promises.under_way)
            for outcome in old.poll():
                self._promises.end(outcome)
        finally:
            old.close()

    def close(self) -> None:
        self._copier.close()

    def stop_copying(self) -> None:
        """After an unexpected error: stop. Later submissions fail."""
        copier, self._copier = self._copier, NoCopier()
        try:
            copier.fence(self._promises.under_way)  # none may write to blocks that vLLM recomputes
        finally:
            copier.close()

    def _take_outcomes(self) -> None:
        for outcome in self._copier.poll():
            self._promises.end(outcome)

    def _submit(self, transfers: Sequence[Transfer]) -> None:
        try:
            self._copier.submit(transfers)
        except Exception as error:  # only these blocks are lost
            if not self._has_complained:
                log.exception("Copies between device and DRAM cannot be started")
            self._has_complained = True
            # Some may have started; they must not write to blocks that vLLM now computes.
            self._copier.fence([transfer.id for transfer in transfers])
            self._promises.fail(transfers, repr(error))
