"""ClientTickets: a client's loads and saves that have not ended, and the copies that run for them.

No ticket ends while a copy touches its device slots. A copy that the node asks for after its ticket
has ended here is refused.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from penstock.errors import BookError
from penstock.events import Event, Lost, Moved
from penstock.node.client_pins import ClientPins
from penstock.node.wire import (
    WireError,
    unpack_given_slots,
    unpack_keys,
    unpack_slots,
    unpack_tiers,
    unpack_verdicts,
)
from penstock.transfer.base import Transfers
from penstock.types import (
    BlockKey,
    Direction,
    Done,
    Outcome,
    Slot,
    TicketId,
    Tier,
    Transfer,
    TransferId,
    Verdict,
)

_LATE_SECONDS = 1.0  # after its deadline, a load ends here even if the node says nothing


@dataclass(slots=True)
class _Open:
    """A load or save that has not ended."""

    direction: Direction
    keys: tuple[BlockKey, ...]
    slots: dict[BlockKey, Slot | None]  # of the device, by block
    started: float
    deadline: float | None
    flying: set[TransferId] = field(default_factory=set)  # copies that run here
    is_hit: bool = False  # a load from HOST alone
    num_arrived: int = 0  # blocks that were copied
    ends_as: Verdict | None = None  # ends here, once no copy runs
    done: Done | None = None


class ClientTickets:
    def __init__(
        self,
        copies: Transfers,
        pins: ClientPins,
        *,
        num_host_slots: int,
        block_bytes: int,
        accepts: Callable[[Transfer], bool],
        report: Callable[[Outcome], None],
        tell: Callable[[Sequence[Event]], None],
    ) -> None:
        """`accepts` says whether a copy for an open ticket may still be made.

        `report` tells the node of every copy that it asked for, `tell` the observers.
        """
        self._copies = copies
        self._pins = pins
        self._num_host_slots = num_host_slots
        self._block_bytes = block_bytes
        self._accepts = accepts
        self._report = report
        self._tell = tell
        self._ids = count(1)
        self._open: dict[TicketId, _Open] = {}
        self._copying: dict[TransferId, tuple[TicketId, Transfer]] = {}
        self._dones: list[Done] = []

    def __bool__(self) -> bool:
        """Whether a load or save is open."""
        return bool(self._open)

    def __contains__(self, number: TicketId) -> bool:
        return number in self._open

    @property
    def numbers(self) -> list[TicketId]:
        return list(self._open)

    @property
    def is_copying(self) -> bool:
        """Whether a copy touches the memory of the node, perhaps for a ticket that has ended."""
        return bool(self._copying)

    def open(
        self,
        direction: Direction,
        keys: Sequence[BlockKey],
        slots: Sequence[Slot | None],
        seconds: float | None,
    ) -> TicketId:
        """Raises BookError."""
        if len(keys) != len(slots):
            raise BookError(f"got {len(keys)} blocks but {len(slots)} device slots")
        by_key = dict(zip(keys, slots, strict=True))
        if len(by_key) != len(keys):
            raise BookError(f"a {direction.value} names a block twice")
        number = TicketId(next(self._ids))
        now = time.monotonic()
        deadline = None if seconds is None else now + seconds + _LATE_SECONDS
        self._open[number] = _Open(direction, tuple(keys), by_key, now, deadline)
        return number

    def take_dones(self) -> list[Done]:
        """What has ended since the last call."""
        dones, self._dones = self._dones, []
        return dones

    def check(self) -> None:
        """Raise BookError if these books do not add up."""
        for transfer_id, (number, _) in self._copying.items():
            if number in self._open and transfer_id not in self._open[number].flying:
                raise BookError(f"copy {transfer_id} of ticket {number} is not counted")

    # They end here.

    def end(self, number: TicketId, verdict: Verdict) -> None:
        """End a ticket without the node, once no copy touches its slots."""
        ticket = self._open[number]
        ticket.ends_as = ticket.ends_as or verdict
        for transfer_id in ticket.flying:
            self._copies.cancel(transfer_id)
        self._end_if_over(number, ticket)

    def end_all(self, verdict: Verdict) -> None:
        for number in self.numbers:
            self.end(number, verdict)

    def end_uncopied(self, numbers: Collection[TicketId], verdict: Verdict) -> None:
        """End those of these tickets that have no copies."""
        for number in numbers:
            ticket = self._open.get(number)
            if ticket is not None and not ticket.flying and ticket.done is None:
                self.end(number, verdict)

    def end_overdue(self, now: float) -> list[TicketId]:
        """End those whose deadline is over, though the node has not ended them."""
        overdue = [
            number
            for number, ticket in self._open.items()
            if ticket.deadline is not None and now >= ticket.deadline and ticket.ends_as is None
        ]
        for number in overdue:
            self.end(number, Verdict.EXPIRED)
        return overdue

    # What the node says.

    def copy(self, fields: Mapping[str, Any], parts: Sequence[bytes]) -> None:
        """Make a copy that the node asks for, or refuse it. Raises WireError."""
        keys = unpack_keys(parts[0])
        load = bool(fields["load"])
        ends = (Tier.HOST, Tier.DEVICE) if load else (Tier.DEVICE, Tier.HOST)
        number = None if fields["ticket"] is None else TicketId(int(fields["ticket"]))
        ticket = None if number is None else self._open.get(number)
        transfer = Transfer(
            TransferId(int(fields["transfer"])),
            *ends,
            keys,
            unpack_given_slots(parts[1]),
            unpack_given_slots(parts[2]),
            fields["deadline"],
            ticket=None if ticket is None else number,
        )
        if not len(keys) == len(transfer.source_slots) == len(transfer.target_slots):
            raise WireError("a copy has not as many slots as blocks")
        if transfer.id in self._copying:
            raise WireError(f"it asks twice for copy {transfer.id}")
        if ticket is None or ticket.ends_as is not None or not self._accepts(transfer):
            self._report(Outcome(transfer.id, (Verdict.CANCELLED,) * len(keys)))
            return
        assert transfer.ticket is not None
        self._check_slots(ticket, transfer)
        ticket.is_hit = load and bool(fields.get("hit", False))
        ticket.flying.add(transfer.id)
        self._copying[transfer.id] = (transfer.ticket, transfer)
        if not self._copies.submit(transfer):
            self._copied(Outcome(transfer.id, (Verdict.DROPPED,) * len(keys)))

    def cancel_copy(self, fields: Mapping[str, Any]) -> None:
        self._copies.cancel(TransferId(int(fields["transfer"])))

    def node_ended(self, fields: Mapping[str, Any], parts: Sequence[bytes]) -> None:
        """The node has ended a ticket. Raises WireError."""
        number = TicketId(int(fields["ticket"]))
        pins = tuple(unpack_slots(parts[2]))
        ticket = self._open.get(number)
        if ticket is None or ticket.ends_as is not None:
            self._pins.give_back(pins)  # it ended here before: nobody knows of its pins
            return
        verdicts = unpack_verdicts(parts[0])
        if len(verdicts) != len(ticket.keys):
            raise WireError("a ticket ended with another number of blocks")
        sources, seconds = unpack_tiers(parts[1]), float(fields["seconds"])
        if pins:
            found = self._pins.enter(ticket.keys, pins)
            pairs = zip(verdicts, pins, found, strict=True)
            verdicts = tuple(
                Verdict.MISSING if old is not None and new is None else verdict
                for verdict, old, new in pairs
            )
            pins = tuple(found)
        ticket.done = Done(
            number,
            ticket.direction,
            ticket.keys,
            verdicts,
            sources,
            seconds,
            pins,
        )
        self._end_if_over(number, ticket)

    def _check_slots(self, ticket: _Open, transfer: Transfer) -> None:
        """A copy to or from a wrong place would be wrong KV. Whoever is at fault, refuse it."""
        loads = transfer.direction is Direction.LOAD
        on_device = transfer.target_slots if loads else transfer.source_slots
        in_host = transfer.source_slots if loads else transfer.target_slots
        is_right = transfer.direction is ticket.direction
        is_right &= max(in_host, default=0) < self._num_host_slots
        if not is_right or list(map(ticket.slots.get, transfer.keys)) != list(on_device):
            raise WireError("it asks for a copy that belongs to no load or save of this process")

    # What the copies say.

    def settle_copies(self) -> None:
        """Enter the copies that have ended."""
        for outcome in self._copies.poll():
            self._copied(outcome)

    def _copied(self, outcome: Outcome) -> None:
        number, transfer = self._copying.pop(outcome.transfer_id)
        self._tell(_events_of(transfer, outcome, self._block_bytes))
        self._report(outcome)
        ticket = self._open.get(number)
        if ticket is not None:
            ticket.flying.discard(outcome.transfer_id)
            ticket.num_arrived += outcome.verdicts.count(Verdict.OK)
            if ticket.is_hit and ticket.num_arrived == len(ticket.keys):
                self._arrived(number, ticket)
            self._end_if_over(number, ticket)

    def _arrived(self, number: TicketId, ticket: _Open) -> None:
        """All blocks of a load from HOST are on the device: the node has nothing to add."""
        if ticket.done is None and ticket.ends_as is None:
            num = len(ticket.keys)
            ticket.done = Done(
                number,
                Direction.LOAD,
                ticket.keys,
                (Verdict.OK,) * num,
                (Tier.HOST,) * num,
                time.monotonic() - ticket.started,
            )

    def _end_if_over(self, number: TicketId, ticket: _Open) -> None:
        if ticket.flying or (ticket.done is None and ticket.ends_as is None):
            return
        del self._open[number]
        if ticket.done is None:
            verdicts = (ticket.ends_as or Verdict.FAILED,) * len(ticket.keys)
            seconds = time.monotonic() - ticket.started
            nowhere: tuple[Tier | None, ...] = (None,) * len(ticket.keys)
            direction = ticket.direction
            ticket.done = Done(number, direction, ticket.keys, verdicts, nowhere, seconds)
        self._dones.append(ticket.done)


def _events_of(transfer: Transfer, outcome: Outcome, block_bytes: int) -> list[Event]:
    """What the books would say of a copy that they carried out themselves."""
    source, target, direction = transfer.source, transfer.target, transfer.direction
    counts = Counter(outcome.verdicts)
    num_ok = counts.pop(Verdict.OK, 0)
    events: list[Event] = []
    if num_ok:
        moved = num_ok * block_bytes
        events.append(Moved(source, target, direction, num_ok, moved, outcome.seconds))
    for verdict, num_blocks in sorted(counts.items()):
        events.append(Lost(source, target, direction, verdict, num_blocks, outcome.error))
    return events
