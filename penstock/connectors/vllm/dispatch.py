"""Collects the orders for the workers' next step, and tracks what they have under way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.build import DelegatedNode
from penstock.codecs.names import RAW
from penstock.connectors.vllm.orders import Load, Orders
from penstock.connectors.vllm.tracked import Loading
from penstock.errors import BookError
from penstock.stores.host import ArenaHandle
from penstock.transfer.delegate import DelegatingEngine
from penstock.transfer.paged import PartPlace
from penstock.types import Direction, Outcome, Slot, TicketId, Transfer, TransferId


class Dispatch:
    """Between the books, which hand out transfers, and the steps, which carry them."""

    def __init__(
        self,
        engine: DelegatingEngine,
        arena: ArenaHandle,
        parts: tuple[PartPlace, ...],
        *,
        codec: str = RAW,
        ends_saves: bool = False,
        node: DelegatedNode | None = None,
    ) -> None:
        self._engine = engine
        self._arena = arena
        self._node = node
        self._parts = parts
        self._codec = codec
        self._ends_saves = ends_saves
        self._loadings: dict[TicketId, Loading] = {}
        self._saving_from: dict[Slot, TransferId] = {}
        self._orders = Orders(0)  # of the next step
        self._num_steps = 0

    @property
    def has_pending_work(self) -> bool:
        """Whether workers have orders or reports outstanding, so vLLM must keep stepping."""
        return bool(self._engine.num_flying or self._orders.complete)

    @property
    def loads_under_way(self) -> list[TicketId]:
        return list(self._loadings)

    def expect(self, loading: Loading) -> None:
        """A load has started: from now on the books hand out its transfers."""
        self._loadings[loading.ticket] = loading

    def gather(self, *, before: bool) -> None:
        """Add what the books have handed out to the next orders; `before`: saves come first."""
        if self._node is not None:
            # A save that workers do not know of yet would not be fenced.
            self._node.sync()
        for transfer in self._engine.take_unsent():
            if transfer.direction is Direction.LOAD:
                self._order_load(transfer)
                continue
            saves = self._orders.saves_before if before else self._orders.saves_after
            saves.append(transfer)
            for slot in transfer.source_slots:
                self._saving_from[slot] = transfer.id

    def fence(self, blocks: Iterable[int]) -> None:
        """The next step writes to these blocks: it waits for the saves that still read them."""
        if not self._saving_from:
            return
        for block in self._saving_from.keys() & set(blocks):
            transfer_id = self._saving_from[Slot(block)]
            if transfer_id not in self._orders.fence:
                self._orders.fence.append(transfer_id)

    def fence_loads(self) -> None:
        """Fence the blocks that the next step loads into."""
        for _, transfer in self._orders.loads:
            self.fence(transfer.target_slots)

    def take(self) -> Orders:
        """The orders of the next step."""
        orders, self._orders = self._orders, Orders(0)
        self._num_steps += 1
        if self._node is not None:
            self._arena = self._node.handle
        orders.step, orders.arena, orders.parts = self._num_steps, self._arena, self._parts
        orders.codec, orders.ends_saves = self._codec, self._ends_saves
        return orders

    def reported(self, outcome: Outcome) -> None:
        """A worker has finished its part of a transfer."""
        transfer = self._engine.report(outcome)
        if transfer is not None and transfer.direction is Direction.SAVE:
            for slot in transfer.source_slots:
                if self._saving_from.get(slot) == transfer.id:
                    del self._saving_from[slot]

    def ended(self, ticket: TicketId, bad: Sequence[int]) -> Loading:
        """The books have ended a load, in which the blocks at the positions `bad` did not arrive.

        Workers know already if they were ordered all of it; otherwise the next orders say so.
        """
        loading = self._loadings.pop(ticket)
        if loading.num_unordered:
            slots = tuple(loading.slots[index] for index in bad)
            self._orders.complete[loading.request_id] = slots
        return loading

    def refuse(self, request_id: str, slots: Sequence[Slot]) -> None:
        """A load that vLLM waits for cannot start: none of its blocks will arrive."""
        self._orders.complete[request_id] = tuple(slots) or (Slot(0),)

    def check(self) -> None:
        if len(set(self._saving_from.values())) > self._engine.num_flying:
            raise BookError("a block is fenced for a save that has ended")

    def _order_load(self, transfer: Transfer) -> None:
        assert transfer.ticket is not None
        loading = self._loadings[transfer.ticket]
        loading.num_unordered -= len(transfer.keys)
        self._orders.loads.append(Load(loading.request_id, transfer))
        if loading.num_unordered == 0:
            self._orders.complete[loading.request_id] = ()
