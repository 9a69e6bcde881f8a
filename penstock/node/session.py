"""Session: one client of a node, from its attaching until no process of it is left.

A client may ask for anything, in any order, and may be wrong: a request that makes no sense raises
WireError, and ends this session alone. Leases, claims and pins belong to the session. They are
given back when the client says goodbye, or when all of its processes have ended: a client that has
only stopped talking may still copy, or read what it has pinned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import BookError
from penstock.events import Event
from penstock.node.events_wire import is_shared, pack_event
from penstock.node.room import NodeRoom
from penstock.node.switchboard import Port
from penstock.node.wire import (
    Channel,
    Frame,
    WireError,
    encode,
    pack_keys,
    pack_slots,
    pack_tiers,
    pack_verdicts,
    unpack_given_slots,
    unpack_keys,
    unpack_parents,
    unpack_slots,
    unpack_text,
    unpack_verdicts,
)
from penstock.offload import Offloader
from penstock.types import (
    BlockKey,
    Direction,
    Done,
    LookupId,
    Outcome,
    Slot,
    TicketId,
    Tier,
    Transfer,
    TransferId,
    Verdict,
)

_MAX_TICKETS = 1 << 16


class Session:
    def __init__(
        self,
        number: int,
        token: str,
        name: str,
        channel: Channel,
        room: NodeRoom,
        *,
        max_pins: int,
        wants_events: bool,
    ) -> None:
        self.number = number
        self.token = token  # its further processes show it to join
        self.name = name
        self.channel = channel
        self.room = room
        self.port = Port()
        self._max_pins = max_pins
        self._wants_events = wants_events
        self._tickets: dict[int, TicketId] = {}  # by the client's own numbers
        self._numbers: dict[TicketId, int] = {}
        self._pins: Counter[Slot] = Counter()
        self._pins_to_come: dict[TicketId, int] = {}  # of loads that have not ended
        self._lookups: set[LookupId] = set()
        self._hits: set[int] = set()  # tickets of loads from HOST alone
        self._last_state = b""
        self.has_left = False  # said goodbye: nothing of it is running
        self.is_gone = False  # everything was given back
        room.num_sessions += 1

    # What a client asks for.

    def handle(self, frame: Frame, now: float) -> None:
        """Carry out one frame. Raises WireError."""
        answer = getattr(self, f"_on_{frame.kind}", None)
        if answer is None or not frame.kind.isidentifier():
            raise WireError(f'a node does not know the request "{frame.kind[:40]}"')
        try:
            answer(frame, now)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise WireError(f'the request "{frame.kind}" is incomplete: {error!r}') from None

    def _on_load(self, frame: Frame, now: float) -> None:
        keys, slots = _distinct_keys(frame.parts[0]), unpack_slots(frame.parts[1])
        number = self._new_ticket(frame, len(keys), len(slots))
        num_pins = slots.count(None)
        if num_pins and self._num_taken_pins + num_pins > self._max_pins:
            self._send_done(number, _dropped(number, keys))
            return
        fields = frame.fields
        if not num_pins and self.room.offloader.are_in_host(keys):
            self._hits.add(number)
        else:
            self._make_room(keys, now, load=True)
        with self.room.switchboard.on_behalf_of(self.port):
            ticket = self.room.offloader.load(
                keys,
                slots,
                deadline_seconds=_seconds(fields.get("deadline")),
                patience_seconds=_seconds(fields.get("patience")),
                tenant=unpack_text(fields.get("tenant", "")),
                parents=unpack_parents(fields.get("parents", [])),
            )
        if num_pins:
            self._pins_to_come[ticket] = num_pins
        self._take_ticket(number, ticket)

    def _on_save(self, frame: Frame, now: float) -> None:
        keys, slots = _distinct_keys(frame.parts[0]), unpack_given_slots(frame.parts[1])
        number = self._new_ticket(frame, len(keys), len(slots))
        fields = frame.fields
        self._make_room(keys, now, load=False)
        with self.room.switchboard.on_behalf_of(self.port):
            ticket = self.room.offloader.save(
                keys,
                slots,
                tenant=unpack_text(fields.get("tenant", "")),
                parents=unpack_parents(fields.get("parents", [])),
                whole=bool(fields.get("whole", False)),
                write_down=bool(fields.get("write_down", True)),
            )
        self._take_ticket(number, ticket)

    def _on_cancel(self, frame: Frame, now: float) -> None:
        ticket = self._tickets.get(int(frame.fields["ticket"]))
        if ticket is not None:
            self.room.offloader.cancel(ticket)

    def _on_report(self, frame: Frame, now: float) -> None:
        fields = frame.fields
        ended = fields.get("ended")
        outcome = Outcome(
            TransferId(int(fields["transfer"])),
            unpack_verdicts(frame.parts[0]),
            _seconds(fields.get("seconds")) or 0.0,
            unpack_text(fields.get("error", "")),
            None if ended is None else min(_seconds(ended) or 0.0, now),
        )
        if not self.room.switchboard.report(self.port, outcome):
            raise WireError(f"a copy was reported that is not this client's: {outcome.transfer_id}")

    def _on_match(self, frame: Frame, now: float) -> None:
        match = self.room.offloader.match(unpack_keys(frame.parts[0]))
        self._reply(
            frame,
            {
                "runs": [[int(run.tier), run.num_blocks] for run in match.runs],
                "pending": match.num_pending,
                "seconds": match.load_seconds,
            },
        )

    def _on_where(self, frame: Frame, now: float) -> None:
        tiers = self.room.offloader.where(unpack_keys(frame.parts[0]))
        self._reply(frame, {}, pack_tiers(tiers))

    def _on_in_host(self, frame: Frame, now: float) -> None:
        is_there = self.room.offloader.is_in_host
        self._reply(frame, {}, bytes(map(is_there, unpack_keys(frame.parts[0]))))

    def _on_pin(self, frame: Frame, now: float) -> None:
        keys = unpack_keys(frame.parts[0])
        room = max(0, self._max_pins - self._num_taken_pins)
        slots = self.room.offloader.pin(keys[:room])
        self._pins.update(slot for slot in slots if slot is not None)
        self._reply(frame, {}, pack_slots([*slots, *[None] * (len(keys) - len(slots))]))

    def _on_unpin(self, frame: Frame, now: float) -> None:
        slots = Counter(unpack_given_slots(frame.parts[0]))
        if any(self._pins[slot] < count for slot, count in slots.items()):
            raise WireError("a block is unpinned that this client has not pinned")
        self.room.offloader.unpin(list(slots.elements()))
        self._forget_pins(slots)

    def _on_lookup(self, frame: Frame, now: float) -> None:
        found = self.room.offloader.lookup(_each_once(frame.parts[0]))
        if found is not None:
            self._lookups.add(found)
        self._reply(frame, {"lookup": found})

    def _on_used(self, frame: Frame, now: float) -> None:
        keys = unpack_keys(frame.parts[0])
        self.room.offloader.used(keys, tenant=unpack_text(frame.fields.get("tenant", "")))

    def _on_offer(self, frame: Frame, now: float) -> None:
        self.room.offloader.offer(
            unpack_keys(frame.parts[0]),
            tenant=unpack_text(frame.fields.get("tenant", "")),
            parents=unpack_parents(frame.fields.get("parents", [])),
        )

    def _on_retain(self, frame: Frame, now: float) -> None:
        seconds = _seconds(frame.fields["seconds"])
        name = unpack_text(frame.fields["name"])
        keys = unpack_keys(frame.parts[0])
        num_blocks = self.room.offloader.retain(keys, seconds or 0.0, name)
        self._reply(frame, {"num": num_blocks})

    def _on_release(self, frame: Frame, now: float) -> None:
        self._reply(frame, {"num": self.room.offloader.release(unpack_text(frame.fields["name"]))})

    def _on_demote(self, frame: Frame, now: float) -> None:
        self._reply(frame, {"num": self.room.offloader.demote(unpack_keys(frame.parts[0]))})

    def _on_discard(self, frame: Frame, now: float) -> None:
        self._reply(frame, {"num": self.room.offloader.discard(_each_once(frame.parts[0]))})

    def _on_prefetch(self, frame: Frame, now: float) -> None:
        fields = frame.fields
        keys = _each_once(frame.parts[0])
        self._make_room(keys, now, load=True)
        num_blocks = self.room.offloader.prefetch(
            keys,
            tenant=unpack_text(fields.get("tenant", "")),
            retain_seconds=_seconds(fields.get("retain_seconds")),
            name=unpack_text(fields.get("name", "")),
            parents=unpack_parents(fields.get("parents", [])),
        )
        self._last_state = b""  # the client must hear of the end, however soon it comes
        self._reply(frame, {"num": num_blocks})

    def _on_keep_together(self, frame: Frame, now: float) -> None:
        self.room.offloader.keep_together(unpack_keys(frame.parts[0]))

    def _on_supersede(self, frame: Frame, now: float) -> None:
        self.room.offloader.supersede(unpack_keys(frame.parts[0]))

    def _on_quarantine(self, frame: Frame, now: float) -> None:
        self.room.quarantine(self.name)

    def _on_empty_host(self, frame: Frame, now: float) -> None:
        self._reply(frame, {"num": self.room.offloader.empty_host()})

    def _on_sync(self, frame: Frame, now: float) -> None:
        """Answer after the copies of everything that the client has asked for so far."""
        for transfer in self.port.take_unsent():
            self._send_transfer(transfer)
        self._reply(frame, {})

    def _on_is_moving(self, frame: Frame, now: float) -> None:
        self._reply(frame, {"is_moving": self.room.offloader.is_moving})

    def _on_check(self, frame: Frame, now: float) -> None:
        try:
            self.room.check()
        except BookError as error:
            self._reply(frame, {"error": str(error)})
        else:
            self._reply(frame, {"error": ""})

    def _on_bye(self, frame: Frame, now: float) -> None:
        self.has_left = True

    # What the node has to say.

    def send_news(self, events: bytes, state: bytes) -> None:
        """Queue copies to make, ended lookups, and what changed in the tiers."""
        if self.channel.is_closed:
            return
        self.send_copies()
        for lookup in [each for each in self._lookups if not self._is_open(each)]:
            self._lookups.discard(lookup)
            self.channel.send("looked_up", {"lookup": lookup})
        if self._wants_events:
            self.channel.send_encoded(events)
        if state != self._last_state:
            self._last_state = state
            self.channel.send_encoded(state)

    def send_copies(self) -> None:
        """Queue copies to make, and those that are not needed any more."""
        if self.channel.is_closed:
            return
        for transfer in self.port.take_unsent():
            self._send_transfer(transfer)
        for transfer_id in self.port.take_cancels():
            self.channel.send("cancel", {"transfer": transfer_id})

    def send_done(self, done: Done) -> bool:
        """Send the end of a load or save, if it is this session's."""
        number = self._numbers.pop(done.ticket, None)
        if number is None:
            return False
        self._tickets.pop(number, None)
        self._pins_to_come.pop(done.ticket, None)
        self._hits.discard(number)
        self.room.switchboard.ticket_ended(done.ticket)
        self._pins.update(slot for slot in done.pins if slot is not None)
        if not self.channel.is_closed:
            self._send_done(number, done)
        return True

    # The end.

    @property
    def may_touch_dram(self) -> bool:
        """Whether the client was sent a copy that it has not reported, or has a pin."""
        return bool(self.port.sent or self._pins)

    def hang_up(self) -> None:
        """The client's connection has ended. Its copies may still run."""
        self.room.switchboard.hang_up(self.port)
        for ticket in list(self._numbers):
            self.room.offloader.cancel(ticket)

    def give_back(self) -> None:
        """Give back everything: no process of this client touches DRAM any more."""
        if self.is_gone:
            return
        self.is_gone = True
        self.room.num_sessions -= 1
        self.hang_up()
        self.room.switchboard.give_up(self.port)
        if self._pins and not self.room.is_broken:
            self.room.offloader.unpin(list(self._pins.elements()))
        self._pins.clear()

    def _is_open(self, lookup: LookupId) -> bool:
        return self.room.offloader.is_looking_up(lookup)

    def _new_ticket(self, frame: Frame, num_keys: int, num_slots: int) -> int:
        number = int(frame.fields["ticket"])
        if number in self._tickets:
            raise WireError(f"ticket {number} is used twice")
        if len(self._tickets) >= _MAX_TICKETS:
            raise WireError(f"more than {_MAX_TICKETS} loads and saves are open")
        if num_keys != num_slots:
            raise WireError(f"got {num_keys} keys but {num_slots} slots")
        return number

    def _take_ticket(self, number: int, ticket: TicketId) -> None:
        self._tickets[number] = ticket
        self._numbers[ticket] = number
        self.room.switchboard.assign(ticket, self.port)

    @property
    def _num_taken_pins(self) -> int:
        return len(self._pins) + sum(self._pins_to_come.values())

    def _make_room(self, keys: Sequence[BlockKey], now: float, *, load: bool) -> None:
        """Let the room take DRAM for the blocks that need a slot there."""
        if len(keys) <= self.room.offloader.num_free_host_blocks:
            return
        places = self.room.offloader.where(keys)
        if load:
            num_blocks = sum(tier is not None and tier is not Tier.HOST for tier in places)
        else:
            num_blocks = sum(tier is not Tier.HOST for tier in places)
        self.room.make_room(num_blocks, now)

    def _forget_pins(self, slots: Mapping[Slot, int]) -> None:
        for slot, count in slots.items():
            self._pins[slot] -= count
            if not self._pins[slot]:
                del self._pins[slot]

    def _reply(self, frame: Frame, fields: dict[str, Any], *parts: bytes) -> None:
        # A number: anything else is not echoed. What is nested too deep cannot be written.
        self.channel.send("reply", {**fields, "call": int(frame.fields["call"])}, *parts)

    def _send_transfer(self, transfer: Transfer) -> None:
        number = None if transfer.ticket is None else self._numbers.get(transfer.ticket)
        fields: dict[str, Any] = {
            "transfer": transfer.id,
            "load": transfer.direction is Direction.LOAD,
            "ticket": number,
            "deadline": transfer.deadline,
        }
        if number in self._hits:
            fields["hit"] = True  # all blocks of the ticket come from HOST
        self.channel.send(
            "transfer",
            fields,
            pack_keys(transfer.keys),
            pack_slots(transfer.source_slots),
            pack_slots(transfer.target_slots),
        )

    def _send_done(self, number: int, done: Done) -> None:
        self.channel.send(
            "done",
            {"ticket": number, "load": done.direction is Direction.LOAD, "seconds": done.seconds},
            pack_verdicts(done.verdicts),
            pack_tiers(done.sources),
            pack_slots(done.pins),
        )


