"""Loads: from the tiers below into HOST, and from there to the device or to a pin.

- Lease before claim, or the claim may evict what the load needs.
- A block that is on its way into HOST is joined, not fetched again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.books.flights import Flight, Flights
from penstock.books.ledgers import GONE, Ledgers, all_ok
from penstock.books.pins import Pins
from penstock.books.tickets import Ticket, Tickets
from penstock.books.write_down import WriteDown
from penstock.types import BlockKey, Slot, TicketId, Tier, Transfer, Verdict


class Loads:
    def __init__(
        self,
        ledgers: Ledgers,
        flights: Flights,
        tickets: Tickets,
        write_down: WriteDown,
        pins: Pins,
    ) -> None:
        self._ledgers = ledgers
        self._host = ledgers.host
        self._flights = flights
        self._tickets = tickets
        self._write_down = write_down
        self._pins = pins
        self._joiners: dict[BlockKey, list[tuple[Ticket, int]]] = {}

    @property
    def awaited(self) -> Collection[BlockKey]:
        """Blocks that a ticket waits for in HOST."""
        return self._joiners.keys()

    def plan(self, ticket: Ticket, positions: Sequence[int]) -> None:
        """Lease, join or fetch each block; what finds no room in HOST waits in the ticket."""
        found = self._host.use_ready(ticket.keys_at(positions))
        if None in found and not ticket.planned:
            # Lease before claim: what is in HOST further on must be held before others need room.
            rest = range(ticket.num_planned, len(ticket.keys))
            ticket.num_planned = len(ticket.keys)
            found += self._host.use_ready(ticket.keys_at(rest))
            positions = [*positions, *rest]
        slots = [slot for slot in found if slot is not None]
        missing: list[int] = []
        if len(slots) < len(found):
            pairs = list(zip(positions, found, strict=True))
            missing = [position for position, slot in pairs if slot is None]
            positions = [position for position, slot in pairs if slot is not None]
        if self._write_down.tiers:
            parents = ticket.parents_at(positions)
            self._write_down.offer(ticket.keys_at(positions), ticket.tenant, parents)
        if missing:
            self._seek(ticket, missing)
        self._send(ticket, positions, slots, spread=ticket.planned)

    def settle_arrival(self, flight: Flight, verdicts: Sequence[Verdict]) -> None:
        """Blocks came to the device or did not."""
        ticket, transfer = flight.ticket, flight.transfer
        assert ticket is not None
        self._host.release(transfer.source_slots)
        self._ledgers.drop_gone(transfer, verdicts)
        if all_ok(verdicts):
            ticket.judge(flight.positions, Verdict.OK)
            return
        for position, verdict in zip(flight.positions, verdicts, strict=True):
            if verdict is Verdict.CANCELLED and ticket.given_up is not None:
                verdict = ticket.given_up
            ticket.judge([position], verdict)

    def settle_fill(self, transfer: Transfer, verdicts: Sequence[Verdict]) -> None:
        """Blocks came from a lower tier into HOST or did not."""
        self._ledgers.lower[transfer.source].release(transfer.source_slots)
        self._ledgers.drop_gone(transfer, verdicts)
        self.arrive(transfer.keys, verdicts)

    def arrive(self, keys: Sequence[BlockKey], verdicts: Sequence[Verdict]) -> None:
        """Blocks came into HOST or did not: tell the books and the tickets that joined them."""
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
                    ticket.waiting.append(position)  # given up for another ticket's reasons
        # All are leased before anything else happens to one of them.
        slots = {t: self._host.lease(joined[t].keys_at(at)) for t, at in arrived.items()}
        for ticket_id, ticket in joined.items():
            self._send(ticket, arrived.get(ticket_id, ()), slots.get(ticket_id, ()))
            self._tickets.close_if_over(ticket, self._ledgers.now)

    def leave(self, ticket: Ticket) -> None:
        """A ticket waits for nothing any more."""
        ticket.waiting = []
        for position, key in enumerate(ticket.keys):
            joiners = self._joiners.get(key, [])
            if (ticket, position) in joiners:
                joiners.remove((ticket, position))
                if not joiners:
                    del self._joiners[key]

    def is_orphan(self, flight: Flight) -> bool:
        """A fetch from below that no ticket waits for any more."""
        transfer = flight.transfer
        fetches = transfer.target is Tier.HOST and transfer.source is not Tier.DEVICE
        return fetches and not any(key in self._joiners for key in transfer.keys)

    def owing(self, ticket: Ticket) -> set[Tier]:
        """The lower tiers that still owe this load a block."""
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

    def _seek(self, ticket: Ticket, positions: Sequence[int]) -> None:
        """Blocks that are not in HOST: join those that come, fetch those that lie below."""
        below: dict[Tier, list[int]] = {}
        missing: list[int] = []
        lower = self._ledgers.readable()
        for position in positions:
            key = ticket.keys[position]
            if self._host.is_filling(key):
                self._joiners.setdefault(key, []).append((ticket, position))
                continue
            for tier, ledger in lower:
                if ledger.is_ready(key):
                    below.setdefault(tier, []).append(position)
                    break
            else:
                missing.append(position)
        for tier, wanted in below.items():
            room = self._host.num_claimable
            self._fetch(tier, ticket, wanted[:room])
            ticket.waiting.extend(wanted[room:])
        ticket.waiting.sort()
        if missing:
            ticket.judge(missing, Verdict.MISSING)
            self._ledgers.lose(Tier.HOST, Tier.DEVICE, Verdict.MISSING, len(missing), "")

    def _fetch(self, tier: Tier, ticket: Ticket, positions: Sequence[int]) -> None:
        keys = [ticket.keys[position] for position in positions]
        source_slots = self._ledgers.lower[tier].lease(keys)
        for key in keys:
            self._ledgers.lower[tier].touch(key)
        target_slots = self._ledgers.claim(Tier.HOST, keys, ticket.parents_at(positions))
        for position, key in zip(positions, keys, strict=True):
            ticket.comes_from(position, tier)
            self._joiners.setdefault(key, []).append((ticket, position))
        self._flights.post(
            tier,
            Tier.HOST,
            keys,
            source_slots,
            target_slots,
            spread=True,
            deadline=ticket.deadline,
            tenants=[ticket.tenant] * len(keys) if ticket.tenant else (),
        )

    def _send(
        self,
        ticket: Ticket,
        positions: Sequence[int],
        slots: Sequence[Slot],
        *,
        spread: bool = False,
    ) -> None:
        """Leased blocks of HOST go to the device, or are pinned where they are."""
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
