"""Guards the scheduler's side: an error of ours ends offloading, but never fails a request.

After an unexpected error the books cannot be trusted. vLLM may still wait for loads: each of them
ends with all of its blocks reported bad, so that vLLM computes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from penstock.connectors.vllm.orders import Orders, Reports
from penstock.connectors.vllm.scheduler import SchedulerSide, StepPlan
from penstock.connectors.vllm.tracked import Tables
from penstock.types import Slot, Tier

log = logging.getLogger(__name__)

T = TypeVar("T")


class GuardedScheduler:
    def __init__(self, side: SchedulerSide, block_tokens: int | None) -> None:
        """`block_tokens` is None for several groups: then a load fails as a whole."""
        self._side: SchedulerSide | None = side
        self._abandoned: SchedulerSide | None = None
        self._block_tokens = block_tokens
        self._starts: dict[str, int] = {}  # by request: the tokens before those to load
        self._awaited: dict[str, tuple[Slot, ...]] = {}  # loads that vLLM has not seen end
        self._confirmed: list[str] = []  # loads that it has, for the workers

    @property
    def side(self) -> SchedulerSide | None:
        """None after offloading has ended."""
        return self._side

    def lookup(self, request: Any, num_computed: int) -> int | None:
        """How many tokens to load. None: ask again at the next step."""
        self._starts[request.request_id] = num_computed
        none_found: int | None = 0
        return self.ask(none_found, lambda side: side.lookup(request, num_computed))

    def allocated(self, request: Any, tables: Tables, num_external: int) -> None:
        start = self._starts.pop(request.request_id, 0)
        if num_external:  # from now on vLLM waits for them, whatever happens
            loaded = [block for table in tables for block in table]
            if self._block_tokens is not None:
                end = start + num_external
                loaded = loaded[start // self._block_tokens : -(-end // self._block_tokens)]
            self._awaited[request.request_id] = tuple(map(Slot, loaded))
        self.ask(None, lambda side: side.allocated(request, tables, num_external))

    def orders(self, plan: Callable[[], StepPlan]) -> Orders:
        orders = self.ask(None, lambda side: side.orders(plan()))
        if orders is None:
            orders = Orders(-1, complete=dict(self._awaited), is_last_resort=True)
        orders.confirmed, self._confirmed = self._confirmed, []
        return orders

    def report(self, reports: Reports, ready: Iterable[str]) -> None:
        """The workers' reports, and the requests whose load vLLM has seen end."""
        ready = list(ready)
        for request_id in ready:
            self._awaited.pop(request_id, None)
        self._confirmed += ready
        self.ask(None, lambda side: side.report(reports, ready))

    def finished(self, request: Any, tables: Tables = ()) -> dict[str, Any] | None:
        self._starts.pop(request.request_id, None)
        return self.ask(None, lambda side: side.finished(request, tables))

    def sources(self, request_id: str) -> dict[Tier, int]:
        return self.ask({}, lambda side: side.sources(request_id))

    @property
    def has_pending_work(self) -> bool:
        # After offloading has ended, steps must still tell workers which loads to give up: until
        # then vLLM keeps the blocks of requests that were aborted while they waited.
        return self.ask(bool(self._awaited), lambda side: side.has_pending_work)

    def reset(self) -> None:
        """Forget all KV. Nothing to do after offloading has ended: nothing is offered then."""
        self.ask(None, lambda side: side.reset())

    def close(self) -> bool:
        """False if a tier hung."""
        has_ended = self.ask(True, lambda side: side.close())
        self._side = None
        return has_ended

    def ask(self, otherwise: T, act: Callable[[SchedulerSide], T]) -> T:
        """The result of `act`. After an error offloading ends, and `otherwise` is returned."""
        if self._side is None:
            return otherwise
        try:
            if self._side.failure is not None:
                raise self._side.failure
            return act(self._side)
        except Exception:
            self._end_offloading(self._side)
            return otherwise

    def _end_offloading(self, side: SchedulerSide) -> None:
        log.exception(
            "Unexpected error in Penstock: offloading is off until a restart. vLLM continues "
            "without it. Please report this."
        )
        # Keep a reference, which keeps the DRAM mapped: workers may still copy from or to it.
        self._abandoned, self._side = side, None
        side.abandon()
