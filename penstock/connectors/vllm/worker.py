"""A worker's side: copies between its device and the DRAM that all share.

A step's hooks come in this order: `begin` (saves that must come first, and the fence), the forward
pass, `load`, `save`, `poll`. Copies run beside the computation; `poll` only asks which have ended.
Nothing that a step computes reads what it loads: vLLM schedules a request once its load has ended.
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

_PATIENCE_SECONDS = 0.003  # vLLM sleeps 1 ms after a step without computation, and takes several
_LOOK_SECONDS = 0.00005


class WorkerSide:
    def __init__(self, copier: Copier, promises: Promises) -> None:
        self._copier = copier
        self._promises = promises
        self._saved_step = 0
        self._has_complained = False  # once is enough: it may be so at every step

    def begin(self, orders: Orders) -> None:
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
        """Called once or twice a step: only the first call counts."""
        if orders.step == self._saved_step:
            return
        self._saved_step = orders.step
        if orders.is_timed:
            self._copier.stop_timer(orders.step)
        if orders.saves_after:
            self._submit(orders.saves_after)

    def poll(self, *, is_idle: bool = False) -> None:
        """See what has ended. With nothing to compute, a load is worth waiting for a little."""
        self._take_outcomes()
        if is_idle and self._promises.is_loading:
            end = time.monotonic() + _PATIENCE_SECONDS
            while not self._promises.has_ready and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS)
                self._take_outcomes()
        self._promises.timed(self._copier.take_times())

    def close(self) -> None:
        self._copier.close()

    def stop_copying(self) -> None:
        """After an unexpected error. What is submitted from now on fails."""
        copier, self._copier = self._copier, NoCopier()
        try:
            copier.fence(self._promises.under_way)  # none may write to blocks computed anew
        finally:
            copier.close()

    def _take_outcomes(self) -> None:
        for outcome in self._copier.poll():
            self._promises.end(outcome)

    def _submit(self, transfers: Sequence[Transfer]) -> None:
        try:
            self._copier.submit(transfers)
        except Exception as error:  # its blocks are lost, and nothing else
            if not self._has_complained:
                log.exception("copies between device and DRAM cannot be started")
            self._has_complained = True
            # Some may have begun, and must not write to blocks that vLLM computes from now on.
            self._copier.fence([transfer.id for transfer in transfers])
            self._promises.fail(transfers, repr(error))
