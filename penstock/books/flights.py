"""The hops that are planned or under way, and what each of them serves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from penstock.books.tickets import Ticket
from penstock.errors import BookError
from penstock.types import BlockKey, Direction, Slot, Tier, Transfer, TransferId

HasRoom = Callable[[Tier, Direction], bool]


@dataclass(frozen=True, slots=True)
class Flight:
    """A hop not yet settled. One to or from the device belongs to a ticket, at `positions`."""

    transfer: Transfer
    ticket: Ticket | None = None
    positions: Sequence[int] = ()


class Flights:
    """Cuts hops into transfers, queues them by link and direction, and keeps them until settled."""

    def __init__(
        self,
        max_host_blocks: int,
        max_lower_blocks: int,
        max_remote_blocks: int | None = None,
        *,
        spread_host: bool = True,
    ) -> None:
        self._max_host_blocks = max_host_blocks
        # A store that says how much it likes at once spreads that by itself.
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
        """Queue a hop. Where nothing follows it, `spread` it over all of the link's threads."""
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
        """Of one transfer."""
        if link is Tier.HOST:
            return self._max_host_blocks
        return self._max_remote_blocks if link is Tier.REMOTE else self._max_lower_blocks

    def hand_out(self, has_room: HasRoom) -> Iterator[Transfer]:
        """Transfers whose link has room now, loads before saves."""
        for link, direction in sorted(self._outbox, key=lambda lane: lane[1] is Direction.SAVE):
            queue = self._outbox[link, direction]
            while queue and has_room(link, direction):
                yield queue.popleft()

    def num_queued(self, link: Tier, direction: Direction) -> int:
        return len(self._outbox.get((link, direction), ()))

    def withdraw(self, transfer: Transfer) -> bool:
        """Take back a transfer that was not handed out yet. It still has to be settled."""
        queue = self._outbox[transfer.link, transfer.direction]
        if transfer not in queue:
            return False
        queue.remove(transfer)
        return True

    def land(self, transfer_id: TransferId) -> Flight:
        flight = self._open.pop(transfer_id, None)
        if flight is None:
            raise BookError(f"transfer {transfer_id} is settled twice or was never made")
        if flight.ticket is not None:
            flight.ticket.num_flying -= len(flight.transfer.keys)
        return flight


def cut(num_blocks: int, max_blocks: int, spread: bool) -> Iterator[slice]:
    """Cut a hop into transfers of like size: a small one would not hide the end of the one before.

    Spread, the parts get smaller towards the end, so that the threads end together, and a short
    hop crosses the link on several of them.
    """
    even = -(-num_blocks // -(-num_blocks // max_blocks)) if num_blocks else 0
    start = 0
    while start < num_blocks:
        size = even
        if spread:
            size = min(max((num_blocks - start) // 4, max_blocks // 4, 1), max_blocks)
        yield slice(start, min(start + size, num_blocks))
        start += size
