"""Tickets: the asynchronous loads and saves of a client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from penstock.errors import BookError
from penstock.types import NO_PARENTS, BlockKey, Direction, Done, Slot, TicketId, Tier, Verdict


@dataclass(slots=True, eq=False)
class Ticket:
    """One load or save. It ends when every block has a verdict and no transfer is flying.

    Methods take positions in `keys`. A `range` of positions is handled in one go.
    """

    id: TicketId
    direction: Direction
    keys: tuple[BlockKey, ...]
    device_slots: tuple[Slot | None, ...]  # None: load the block into HOST only
    started: float
    deadline: float | None = None
    tenant: str = ""
    # By position: parents of the blocks whose parent is not the block before them.
    parents: Mapping[int, BlockKey | None] = field(default_factory=dict)
    whole: bool = False  # a save: all blocks or none, and none is the parent of another
    write_down: bool = True  # a save: offer the blocks to the lower tiers afterwards
    num_planned: int = 0  # leading positions that have been planned
    num_flying: int = 0  # blocks whose device slot a transfer may touch now
    waiting: list[int] = field(default_factory=list)  # positions that found no room in HOST yet
    given_up: Verdict | None = None  # the reason: EXPIRED or CANCELLED
    pins: dict[int, Slot] = field(default_factory=dict)  # by position: blocks pinned in HOST
    _verdicts: list[Verdict | None] = field(init=False)
    _sources: list[Tier] = field(init=False)
    _num_open: int = field(init=False)

    def __post_init__(self) -> None:
        self._verdicts = [None] * len(self.keys)
        self._sources = [Tier.HOST] * len(self.keys)
        self._num_open = len(self.keys)

    @property
    def over(self) -> bool:
        return self._num_open == 0 and self.num_flying == 0

    @property
    def planned(self) -> bool:
        return self.num_planned == len(self.keys)

    def judge(self, positions: Sequence[int], verdict: Verdict) -> None:
        """Set the verdict of the blocks at these positions."""
        verdicts = self._verdicts
        if isinstance(positions, range):
            stretch = slice(positions.start, positions.stop)
            self._num_open -= verdicts[stretch].count(None)
            verdicts[stretch] = [verdict] * len(positions)
            return
        for position in positions:
            if verdicts[position] is None:
                self._num_open -= 1
            verdicts[position] = verdict

    def keys_at(self, positions: Sequence[int]) -> Sequence[BlockKey]:
        if isinstance(positions, range):
            return self.keys[positions.start : positions.stop]
        return [self.keys[position] for position in positions]

    def slots_at(self, positions: Sequence[int]) -> Sequence[Slot | None]:
        if isinstance(positions, range):
            return self.device_slots[positions.start : positions.stop]
        return [self.device_slots[position] for position in positions]

    def parents_at(self, positions: Sequence[int]) -> list[BlockKey | None]:
        """The parent of each of these blocks; None if it has none or it is unknown."""
        parents, keys = self.parents, self.keys
        if self.whole:
            return [parents.get(position) for position in positions]
        if isinstance(positions, range) and positions and not parents:
            first = positions.start
            return [keys[first - 1] if first else None, *keys[first : positions.stop - 1]]
        return [parents[p] if p in parents else keys[p - 1] if p else None for p in positions]

    def comes_from(self, position: int, tier: Tier) -> None:
        """Record that a block is loaded from `tier`. The default is HOST."""
        self._sources[position] = tier

    def open_positions(self) -> list[int]:
        return [position for position, verdict in enumerate(self._verdicts) if verdict is None]

    def done(self, now: float) -> Done:
        verdicts = tuple([verdict for verdict in self._verdicts if verdict is not None])
        sources: tuple[Tier | None, ...] = (None,) * len(verdicts)
        if self.direction is Direction.LOAD and verdicts.count(Verdict.OK) == len(verdicts):
            sources = tuple(self._sources)
        elif self.direction is Direction.LOAD:
            sources = tuple(
                source if verdict is Verdict.OK else None
                for source, verdict in zip(self._sources, verdicts, strict=True)
            )
        pins = tuple(map(self.pins.get, range(len(verdicts)))) if self.pins else ()
        return Done(self.id, self.direction, self.keys, verdicts, sources, now - self.started, pins)


class Tickets:
    """All open tickets, and the results of those that ended since the last `take_dones`."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._open: dict[TicketId, Ticket] = {}
        self._dones: list[Done] = []

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Ticket]:
        """Iterates over a copy, because the caller may close tickets."""
        return iter(list(self._open.values()))

    @property
    def all_planned(self) -> bool:
        return all(ticket.planned for ticket in self._open.values())

    def num_open(self, direction: Direction) -> int:
        return sum(ticket.direction is direction for ticket in self._open.values())

    def get(self, ticket_id: TicketId) -> Ticket | None:
        return self._open.get(ticket_id)

    def open(
        self,
        direction: Direction,
        keys: Sequence[BlockKey],
        device_slots: Sequence[Slot | None],
        now: float,
        deadline: float | None,
        tenant: str,
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
        *,
        whole: bool = False,
        write_down: bool = True,
    ) -> Ticket:
        if len(keys) != len(device_slots):
            raise BookError(f"got {len(keys)} blocks but {len(device_slots)} device slots")
        if len(set(keys)) != len(keys):
            raise BookError(f"a {direction.value} names a block twice")
        ticket_id = TicketId(next(self._ids))
        ticket = Ticket(
            ticket_id,
            direction,
            tuple(keys),
            tuple(device_slots),
            now,
            deadline,
            tenant,
            parents,
            whole,
            write_down,
        )
        self._open[ticket_id] = ticket
        return ticket

    def close_if_over(self, ticket: Ticket, now: float) -> None:
        if ticket.over and self._open.pop(ticket.id, None) is not None:
            self._dones.append(ticket.done(now))

    @property
    def have_ended(self) -> bool:
        """Whether some have ended since the last `take_dones`."""
        return bool(self._dones)

    def take_dones(self) -> list[Done]:
        dones, self._dones = self._dones, []
        return dones
