"""Loads: from the lower tiers into HOST, and from there to the device or to a pin.

- Lease before claim. Otherwise the claim may evict a block that the load needs.
- A block that is already on its way into HOST is joined, not fetched again.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.books.arrivals import Arrivals
from penstock.books.flights import Flight, Flights
from penstock.books.ledgers import Ledgers, all_ok
from penstock.books.tickets import Ticket
from penstock.books.write_down import WriteDown
from penstock.types import Tier, Transfer, Verdict


class Loads:
    """Plans and settles the hops of loads."""

    def __init__(
        self, ledgers: Ledgers, flights: Flights, write_down: WriteDown, arrivals: Arrivals
    ) -> None:
        self._ledgers = ledgers
        self._host = ledgers.host
        self._flights = flights
        self._write_down = write_down
        self._arrivals = arrivals

    def plan(self, ticket: Ticket, positions: Sequence[int]) -> None:
        """Lease, join or fetch each block. Blocks that find no room in HOST wait in the ticket."""
        found = self._host.use_ready(ticket.keys_at(positions))
        if None in found and not ticket.planned:
            # Lease before claim: lease the ticket's later blocks before a fetch claims room.
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
        self._arrivals.deliver(ticket, positions, slots, spread=ticket.planned)

    def settle_copy(self, flight: Flight, verdicts: Sequence[Verdict]) -> None:
        """Settle a copy from HOST to the device."""
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

    def settle_fetch(self, transfer: Transfer, verdicts: Sequence[Verdict]) -> None:
        """Settle a fetch from a lower tier into HOST."""
        self._ledgers.lower[transfer.source].release(transfer.source_slots)
        self._ledgers.drop_gone(transfer, verdicts)
        self._arrivals.arrive(transfer.keys, verdicts)

    def _seek(self, ticket: Ticket, positions: Sequence[int]) -> None:
        """Join the blocks that are on their way into HOST, and fetch those in lower tiers."""
        below: dict[Tier, list[int]] = {}
        missing: list[int] = []
        lower = self._ledgers.readable()
        for position in positions:
            key = ticket.keys[position]
            if self._host.is_filling(key):
                self._arrivals.join(ticket, position)
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
        for position in positions:
            ticket.comes_from(position, tier)
            self._arrivals.join(ticket, position)
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
