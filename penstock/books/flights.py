"""Flights: transfers that are planned or under way, and the tickets they belong to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from penstock.books.tickets import Ticket
from penstock.errors import BookError
from penstock.types import BlockKey, Direction, Outcome, Slot, Tier, Transfer, TransferId

HasRoom = Callable[[Tier, Direction], bool]


@dataclass(frozen=True, slots=True)
class Flight:
    """A transfer not yet settled. Copies to and from the device belong to a ticket."""

    transfer: Transfer
    ticket: Ticket | None = None
    positions: Sequence[int] = ()


class Flights:
    """Cuts hops into transfers, queues them by link and direction, and keeps them until settled.

    A hop moves any number of blocks between two tiers; a transfer has a maximum size.
    """

    def __init__(
        self,
        max_host_blocks: int,
        max_lower_blocks: int,
        max_remote_blocks: int | None = None,
        *,
        spread_host: bool = True,
    ) -> None:
        self._max_host_blocks = max_host_blocks
        # A remote store with its own batch size also distributes a batch over threads itself.
        self._spreads = {Tier.HOST: spread_host, Tier.REMOTE: max_remote_blocks is None}
        self._max_lower_blocks = max_lower_blocks
        self._max_remote_blocks = max_remote_blocks or max_lower_blocks
        self._ids = count(1)
        self._open: dict[TransferId, Flight] = {}
        self._outbox: dict[tuple[Tier, Direction], deque[Transfer]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._open.values())

    def post(
        self,
        source: Tier,
        target: Tier,
        keys: Sequence[BlockKey],
        source_slots: Sequence[Slot],
        target_slots: Sequence[Slot],
        *,
        spread: bool = False,
        deadline: float | None = None,
        ticket: Ticket | None = None,
        positions: Sequence[int] = (),
        tenants: Sequence[str] = (),
        parents: Sequence[BlockKey | None] = (),
    ) -> None:
        """Queue a hop. Set `spread` on the last hop of a ticket to use all threads of the link."""
        link = max(source, target)
        max_blocks = self.max_blocks(link)
        spread &= self._spreads.get(link, True)
        for part in cut(len(keys), max_blocks, spread):
            transfer = Transfer(
                TransferId(next(self._ids)),
                source,
                target,
                tuple(keys[part]),
                tuple(source_slots[part]),
                tuple(target_slots[part]),
                deadline,
                tuple(tenants[part]),
                tuple(parents[part]),
                None if ticket is None else ticket.id,
            )
            self._open[transfer.id] = Flight(transfer, ticket, positions[part])
            self._outbox.setdefault((transfer.link, transfer.direction), deque()).append(transfer)
        if ticket is not None:
            ticket.num_flying += len(keys)

    def max_blocks(self, link: Tier) -> int:
        """The largest transfer on this link."""
        if link is Tier.HOST:
            return self._max_host_blocks
        return self._max_remote_blocks if link is Tier.REMOTE else self._max_lower_blocks

    def hand_out(self, has_room: HasRoom) -> Iterator[Transfer]:
        """Yield transfers while their link has room, loads before saves."""
        for link, direction in sorted(self._outbox, key=lambda lane: lane[1] is Direction.SAVE):
            queue = self._outbox[link, direction]
            while queue and has_room(link, direction):
                yield queue.popleft()

    def num_queued(self, link: Tier, direction: Direction) -> int:
        return len(self._outbox.get((link, direction), ()))

    def withdraw(self, transfer: Transfer) -> bool:
        """Remove a queued transfer, which must still be settled. False if it was handed out."""
        queue = self._outbox[transfer.link, transfer.direction]
        if transfer not in queue:
            return False
        queue.remove(transfer)
        return True

    def land(self, outcome: Outcome) -> Flight:
        """Remove a transfer that has ended. If the outcome does not fit, nothing has changed."""
        flight = self._open.get(outcome.transfer_id)
        if flight is None:
            raise BookError(f"transfer {outcome.transfer_id} was already settled, or never existed")
        num_blocks = len(flight.transfer.keys)
        if len(outcome.verdicts) != num_blocks:
            counts = f"{len(outcome.verdicts)} verdicts for {num_blocks} blocks"
            raise BookError(f"the outcome of transfer {outcome.transfer_id} has {counts}")
        del self._open[outcome.transfer_id]
        if flight.ticket is not None:
            flight.ticket.num_flying -= num_blocks
        return flight


def cut(num_blocks: int, max_blocks: int, spread: bool) -> Iterator[slice]:
    """Cut a hop into transfers of equal size, because a small one leaves the link idle.

    With `spread`, transfers get smaller towards the end, so that all threads finish together and
    even a short hop uses several of them.
    """
    even = -(-num_blocks // -(-num_blocks // max_blocks)) if num_blocks else 0
    start = 0
    while start < num_blocks:
        size = even
        if spread:
            size = min(max((num_blocks - start) // 4, max_blocks // 4, 1), max_blocks)
        yield slice(start, min(start + size, num_blocks))
        start += size
