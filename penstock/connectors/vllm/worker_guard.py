"""Guards a worker's side: an error of ours loses blocks, but no request waits forever.

A step's orders are recorded here before they are passed on to be copied. After an unexpected error
nothing is copied any more, and all current and later orders are reported as failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.connectors.vllm.orders import Orders, Reports
from penstock.connectors.vllm.promises import Promises, Results
from penstock.connectors.vllm.worker import WorkerSide
from penstock.transfer.copiers import Copier, NoCopier

log = logging.getLogger(__name__)


class GuardedWorker:
    def __init__(
        self, open_copier: Callable[[Orders], Copier], *, saves_late: bool = False
    ) -> None:
        """`saves_late`: a step's results are asked for before its drafter has computed its KV."""
        self._open_copier = open_copier
        self._saves_late = saves_late
        self._promises = Promises()
        self._side: WorkerSide | None = None
        self._has_given_up = False

    def begin(self, orders: Orders) -> None:
        """Before anything of a step is computed."""
        if self._side is None:
            self._side = self._open(orders)
        self._promises.take_on(orders)
        self._run(lambda side: side.begin(orders))

    def load(self, orders: Orders) -> None:
        self._run(lambda side: side.load(orders))

    def save(self, orders: Orders) -> None:
        self._run(lambda side: side.save(orders))

    def results(self, orders: Orders | None) -> Results:
        """What to report to vLLM at the end of a step. `orders` is None if there was no step."""
        if orders is not None and not self._saves_late:
            self.save(orders)  # vLLM up to 0.31 does not call it in an empty step
        is_idle = orders is not None and orders.is_idle
        self._run(lambda side: side.poll(is_idle=is_idle))
        return self._promises.take_results()

    def take_reports(self) -> Reports:
        return self._promises.take_reports()

    def close(self) -> None:
        if self._side is not None:
            self._side.close()

    def _open(self, orders: Orders) -> WorkerSide | None:
        if orders.arena is None and not orders.is_last_resort:
            return None  # the scheduler's side is not open yet
        copier: Copier = NoCopier()
        if orders.arena is not None:
            try:
                copier = self._open_copier(orders)
            except Exception:
                log.exception(
                    "This worker cannot open the shared DRAM, so it loads and saves nothing"
                )
        return WorkerSide(copier, self._promises)

    def _run(self, act: Callable[[WorkerSide], None]) -> None:
        if self._side is None:
            return
        try:
            act(self._side)
        except Exception:
            self._give_up(self._side)

    def _give_up(self, side: WorkerSide) -> None:
        if not self._has_given_up:
            log.exception(
                "Unexpected error in Penstock: this worker stops copying until a restart. vLLM "
                "computes instead. Please report this."
            )
        self._has_given_up = True
        try:
            side.stop_copying()
        except Exception:
            log.exception("Copies under way could not be stopped")
        self._promises.fail_all("this worker stopped copying after an error")