def encode_events(events: Sequence[Event]) -> bytes:
    """The events that clients observe too, as frames."""
    packed = [pack_event(event) for event in events if is_shared(event)]
    return b"".join(encode("event", fields, keys) for fields, keys in packed)


def encode_state(offloader: Offloader) -> bytes:
    """The state of a model's tiers, as a frame."""
    return encode(
        "state",
        {
            "num_blocks": offloader.num_blocks,
            "num_retained": offloader.num_retained,
            "is_prefetching": offloader.is_prefetching,
            "is_quarantined": offloader.is_quarantined,
            "rates": {
                int(tier): [
                    rate.bytes_per_second,
                    rate.latency_seconds,
                    None if math.isinf(rate.largest_bytes) else rate.largest_bytes,
                ]
                for tier, rate in offloader.rates.items()
            },
        },
    )


def _distinct_keys(part: bytes) -> tuple[BlockKey, ...]:
    keys = unpack_keys(part)
    if len(set(keys)) != len(keys):
        raise WireError("a block is named twice")
    return keys


def _each_once(part: bytes) -> tuple[BlockKey, ...]:
    return tuple(dict.fromkeys(unpack_keys(part)))


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    seconds = float(value)
    if not 0 <= seconds < 1e9:
        raise WireError(f"{value!r} is not a number of seconds")
    return seconds


def _dropped(number: int, keys: Sequence[BlockKey]) -> Done:
    """A load that would pin more than a client may."""
    sources: tuple[Tier | None, ...] = (None,) * len(keys)
    verdicts = (Verdict.DROPPED,) * len(keys)
    return Done(TicketId(number), Direction.LOAD, tuple(keys), verdicts, sources, 0.0)
