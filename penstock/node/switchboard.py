"""Transfers of a room: copies between DRAM and devices go to the client that asked for them.

Everything below DRAM runs here, in the node. A client copies between its own device and DRAM, and
reports each copy. Until then, or until the client's processes are known to be gone, the slots of
that copy are not used for anything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.transfer.base import Transfers
from penstock.transfer.seals import Seals
from penstock.types import (
    Answer,
    Direction,
    Outcome,
    Question,
    TicketId,
    Tier,
    Transfer,
    TransferId,
    Verdict,
)


@dataclass(slots=True, eq=False)
class Port:
    """The copies of one client."""

    unsent: dict[TransferId, Transfer] = field(default_factory=dict)
    sent: dict[TransferId, Transfer] = field(default_factory=dict)
    cancels: list[TransferId] = field(default_factory=list)  # of copies that were sent
    is_closed: bool = False

    def take_unsent(self) -> list[Transfer]:
        """Copies to send to the client, in the order in which the books submitted them."""
        unsent, self.unsent = list(self.unsent.values()), {}
        self.sent.update((transfer.id, transfer) for transfer in unsent)
        return unsent

    def take_cancels(self) -> list[TransferId]:
        cancels, self.cancels = self.cancels, []
        return cancels


class Switchboard:
    """Implements `Transfers`. Tickets that are opened inside `on_behalf_of` belong to that port."""

    def __init__(self, below: Transfers, seals: Seals) -> None:
        self._below = below
        self._seals = seals
        self._port_of: dict[TicketId, Port] = {}
        self._port_in: dict[TransferId, Port] = {}  # of copies that have not ended
        self._current: Port | None = None
        self._ended: list[Outcome] = []
        self._closed = False

    @contextmanager
    def on_behalf_of(self, port: Port) -> Iterator[None]:
        self._current = port
        try:
            yield
        finally:
            self._current = None

    def assign(self, ticket: TicketId, port: Port) -> None:
        self._port_of[ticket] = port

    def ticket_ended(self, ticket: TicketId) -> None:
        self._port_of.pop(ticket, None)

    def report(self, port: Port, outcome: Outcome) -> bool:
        """Enter a copy that a client has ended. False, and nothing changed, if it has no such copy.

        A save counts only from now on: its blocks are sealed here, not by the client.
        """
        transfer = port.sent.get(outcome.transfer_id)
        if transfer is None or len(outcome.verdicts) != len(transfer.keys):
            return False
        del port.sent[outcome.transfer_id]
        if transfer.direction is Direction.SAVE:
            sound = [i for i, verdict in enumerate(outcome.verdicts) if verdict is Verdict.OK]
            self._seals.seal(
                [transfer.keys[i] for i in sound], [transfer.target_slots[i] for i in sound]
            )
        self._end(transfer, outcome)
        return True

    def hang_up(self, port: Port) -> None:
        """A client is not listening any more: what it has not been sent is cancelled."""
        port.is_closed = True
        for transfer in port.unsent.values():
            self._end(transfer, _all(transfer, Verdict.CANCELLED))
        port.unsent.clear()

    def give_up(self, port: Port) -> None:
        """Fail all copies of a client whose processes are gone: none touches DRAM any more."""
        self.hang_up(port)
        for transfer in port.sent.values():
            self._end(transfer, _all(transfer, Verdict.FAILED))
        port.sent.clear()

    # Transfers.

    def has_room(self, link: Tier, direction: Direction) -> bool:
        # Always room for copies: the books limit what is pending.
        return not self._closed if link is Tier.HOST else self._below.has_room(link, direction)

    def depth(self, link: Tier, direction: Direction) -> int:
        if link is not Tier.HOST:
            return self._below.depth(link, direction)
        ports = set(self._port_in.values())
        return sum(t.direction is direction for port in ports for t in port.unsent.values())

    def submit(self, transfer: Transfer) -> bool:
        if transfer.link is not Tier.HOST:
            return self._below.submit(transfer)
        if self._closed:
            return False
        port = None if transfer.ticket is None else self._port_of.get(transfer.ticket)
        port = port or self._current
        if port is None or port.is_closed:
            self._ended.append(_all(transfer, Verdict.CANCELLED))
            return True
        if transfer.direction is Direction.SAVE:
            self._seals.open(transfer.target_slots)
        self._port_in[transfer.id] = port
        port.unsent[transfer.id] = transfer
        return True

    def cancel(self, transfer_id: TransferId) -> None:
        port = self._port_in.get(transfer_id)
        if port is None:
            self._below.cancel(transfer_id)
        elif (transfer := port.unsent.pop(transfer_id, None)) is not None:
            self._end(transfer, _all(transfer, Verdict.CANCELLED))
        else:
            port.cancels.append(transfer_id)

    def poll(self) -> list[Outcome]:
        ended, self._ended = self._ended, []
        return ended + self._below.poll()

    def ask(self, question: Question) -> None:
        self._below.ask(question)

    def take_answers(self) -> list[Answer]:
        return self._below.take_answers()

    def wait(self, timeout_seconds: float) -> bool:
        return bool(self._ended) or self._below.wait(timeout_seconds)

    def close(self, timeout_seconds: float = 10.0) -> bool:
        self._closed = True
        for port in set(self._port_in.values()):
            self.give_up(port)
        return self._below.close(timeout_seconds)

    def _end(self, transfer: Transfer, outcome: Outcome) -> None:
        del self._port_in[transfer.id]
        self._ended.append(outcome)


def _all(transfer: Transfer, verdict: Verdict) -> Outcome:
    return Outcome(transfer.id, (verdict,) * len(transfer.keys))
