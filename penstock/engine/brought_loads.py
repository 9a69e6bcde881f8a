"""Prompts in DRAM that are loaded within the step that computes the rest of them (see `bringing`).

Their load only pins blocks in HOST. The table has their device slots, which are empty until the
step: only when it is queued do the blocks get their names, so that others may share them. The pins
are removed when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.engine.admit import AdmissionPlan
from penstock.engine.announcer import Announcer
from penstock.engine.blocks import BlockPool
from penstock.engine.request import Request
from penstock.engine.tiers import EngineTiers
from penstock.types import Slot, Tier

_MEASURED_EVERY = 32  # loads: only a transfer measures the link
_LEAST_SECONDS = 0.005  # of a load, if the step has no graph: queueing its kernels takes longer


class BroughtLoads:
    def __init__(
        self,
        pool: BlockPool,
        tiers: EngineTiers | None,
        announcer: Announcer | None,
        max_blocks: Callable[[], int],
    ) -> None:
        """`max_blocks`: how many blocks a step may bring now."""
        self.max_blocks = max_blocks
        self._pool = pool
        self._tiers = tiers
        self._announcer = announcer
        self.num_loads = 0  # that suited
        self._reading: list[Slot] = []  # HOST slots that the step under way reads

    def suits(self, plan: AdmissionPlan, num_blocks: int, *, is_short: bool) -> bool:
        """Whether what is loaded for a request should be brought. Nothing else may be running.

        `num_blocks`: that the request has once its first chunk has been computed. `is_short`:
        whether that step has a graph (see `Runner.takes_apart`).
        """
        match, choice = plan.match, plan.choice
        num_loads = len(plan.into)
        if not match or match.num_pending or None in plan.into or choice.num_two_ended:
            return False
        first = match.runs[0]
        if first.tier is not Tier.HOST or num_loads > min(first.num_blocks, self.max_blocks()):
            return False
        # Blocks that arrive cannot leave the device to make room.
        if num_blocks - plan.num_shared - num_loads > self._pool.num_available:
            return False
        load, compute = choice.load_seconds, choice.compute_seconds
        if load is None or compute is None or load >= compute:
            return False  # it is loaded to measure the link
        if load < _LEAST_SECONDS and not is_short:
            return False
        self.num_loads += 1
        return self.num_loads % _MEASURED_EVERY > 0

    def arrive(
        self, request: Request, into: Sequence[Slot | None], pins: Sequence[Slot | None]
    ) -> None:
        """The blocks are pinned: the request's next step brings them."""
        slots = [slot for slot in into if slot is not None]
        request.table.extend_arriving(slots, [pin for pin in pins if pin is not None])

    def queued(self, request: Request) -> None:
        """A step of the request is queued."""
        table = request.table
        if not table.arriving_pins:
            return
        arriving = table.arriving
        self._reading += table.end_arriving()
        if self._announcer is not None:
            self._announcer.completes(request, arriving)
        for index in arriving:
            self._pool.name(table.slot(index), request.chain.keys[index])
        request.num_named = arriving.stop

    def ended(self) -> None:
        """The step under way has ended."""
        reading, self._reading = self._reading, []
        if reading:
            assert self._tiers is not None
            self._tiers.unpin(reading)

    def stay_in_host(self, request: Request) -> bool:
        """If a request has blocks that arrive, let them be cold instead: it needs their room."""
        arriving = request.table.arriving
        if not arriving:
            return False
        request.num_named = arriving.stop
        self._pool.release(request.table.chill_arriving())
        return True
