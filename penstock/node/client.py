"""NodeTiers: the tiers of a node, with the interface of an `Offloader`.

The node owns the books, DRAM and everything below. This side owns the device: it makes the copies
between device and DRAM that the node asks for, and reports them.

A node may die or hang at any time. Then nothing is found, loads and saves end, and the client
computes. Blocks that are pinned stay readable, because this process keeps the memory of a node that
is gone. Once nothing uses that memory, the client attaches again, if a node is there; the new
memory has the same addresses.

Its parts: `Line` (the connection), `Handshake` (how it comes about), `ClientMemory` (the node's
DRAM in this process), `ClientPins`, `ClientTickets` (loads and saves that are open), `NodeBooks`
(questions and hints).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.codecs.base import BlockCodec
from penstock.codecs.blocks import BlockValues, TierCodecs
from penstock.errors import BookError, PenstockError
from penstock.events import NodeLost, Observer, TicketDone
from penstock.node.client_memory import ClientMemory, Remap, close_files
from penstock.node.client_pins import ClientPins
from penstock.node.client_tickets import ClientTickets
from penstock.node.connection import NodeSettings, Place
from penstock.node.events_wire import unpack_event
from penstock.node.handshake import Handshake
from penstock.node.line import Line
from penstock.node.node_books import NodeBooks
from penstock.node.wire import (
    Channel,
    Frame,
    WireError,
    pack_keys,
    pack_parents,
    pack_slots,
    pack_text,
    pack_verdicts,
    unpack_slots,
)
from penstock.stores.host import HostArena
from penstock.transfer.base import Transfers
from penstock.transfer.seals import Seals
from penstock.types import (
    NO_PARENTS,
    BlockKey,
    BlockSpec,
    Direction,
    Done,
    Outcome,
    Slot,
    TicketId,
    Tier,
    Transfer,
    Verdict,
)

MakeCopies = Callable[[HostArena, Seals, BlockCodec, Callable[[], None]], Transfers]
"""Makes the transfers between device and HOST. The last argument is called when one has ended."""


class NodeTiers(NodeBooks):
    """Use it from one thread only, like an Offloader."""

    def __init__(
        self,
        path: Path,
        channel: Channel,
        settings: NodeSettings,
        spec: BlockSpec,
        values: BlockValues,
        codecs: TierCodecs,
        make_copies: MakeCopies,
        *,
        name: str = "",
        in_one: bool = False,
        observers: Iterable[Observer] = (),
        remap: Remap = lambda replace_memory: replace_memory(),
        accepts: Callable[[Transfer], bool] = lambda transfer: True,
    ) -> None:
        """Attach over `channel` (see `open_node`). Raises ConfigError.

        Raises NodeEnded if the node ends before it has answered. `make_copies` has not been called
        then, so another node can be tried.

        `remap` is called to replace DRAM's memory by another node's, so that the copies can unpin
        the old and pin the new (see `Mover.remap`). `accepts` says whether a copy for an open
        ticket may still be made.
        """
        line = Line(path, settings, self._exchange)
        super().__init__(line, codecs, spec.block_tokens, observers)
        self._closed = False
        self._is_abandoned = False
        self._dones: list[Done] = []  # for the next `step`
        self._handshake = Handshake(
            self._line, spec, values, name=name or f"process {os.getpid()}", in_one=in_one
        )
        try:
            place = self._handshake.first(channel)
        except BaseException:
            channel.close()
            line.close()
            raise
        line.use(channel)
        try:
            self._memory = ClientMemory(place, codecs.spec(Tier.HOST, spec), remap)
            self._pins = ClientPins(self._line, self._memory)
            self._copies = make_copies(
                self._memory.host, self._memory.seals, codecs.host, self._line.wake
            )
        except BaseException:
            # Nothing was copied or pinned, so the node ends the session with the connection.
            close_files(place)
            line.close()
            raise
        self._tickets = ClientTickets(
            self._copies,
            self._pins,
            num_host_slots=self._memory.host.num_slots,
            block_bytes=self.host_block_bytes,
            accepts=accepts,
            report=self._report,
            tell=self._tell,
        )
        self._tell([self._codecs_chosen])
        self._asks_whether_moving()  # the answer follows the first state

    @property
    def place(self) -> Place:
        """For further processes of this client that map the same memory."""
        return self._memory.place

    @property
    def has_session(self) -> bool:
        """Whether a node has this client, even if it hangs."""
        return self._line.is_open

    @property
    def is_attached(self) -> bool:
        return self._line.is_answering

    is_available = is_attached

    @property
    def host(self) -> HostArena | None:
        return self._memory.host

    def read_host(self, slot: Slot) -> memoryview:
        return self._codecs.host.values(self._memory.host.view(slot))

    @property
    def is_moving(self) -> bool:
        """Whether anything of this client is under way."""
        is_copying = self._tickets.is_copying
        return bool(self._tickets or self._lookups or is_copying or self._is_prefetching)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def num_host_blocks(self) -> int:
        """How many blocks the model may have in the node's DRAM, now or once it needs them."""
        return self.place.max_blocks

    @property
    def num_pinnable_blocks(self) -> int:
        return self.place.max_pins

    @property
    def num_blocks(self) -> int:
        return max(self._num_blocks, self.num_host_blocks)

    # Loads, saves and pins.

    def load(
        self,
        keys: Sequence[BlockKey],
        into: Sequence[Slot | None],
        *,
        deadline_seconds: float | None = None,
        patience_seconds: float | None = None,
        tenant: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> TicketId:
        """See `Offloader.load`."""
        self._require_open()
        seconds = self._line.settings.load_deadline_seconds
        seconds = seconds if deadline_seconds is None else deadline_seconds
        ticket = self._tickets.open(Direction.LOAD, keys, into, seconds)
        if self.is_attached and not self._is_quarantined:
            fields: dict[str, Any] = {
                "ticket": ticket,
                "deadline": seconds,
                "tenant": pack_text(tenant),
            }
            if patience_seconds is not None:
                fields["patience"] = patience_seconds
            if parents:
                fields["parents"] = pack_parents(parents)
            self._line.send("load", fields, pack_keys(keys), pack_slots(into))
        else:
            self._tickets.end(ticket, Verdict.MISSING)
        return ticket

    def save(
        self,
        keys: Sequence[BlockKey],
        source: Sequence[Slot],
        *,
        tenant: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
        whole: bool = False,
        write_down: bool = True,
    ) -> TicketId:
        """See `Offloader.save`."""
        self._require_open()
        ticket = self._tickets.open(Direction.SAVE, keys, source, None)
        if self.is_attached:
            fields: dict[str, Any] = {"ticket": ticket, "tenant": pack_text(tenant)}
            if parents:
                fields["parents"] = pack_parents(parents)
            if whole:
                fields["whole"] = True
            if not write_down:
                fields["write_down"] = False
            self._line.send("save", fields, pack_keys(keys), pack_slots(source))
        else:
            self._tickets.end(ticket, Verdict.DROPPED)
        return ticket

    def cancel(self, ticket: TicketId) -> None:
        if ticket not in self._tickets:
            return
        if self.is_attached:
            self._line.send("cancel", {"ticket": ticket})
        else:
            self._tickets.end(ticket, Verdict.CANCELLED)

    def pin(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        def read(reply: Frame) -> list[Slot | None]:
            slots = self._pins.enter(keys, unpack_slots(reply.parts[0]))
            self._in_host.difference_update(
                key for key, slot in zip(keys, slots, strict=True) if slot is None
            )
            return slots

        def give_back(reply: Frame) -> None:
            self._pins.give_back(unpack_slots(reply.parts[0]))

        self._require_open()
        slots = self._line.call("pin", {}, pack_keys(keys), read=read, late=give_back)
        return [None] * len(keys) if slots is None else slots

    def unpin(self, slots: Sequence[Slot]) -> None:
        self._pins.remove(slots)

    # Time passes.

    def step(self) -> list[Done]:
        """Exchange news with the node, and return what has ended. Never blocks.

        After `abandon` nothing is returned: it would be entered in books that nobody trusts.
        """
        self._advance()
        dones, self._dones = self._dones, []
        return [] if self._is_abandoned else dones

    def wait(self, tickets: Collection[TicketId], timeout_seconds: float = 60.0) -> list[Done]:
        missing = set(tickets)
        dones: list[Done] = []
        end = time.monotonic() + timeout_seconds
        while True:
            arrived = self.step()
            dones.extend(arrived)
            missing.difference_update(done.ticket for done in arrived)
            if not missing or time.monotonic() >= end:
                return dones
            self.pause(0.01)

    def pause(self, timeout_seconds: float) -> None:
        """Block until there is news, or time is up.

        Also if tickets have ended because the node is gone: whoever tries again would not pause.
        """
        self._line.pause(timeout_seconds, instead=self._handshake.channel)

    def drain(self, timeout_seconds: float = 60.0) -> bool:
        """Wait until nothing is under way, including the node's writes of this model's blocks.

        The next `step` returns the tickets that ended meanwhile.
        """
        end = time.monotonic() + timeout_seconds
        while time.monotonic() < end:
            self._advance()
            if not self._tickets and not self._asks_whether_moving():
                return True
            self.pause(0.01)
        return False

    def recover(self, timeout_seconds: float = 600.0) -> bool:
        """The node recovers its disk by itself."""
        return self.drain(timeout_seconds)

    def check(self) -> None:
        """Raise BookError if this client's books, or the node's, do not add up."""
        self._tickets.check()
        error = self._line.call("check", {}, read=lambda reply: str(reply.fields["error"]))
        if error:
            raise BookError(f"the node: {error}")

    def let_go(self, timeout_seconds: float) -> bool:
        """End all loads and saves and remove all pins, because the client has lost its books."""
        self._cancel_all()
        end = time.monotonic() + timeout_seconds
        while self._is_busy:
            if time.monotonic() >= end:
                return False
            self.pause(0.01)
            self._advance()
        self._dones = []
        self._pins.remove_all()
        return True

    def close(self, timeout_seconds: float = 30.0) -> bool:
        """Finish what is under way, and say goodbye. The node keeps the blocks."""
        if self._closed:
            return True
        end = time.monotonic() + timeout_seconds
        while self._is_busy and time.monotonic() < end:
            self._advance()
            self.pause(0.01)
        return self._leave(max(0.1, end - time.monotonic()), ended=not self._is_busy)

    def abandon(self, timeout_seconds: float) -> bool:
        """Leave without finishing, because the client's books cannot be trusted."""
        self._is_abandoned = True
        return self._closed or self._leave(timeout_seconds, ended=True)

    def __enter__(self) -> NodeTiers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_busy(self) -> bool:
        return bool(self._tickets) or self._tickets.is_copying

    def _cancel_all(self) -> None:
        for ticket in self._tickets.numbers:
            self.cancel(ticket)

    def _leave(self, timeout_seconds: float, *, ended: bool) -> bool:
        """Close. `ended`: nothing of this client's will run, once the copies are closed."""
        self._closed = True
        stopped = self._copies.close(timeout_seconds)
        has_told = stopped and ended and self._line.say_goodbye(timeout_seconds)
        self._hang_up()
        if stopped and ended:
            self._handshake.keep_goodbyes(has_told_last=has_told)
        if stopped:
            self._memory.close_files()
            self._line.close()
        return stopped and ended

    def _hang_up(self) -> None:
        self._drop_line()
        self._handshake.stop()

    # News.

    def _advance(self) -> None:
        """Take what has arrived, and do what is due. Never blocks."""
        self._exchange()
        now = time.monotonic()
        if self._tickets or self._lookups:
            self._line.probe(now)
        if self._line.hangs_for_long(now):
            # Saves have no deadline, but their blocks are needed.
            self._tickets.end_all(Verdict.EXPIRED)
            self._lookups.clear()
        for ticket in self._tickets.end_overdue(now):
            self._line.send("cancel", {"ticket": ticket})
        if not self._line.is_open and not self._closed:
            is_unused = not self._pins and not self._tickets.is_copying
            if self._handshake.try_again(self._memory, is_unused=is_unused):
                self._tell_quarantine()
        dones = self._tickets.take_dones()
        self._dones += dones
        self._tell(
            TicketDone(
                done.direction, len(done.keys), done.verdicts.count(Verdict.OK), done.seconds
            )
            for done in dones
        )

    def _exchange(self) -> None:
        """Take what has arrived, from the node and from copies, without waiting."""
        why = self._line.receive(self._hear)
        if why is not None:
            self._lose_node(why)
        self._tickets.settle_copies()
        self._line.flush()

    def _hear(self, frame: Frame) -> None:
        fields, parts = frame.fields, frame.parts
        match frame.kind:
            case "transfer":
                self._tickets.copy(fields, parts)
            case "cancel":
                self._tickets.cancel_copy(fields)
            case "done":
                self._tickets.node_ended(fields, parts)
            case "looked_up":
                self._hear_looked_up(fields)
            case "state":
                self._hear_state(fields)
            case "event":
                event = unpack_event(fields, parts[0])
                self._hear_event(event)
                self._tell([event])
            case _:
                raise WireError(f'the node sent "{frame.kind[:40]}", which is not known')

    def _lose_node(self, why: str) -> None:
        """The node is gone: everything that it would have ended ends here."""
        self._drop_line()
        self._line.warn(
            f"the node at {self._line.path} is gone ({why}): nothing is loaded until it is back"
        )
        self._tickets.end_all(Verdict.FAILED)
        self._tell([NodeLost()])

    def _drop_line(self) -> None:
        if self._line.is_open:
            self._handshake.session_ended(self.place.token)
        self._line.drop()
        self._forget_books()

    def _asks_whether_moving(self) -> bool:
        """Whether anything of this model is under way at the node. False if it does not answer."""
        return bool(
            self._line.call("is_moving", {}, read=lambda reply: bool(reply.fields["is_moving"]))
        )

    def _report(self, outcome: Outcome) -> None:
        """Tell the node of a copy, also if it hangs: it waits for all of them."""
        self._line.queue(
            "report",
            {
                "transfer": outcome.transfer_id,
                "seconds": outcome.seconds,
                "error": outcome.error[:1000],
                "ended": outcome.ended,
            },
            pack_verdicts(outcome.verdicts),
        )

    def _require_open(self) -> None:
        if self._closed:
            raise PenstockError("the connection to the node is closed; open a new one")
