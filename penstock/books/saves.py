"""Saves: from the device into HOST. `WriteDown` copies the blocks to the lower tiers afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.books.arrivals import Arrivals
from penstock.books.flights import Flight, Flights
from penstock.books.ledgers import Ledgers, all_ok
from penstock.books.tickets import Ticket
from penstock.books.write_down import WriteDown
from penstock.types import Slot, Tier, Verdict


class Saves:
    """Plans and settles the copies of saves."""

    def __init__(
        self,
        ledgers: Ledgers,
        flights: Flights,
        write_down: WriteDown,
        arrivals: Arrivals,
        max_pending_blocks: int,
    ) -> None:
        self._ledgers = ledgers
        self._host = ledgers.host
        self._flights = flights
        self._write_down = write_down
        self._arrivals = arrivals
        self._max_pending_blocks = max_pending_blocks
        self.num_pending = 0  # blocks on their way into HOST

    def plan(self, ticket: Ticket, positions: Sequence[int]) -> None:
        """Copy the blocks that HOST lacks, as far as there is room, and drop the rest.

        A whole ticket is planned in one go: if there is no room for all, all are dropped.
        """
        held = self._host.held
        fresh = positions
        kept: Sequence[Slot] = ()
        if not held.isdisjoint(ticket.keys_at(positions)):
            fresh = [position for position in positions if ticket.keys[position] not in held]
            there = [position for position in positions if ticket.keys[position] in held]
            ticket.judge(there, Verdict.OK)
            ready = [p for p in there if self._host.is_ready(ticket.keys[p])]
            for position in ready:
                self._host.touch(ticket.keys[position])
            self._offer(ticket, ready)
            if ticket.whole:
                # Lease before claim. Otherwise the claim may evict a block of this checkpoint.
                kept = self._host.lease(ticket.keys_at(ready))
        room = min(self._host.num_claimable, self._max_pending_blocks - self.num_pending)
        if ticket.whole and room < len(fresh):
            room = 0
        # Keep the leading blocks: a prefix is of no use without its beginning.
        taken, refused = fresh[:room], fresh[room:]
        if refused:
            ticket.judge(refused, Verdict.DROPPED)
            self._ledgers.lose(
                Tier.DEVICE, Tier.HOST, Verdict.DROPPED, len(refused), "no room in HOST"
            )
        if taken:
            keys = ticket.keys_at(taken)
            slots = self._ledgers.claim(Tier.HOST, keys, ticket.parents_at(taken))
            self.num_pending += len(taken)
            self._flights.post(
                Tier.DEVICE,
                Tier.HOST,
                keys,
                [slot for slot in ticket.slots_at(taken) if slot is not None],
                slots,
                spread=ticket.planned,
                ticket=ticket,
                positions=taken,
            )
        self._host.release(kept)

    def settle(self, flight: Flight, verdicts: Sequence[Verdict]) -> None:
        """Settle a copy from the device into HOST."""
        ticket, keys = flight.ticket, flight.transfer.keys
        assert ticket is not None
        self.num_pending -= len(keys)
        self._arrivals.arrive(keys, verdicts)
        if all_ok(verdicts):
            ticket.judge(flight.positions, Verdict.OK)
            self._offer(ticket, flight.positions)
            return
        pairs = list(zip(flight.positions, verdicts, strict=True))
        for position, verdict in pairs:
            ticket.judge([position], verdict)
        self._offer(ticket, [position for position, verdict in pairs if verdict is Verdict.OK])

    def _offer(self, ticket: Ticket, positions: Sequence[int]) -> None:
        if not self._write_down.tiers or not ticket.write_down:
            return
        keys = ticket.keys_at(positions)
        self._write_down.offer(keys, ticket.tenant, ticket.parents_at(positions))
