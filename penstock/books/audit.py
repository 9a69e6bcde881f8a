"""The audit of a TierStack: every lease and every claim belongs to something that is under way."""

from __future__ import annotations

from collections import Counter

from penstock.books.stack import TierStack
from penstock.errors import BookError
from penstock.types import BlockKey, Slot, TicketId, Tier


def audit(stack: TierStack) -> None:
    """Raise BookError at the first thing that does not add up. Changes nothing."""
    leases: dict[Tier, Counter[Slot]] = {tier: Counter() for tier, _ in stack.ledgers}
    filling: dict[Tier, list[BlockKey]] = {tier: [] for tier, _ in stack.ledgers}
    num_flying: Counter[TicketId] = Counter()
    num_saving = 0
    for flight in stack.flights:
        transfer = flight.transfer
        if transfer.source is Tier.DEVICE:
            num_saving += len(transfer.keys)
        else:
            leases[transfer.source].update(transfer.source_slots)
        if transfer.target is not Tier.DEVICE:
            filling[transfer.target].extend(transfer.keys)
        if flight.ticket is not None:
            num_flying[flight.ticket.id] += len(transfer.keys)
    leases[Tier.HOST].update(stack.write_down.leased_slots())
    leases[Tier.HOST].update(stack.pins.counts)
    leases[Tier.HOST].update(stack.retention.slots)
    stack.write_down.check()
    stack.retention.check()
    stack.checkpoints.check()
    for ticket in stack.tickets:
        if ticket.over or num_flying[ticket.id] != ticket.num_flying:
            raise BookError(f"ticket {ticket.id} is over but still open, or its copies miscounted")
    for tier, ledger in stack.ledgers:
        ledger.check()
        if ledger.leases() != dict(leases[tier]):
            raise BookError(f"{tier.name} has leases that nothing under way holds")
        if sorted(ledger.filling_keys()) != sorted(filling[tier]):
            raise BookError(f"{tier.name} has claims that nothing under way fills")
    if num_saving != stack.saves.num_pending:
        raise BookError("the blocks being saved are miscounted")
    if not set(filling[Tier.HOST]).issuperset(stack.arrivals.awaited):
        raise BookError("a ticket waits for a block that is not on its way into HOST")
