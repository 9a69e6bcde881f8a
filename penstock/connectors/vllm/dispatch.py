"""What the workers are told at the next step, and what they have under way."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.connectors.vllm.orders import Load, Orders
from penstock.connectors.vllm.tracked import Loading
from penstock.errors import BookError
from penstock.stores.host import ArenaHandle
from penstock.transfer.delegate import DelegatingEngine, Report
from penstock.types import Direction, Slot, Transfer, TransferId


class Dispatch:
    """Between the books, which hand out transfers, and the steps, which carry them."""

    def __init__(self, engine: DelegatingEngine, arena: ArenaHandle) -> None:
        self._engine = engine
        self._arena = arena
        self._loading_into: dict[Slot, Loading] = {}
        self._saving_from: dict[Slot, TransferId] = {}
        self._orders = Orders(0)  # what has gathered for the next step
        self._num_steps = 0

    @property
    def has_pending_work(self) -> bool:
        """Whether workers have something to be told or to report, so that steps must go on."""
        return bool(self._engine.num_flying or self._orders.complete)

    def expect(self, loading: Loading) -> None:
        """The books are about to hand out transfers of this load."""
        self._loading_into |= dict.fromkeys(loading.slots, loading)

    def gather(self, *, before: bool) -> None:
        """Put what the books have handed out into the next orders."""
        for transfer in self._engine.take_unsent():
            if transfer.direction is Direction.LOAD:
                self._tell_load(transfer)
                continue
            saves = self._orders.saves_before if before else self._orders.saves_after
            saves.append(transfer)
            for slot in transfer.source_slots:
                self._saving_from[slot] = transfer.id

    def fence(self, blocks: Iterable[int]) -> None:
        """The next step writes to these: it waits for the saves that still read them."""
        if not self._saving_from:
            return
        for block in self._saving_from.keys() & set(blocks):
            transfer_id = self._saving_from[Slot(block)]
            if transfer_id not in self._orders.fence:
                self._orders.fence.append(transfer_id)

    def fence_loads(self) -> None:
        """The same for blocks that the next step loads into."""
        for _, transfer in self._orders.loads:
            self.fence(transfer.target_slots)

    def take(self) -> Orders:
        """The orders of the next step."""
        orders, self._orders = self._orders, Orders(0)
        self._num_steps += 1
        orders.step, orders.arena = self._num_steps, self._arena
        return orders

    def reported(self, transfer_id: TransferId, report: Report) -> None:
        """Workers have ended a transfer, or their part of it."""
        transfer = self._engine.report(transfer_id, report)
        if transfer is None:
            return
        if transfer.direction is Direction.SAVE:
            for slot in transfer.source_slots:
                if self._saving_from.get(slot) == transfer.id:
                    del self._saving_from[slot]

    def ended(self, loading: Loading, bad: Iterable[Slot]) -> None:
        """A load is over for the books. Workers that were told all of it know; else they hear."""
        for slot in loading.slots:
            if self._loading_into.get(slot) is loading:  # others may load there already
                del self._loading_into[slot]
        if loading.num_untold:
            self._orders.complete[loading.request_id] = tuple(bad)

    def check(self) -> None:
        if len(set(self._saving_from.values())) > self._engine.num_flying:
            raise BookError("a block is held back for a save that has ended")

    def _tell_load(self, transfer: Transfer) -> None:
        loading = self._loading_into[transfer.target_slots[0]]
        loading.num_untold -= len(transfer.keys)
        self._orders.loads.append(Load(loading.request_id, transfer))
        if loading.num_untold == 0:
            self._orders.complete[loading.request_id] = ()
