"""A simulated node: one clock, one set of books and links, and the engines that use them.

An engine runs until it has to wait for a moment, and says which (`SimulatedEngine.until`). The node
advances its clock and its links to the earliest such moment, starts transfers that follow others,
and lets that engine continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.clock import ManualClock
from penstock.events import Observer
from penstock.offload import Offloader
from penstock.sim.engine import SimulatedEngine
from penstock.sim.instance import InstanceConfig, build_books
from penstock.sim.links import Carried, SimulatedLinks
from penstock.sim.shared_store import SharedStore
from penstock.types import BlockKey, Direction, LookupId, Match, Slot, TicketId, Tier

# As in the engine: how often transfers that follow others are started during a step.
_HOP_SECONDS = 0.005
_IDLE_HOP_SECONDS = 0.25
# The same if others wait for what a node writes.
_SMALL_HOP_SECONDS = 0.001


class SimulatedNode:
    def __init__(
        self,
        config: InstanceConfig,
        observers: Iterable[Observer] = (),
        *,
        num_engines: int = 1,
        store: SharedStore | None = None,
        sees_others: bool = False,
    ) -> None:
        """`sees_others`: what happens here matters to other nodes, so time passes in small steps.

        Otherwise the node may lag behind the rest of the fleet until its next engine continues.
        """
        self.config = config
        self.clock = ManualClock()
        self.num_evicted = 0  # blocks of DRAM and disk
        self.links: SimulatedLinks | None = None
        self.offloader: Offloader | None = None
        self._owners: dict[TicketId, int] = {}
        self._caller = 0  # the engine that calls the books now
        books = build_books(
            config,
            self.clock,
            observers,
            store=store,
            num_devices=num_engines,
            device_of=lambda ticket: (
                self._caller if ticket is None else self._owners.get(ticket, self._caller)
            ),
        )
        if books is not None:
            self.links, self.offloader = books.links, books.offloader
            ledgers = books.stack.ledgers
            ledgers.on_host_removed.append(self._count_evicted)
            ledgers.on_lost.append(self._count_lost)
        self.steps_small = sees_others or num_engines > 1
        self.engines = [
            SimulatedEngine(self, None if books is None else TiersOfEngine(self, number))
            for number in range(num_engines)
        ]

    @property
    def next_moment(self) -> float:
        """When this node has to be advanced next; infinity if nothing is under way."""
        until = min([engine.until for engine in self.engines])
        return self._next_hop(until) if self.steps_small else until

    def start(self) -> None:
        for engine in self.engines:
            engine.proceed()

    def advance(self) -> None:
        """Advance to the next moment, and let engines that waited for it continue."""
        until = min([engine.until for engine in self.engines])
        if self._hop_until(until):
            for engine in self.engines:
                if engine.until <= until:
                    engine.proceed()

    def step(self) -> None:
        """Let the books settle what has ended, and tell the engines."""
        assert self.offloader is not None
        for done in self.offloader.step():
            self.engines[self._owners.pop(done.ticket)].arrived.append(done)

    def call(self, number: int) -> Offloader:
        """The books, for a call by one engine."""
        assert self.offloader is not None
        self._caller = number
        return self.offloader

    def own(self, ticket: TicketId, number: int) -> TicketId:
        self._owners[ticket] = number
        return ticket

    def carried(self) -> dict[tuple[Tier, Direction], Carried]:
        return {} if self.links is None else self.links.carried()

    def check(self) -> None:
        for engine in self.engines:
            engine.check()
        if self.offloader is not None:
            self.offloader.check()

    def _next_hop(self, until: float) -> float:
        if self.links is None:
            return until
        # If no sequence waits for a transfer, transfers are polled less often.
        pause = _SMALL_HOP_SECONDS
        if not self.steps_small:
            (engine,) = self.engines
            pause = _HOP_SECONDS if engine.is_any_waiting else _IDLE_HOP_SECONDS
        return min(until, max(self.links.next_end, self.clock.now() + pause))

    def _hop_until(self, until: float) -> bool:
        """Advance clock and links. False if `until` is not yet reached."""
        clock, links = self.clock, self.links
        if links is None:
            clock.advance(max(0.0, until - clock.now()))
            return True
        while True:
            moment = self._next_hop(until)
            clock.advance(max(0.0, moment - clock.now()))
            links.advance()
            if moment >= until:
                return True
            if links.has_ended:
                self.step()
            if self.steps_small:
                return False

    def _count_evicted(self, keys: Sequence[BlockKey]) -> None:
        self.num_evicted += len(keys)

    def _count_lost(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        if tier is Tier.DISK:  # nothing fails in a simulation, so it evicted them
            self.num_evicted += len(keys)


class TiersOfEngine:
    """The books as one engine of the node sees them. See `Offloader`."""

    def __init__(self, node: SimulatedNode, number: int) -> None:
        self._node = node
        self._number = number

    def lookup(self, keys: Sequence[BlockKey]) -> LookupId | None:
        return self._node.call(self._number).lookup(keys)

    def is_looking_up(self, lookup_id: LookupId) -> bool:
        return self._node.call(self._number).is_looking_up(lookup_id)

    def match(self, keys: Sequence[BlockKey]) -> Match:
        return self._node.call(self._number).match(keys)

    def note(self, match: Match) -> None:
        self._node.call(self._number).note(match)

    def used(self, keys: Sequence[BlockKey], *, tenant: str) -> None:
        self._node.call(self._number).used(keys, tenant=tenant)

    def load(
        self,
        keys: Sequence[BlockKey],
        into: Sequence[Slot | None],
        *,
        patience_seconds: float | None = None,
        tenant: str,
        parents: Mapping[int, BlockKey | None],
    ) -> TicketId:
        books = self._node.call(self._number)
        ticket = books.load(
            keys, into, patience_seconds=patience_seconds, tenant=tenant, parents=parents
        )
        return self._node.own(ticket, self._number)

    def save(
        self,
        keys: Sequence[BlockKey],
        source: Sequence[Slot],
        *,
        tenant: str,
        parents: Mapping[int, BlockKey | None],
    ) -> TicketId:
        books = self._node.call(self._number)
        ticket = books.save(keys, source, tenant=tenant, parents=parents)
        return self._node.own(ticket, self._number)

    def cancel(self, ticket: TicketId) -> None:
        self._node.call(self._number).cancel(ticket)

    def is_in_host(self, key: BlockKey) -> bool:
        return self._node.call(self._number).is_in_host(key)

    def pin(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        return self._node.call(self._number).pin(keys)

    def unpin(self, slots: Sequence[Slot]) -> None:
        self._node.call(self._number).unpin(slots)
