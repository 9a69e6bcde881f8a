"""Guards a worker's side: an error of ours loses blocks, but no request waits forever.

A step's orders are recorded here before they are passed on to be copied. After an unexpected error
nothing is copied any more, and all current and later orders are reported as failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from penstock.connectors.vllm.orders import Orders, Reports
from penstock.connectors.vllm.promises import Promises, Results
from penstock.connectors.vllm.worker import WorkerSide
from penstock.stores.host import ArenaHandle
from penstock.transfer.copiers import Copier, NoCopier

log = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0


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
        self._arena: ArenaHandle | None = None  # that the copier has opened
        self._next_try = 0.0

    def begin(self, orders: Orders) -> None:
        """Before anything of a step is computed."""
        if self._side is None:
            self._side = self._open(orders)
        elif self._is_elsewhere(orders):
            # The node was restarted. Until its memory is open here, nothing is copied.
            self._run(lambda side: side.change_copier(self._make_copier(orders)))
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
        return WorkerSide(self._make_copier(orders), self._promises)

    def _make_copier(self, orders: Orders) -> Copier:
        if orders.arena is None:
            return NoCopier()
        try:
            copier = self._open_copier(orders)
            self._arena = orders.arena
        except Exception:
            log.exception("This worker cannot open the shared DRAM, so it loads and saves nothing")
            self._arena = None
            self._next_try = time.monotonic() + _RETRY_SECONDS
            return NoCopier()
        return copier

    def _is_elsewhere(self, orders: Orders) -> bool:
        """Whether orders refer to memory of a node that is not open here."""
        arena = orders.arena
        if arena is None or not arena.token or arena == self._arena or self._has_given_up:
            return False
        # Never copy with the memory of another session; but do not try to join at every step.
        return self._arena is not None or time.monotonic() >= self._next_try

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
