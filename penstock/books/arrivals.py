"""Blocks on their way into HOST: which tickets wait for them, and what happens when they arrive."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.books.flights import Flight, Flights
from penstock.books.ledgers import GONE, Ledgers
from penstock.books.pins import Pins
from penstock.books.tickets import Ticket, Tickets
from penstock.types import BlockKey, Slot, TicketId, Tier, Verdict


class Arrivals:
    """A load that needs a block which is already on its way into HOST joins it here."""

    def __init__(self, ledgers: Ledgers, flights: Flights, tickets: Tickets, pins: Pins) -> None:
        self._ledgers = ledgers
        self._host = ledgers.host
        self._flights = flights
        self._tickets = tickets
        self._pins = pins
        self._joiners: dict[BlockKey, list[tuple[Ticket, int]]] = {}

    @property
    def awaited(self) -> Collection[BlockKey]:
        """Blocks that at least one ticket waits for."""
        return self._joiners.keys()

    def join(self, ticket: Ticket, position: int) -> None:
        """Let a ticket wait for the block at `position`, which HOST is about to receive."""
        self._joiners.setdefault(ticket.keys[position], []).append((ticket, position))

    def leave(self, ticket: Ticket) -> None:
        """Stop waiting for any block on behalf of this ticket."""
        ticket.waiting = []
        for position, key in enumerate(ticket.keys):
            joiners = self._joiners.get(key, [])
            if (ticket, position) in joiners:
                joiners.remove((ticket, position))
                if not joiners:
                    del self._joiners[key]

    def arrive(self, keys: Sequence[BlockKey], verdicts: Sequence[Verdict]) -> None:
        """Settle blocks that reached HOST or failed to, and serve the tickets that joined them."""
        self._ledgers.conclude(Tier.HOST, keys, verdicts)
        if not self._joiners:
            return
        joined: dict[TicketId, Ticket] = {}
        arrived: dict[TicketId, list[int]] = {}
        for key, verdict in zip(keys, verdicts, strict=True):
            for ticket, position in self._joiners.pop(key, ()):
                joined[ticket.id] = ticket
                if verdict is Verdict.OK:
                    arrived.setdefault(ticket.id, []).append(position)
                elif verdict in GONE:
                    ticket.judge([position], verdict)
                else:
                    # Another ticket's deadline or cancellation ended this fetch: try again.
                    ticket.waiting.append(position)
        # Lease all blocks before delivering any, so that nothing can evict them in between.
        slots = {t: self._host.lease(joined[t].keys_at(at)) for t, at in arrived.items()}
        for ticket_id, ticket in joined.items():
            self.deliver(ticket, arrived.get(ticket_id, ()), slots.get(ticket_id, ()))
            self._tickets.close_if_over(ticket, self._ledgers.now)

    def deliver(
        self,
        ticket: Ticket,
        positions: Sequence[int],
        slots: Sequence[Slot],
        *,
        spread: bool = False,
    ) -> None:
        """Copy leased blocks of HOST to the ticket's device slots; pin those without a slot."""
        into = ticket.slots_at(positions)
        targets = [slot for slot in into if slot is not None]
        if len(targets) < len(into):
            triples = list(zip(positions, slots, into, strict=True))
            for position, pin, _ in (triple for triple in triples if triple[2] is None):
                self._pins.keep(pin)
                ticket.pins[position] = pin
                ticket.judge([position], Verdict.OK)
            going = [triple for triple in triples if triple[2] is not None]
            positions = [position for position, _, _ in going]
            slots = [slot for _, slot, _ in going]
        self._flights.post(
            Tier.HOST,
            Tier.DEVICE,
            ticket.keys_at(positions),
            slots,
            targets,
            spread=spread,
            deadline=ticket.deadline,
            ticket=ticket,
            positions=positions,
        )

    def is_orphan(self, flight: Flight) -> bool:
        """Whether this is a fetch from a lower tier that no ticket waits for."""
        transfer = flight.transfer
        fetches = transfer.target is Tier.HOST and transfer.source is not Tier.DEVICE
        return fetches and not any(key in self._joiners for key in transfer.keys)

    def owing(self, ticket: Ticket) -> set[Tier]:
        """The lower tiers that have not delivered all blocks of this load yet."""
        owed = {
            key
            for position, key in enumerate(ticket.keys)
            if (ticket, position) in self._joiners.get(key, ())
        }
        return {
            flight.transfer.source
            for flight in self._flights
            if flight.transfer.source in self._ledgers.lower
            and owed.intersection(flight.transfer.keys)
        }
