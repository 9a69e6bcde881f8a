"""NodeTiers: the tiers of a node, with the interface of an `Offloader`.

The node owns the books, DRAM and everything below. This side owns the device: it makes the copies
between device and DRAM that the node asks for, and reports them.

A node may die or hang at any time. Then nothing is found, loads and saves end, and the client
computes. No ticket ends while a copy touches its device slots, and a copy that the node asks for
after its ticket has ended here is refused. Blocks that are pinned stay readable, because this
process keeps the memory of a node that is gone. Once nothing uses that memory, the client attaches
again, if a node is there; the new memory has the same addresses.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from select import POLLIN, POLLOUT, poll
from typing import Any

from penstock.codecs.base import BlockCodec
from penstock.codecs.blocks import BlockValues, TierCodecs
from penstock.costs.rates import LinkRate
from penstock.errors import BookError, ConfigError, PenstockError
from penstock.events import (
    CodecsChosen,
    Event,
    LookedUp,
    Lost,
    Moved,
    Observer,
    Removed,
    Stored,
    TicketDone,
    TierCodec,
    tell,
)
from penstock.node.connection import (
    NodeEnded,
    NodeSettings,
    Place,
    connect,
    find_node,
    read_place,
    read_settings,
    send_attach,
    send_hello,
    wait_for_frame,
)
from penstock.node.events_wire import unpack_event
from penstock.node.goodbye import keep_for_later, say_goodbye, to_tell, told
from penstock.node.wire import (
    Channel,
    Frame,
    WireError,
    pack_keys,
    pack_parents,
    pack_slots,
    pack_text,
    pack_verdicts,
    unpack_given_slots,
    unpack_keys,
    unpack_slots,
    unpack_tiers,
    unpack_verdicts,
)
from penstock.stores.host import HostArena
from penstock.transfer.base import Transfers
from penstock.transfer.seals import ReadSeals, Seals
from penstock.types import (
    KEY_BYTES,
    NO_PARENTS,
    BlockKey,
    BlockSpec,
    Direction,
    Done,
    LookupId,
    Match,
    Outcome,
    Run,
    Slot,
    TicketId,
    Tier,
    Transfer,
    TransferId,
    Verdict,
)

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 1.0  # a node that takes longer hangs
_START_SECONDS = 30.0  # to attach for the first time: the node may open a disk
_LATE_SECONDS = 1.0  # after its deadline, a load ends here even if the node says nothing
_RETRY_SECONDS = 1.0
_REFUSED_RETRY_SECONDS = 30.0
_TELL_SECONDS = 60.0

_WRONG = (LookupError, TypeError, ValueError, AttributeError, OverflowError)

MakeCopies = Callable[[HostArena, Seals, BlockCodec, Callable[[], None]], Transfers]
"""Makes the transfers between device and HOST. The last argument is called when one has ended."""


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


class NodeTiers:
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
        remap: Callable[[Callable[[], None]], None] = lambda replace_memory: replace_memory(),
    ) -> None:
        """Attach over `channel` (see `open_node`). Raises ConfigError.

        Raises NodeEnded if the node ends before it has answered. `make_copies` has not been called
        then, so another node can be tried.

        `remap` is called to replace DRAM's memory by another node's, so that the copies can unpin
        the old and pin the new (see `Mover.remap`).
        """
        self._path = path
        self._settings = settings
        self._spec = spec
        self._values = values
        self._codecs = codecs
        self._name = name or f"process {os.getpid()}"
        self._in_one = in_one
        self._remap = remap
        self._observers = list(observers)
        self._wake_file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls = count(1)
        self._ticket_ids = count(1)
        self._tickets: dict[TicketId, _Open] = {}
        self._ticket_of: dict[TransferId, tuple[TicketId, Transfer]] = {}
        self._dones: list[Done] = []
        self._pins: Counter[Slot] = Counter()
        self._lookups: set[LookupId] = set()
        self._replies: dict[int, Frame] = {}
        self._late_pins: set[int] = set()  # calls whose answers came too late
        self._ended_tokens: list[str] = []
        self._told_tokens: tuple[str, ...] = ()  # of earlier clients in this process
        self._in_host: set[BlockKey] = set()  # blocks that are known to be in HOST
        self._reset_state()
        self._hangs_since: float | None = None
        self._heard = time.monotonic()  # when the node last said something
        self._probe: float | None = None  # when it was asked whether it is there
        self._next_try = 0.0
        self._last_told = -math.inf
        self._closed = False
        self._channel: Channel | None = None
        self._joining: Channel | None = None  # a new connection that is not attached yet
        place = self._attach_first(channel)
        host_spec = codecs.spec(Tier.HOST, spec)
        if place.block_bytes != host_spec.block_bytes:
            raise ConfigError(
                f"the node has blocks of {place.block_bytes} bytes for this model, this process "
                f"needs {host_spec.block_bytes}: expected the same codec; upgrade the older one."
            )
        headroom = place.stride_bytes - host_spec.stride_bytes
        self.host: HostArena | None = HostArena.over(
            place.file, host_spec, place.dram_bytes, headroom
        )
        self._seals_memory = _map_seals(place)
        self._seals = ReadSeals(self.host, memoryview(self._seals_memory))
        self._place = place
        self._channel = channel
        self._copies = make_copies(self.host, self._seals, codecs.host, self._wake)
        self._codecs_chosen = CodecsChosen(
            tuple(
                TierCodec(tier, codec, codecs.of(tier).packed_bytes)
                for tier, codec in codecs.names.items()
            ),
            codecs.host.raw_bytes,
            spec.block_tokens,
        )
        self._tell([self._codecs_chosen])
        self._call("is_moving", {})  # its answer follows the first state

    @property
    def place(self) -> Place:
        """For further processes of this client that map the same memory."""
        return self._place

    @property
    def is_attached(self) -> bool:
        return self._channel is not None and self._hangs_since is None

    is_available = is_attached

    def observe(self, observer: Observer) -> None:
        self._observers.append(observer)
        tell([observer], [self._codecs_chosen])

    # What is there.

    def match(self, keys: Sequence[BlockKey]) -> Match:
        if self._is_quarantined or not keys:
            return Match(len(keys))
        reply = self._call("match", {}, pack_keys(keys))
        if reply is None:
            return Match(len(keys))
        fields = reply.fields
        runs = tuple(Run(Tier(tier), num) for tier, num in fields["runs"])
        return Match(len(keys), runs, fields["pending"], fields["seconds"])

    def where(self, keys: Sequence[BlockKey]) -> list[Tier | None]:
        reply = None if self._is_quarantined else self._call("where", {}, pack_keys(keys))
        return [None] * len(keys) if reply is None else list(unpack_tiers(reply.parts[0]))

    def is_in_host(self, key: BlockKey) -> bool:
        """As the node said last, or asked if it has not said anything: `pin` finds out."""
        if not self.is_attached:
            return False
        if key in self._in_host:
            return True
        reply = self._call("in_host", {}, pack_keys([key]))
        is_there = reply is not None and reply.parts[0] == b"\1"
        if is_there:
            self._in_host.add(key)
        return is_there

    def lookup(self, keys: Sequence[BlockKey]) -> LookupId | None:
        if not self._settings.has_remote or self._is_quarantined:
            return None
        reply = self._call("lookup", {}, pack_keys(keys))
        if reply is None or reply.fields["lookup"] is None:
            return None
        return LookupId(int(reply.fields["lookup"]))

    def is_looking_up(self, lookup_id: LookupId) -> bool:
        return lookup_id in self._lookups

    @property
    def rates(self) -> dict[Tier, LinkRate]:
        return self._rates

    @property
    def codecs(self) -> Mapping[Tier, str]:
        return self._codecs.names

    @property
    def host_codec(self) -> BlockCodec:
        return self._codecs.host

    @property
    def host_block_bytes(self) -> int:
        return self._codecs.host.packed_bytes

    def read_host(self, slot: Slot) -> memoryview:
        assert self.host is not None
        return self._codecs.host.values(self.host.view(slot))

    @property
    def is_moving(self) -> bool:
        """Whether anything of this client is under way."""
        return bool(self._tickets or self._lookups or self._ticket_of or self._is_prefetching)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def num_retained(self) -> int:
        return self._num_retained

    @property
    def is_prefetching(self) -> bool:
        return self._is_prefetching

    @property
    def is_quarantined(self) -> bool:
        return self._is_quarantined

    @property
    def num_host_blocks(self) -> int:
        """How many blocks the model may have in the node's DRAM, now or once it needs them."""
        return self._place.max_blocks

    @property
    def num_pinnable_blocks(self) -> int:
        return self._place.max_pins

    @property
    def num_blocks(self) -> int:
        return max(self._num_blocks, self.num_host_blocks)

    # What should happen.

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
        seconds = self._settings.load_deadline_seconds
        seconds = seconds if deadline_seconds is None else deadline_seconds
        ticket = self._open_ticket(Direction.LOAD, keys, into, seconds)
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
            self._send("load", fields, pack_keys(keys), pack_slots(into))
        else:
            self._end_here(ticket, Verdict.MISSING)
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
        ticket = self._open_ticket(Direction.SAVE, keys, source, None)
        if self.is_attached:
            fields: dict[str, Any] = {"ticket": ticket, "tenant": pack_text(tenant)}
            if parents:
                fields["parents"] = pack_parents(parents)
            if whole:
                fields["whole"] = True
            if not write_down:
                fields["write_down"] = False
            self._send("save", fields, pack_keys(keys), pack_slots(source))
        else:
            self._end_here(ticket, Verdict.DROPPED)
        return ticket

    def cancel(self, ticket: TicketId) -> None:
        if ticket not in self._tickets:
            return
        if self.is_attached:
            self._send("cancel", {"ticket": ticket})
        else:
            self._end_here(ticket, Verdict.CANCELLED)

    def pin(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        self._require_open()
        reply = self._call("pin", {}, pack_keys(keys))
        if reply is None:
            return [None] * len(keys)
        slots = self._verified_pins(keys, unpack_slots(reply.parts[0]))
        self._in_host.difference_update(
            key for key, slot in zip(keys, slots, strict=True) if slot is None
        )
        return slots

    def unpin(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._pins[slot] -= 1
            if self._pins[slot] < 0:
                raise BookError(f"slot {slot} of HOST is unpinned more often than pinned")
            if not self._pins[slot]:
                del self._pins[slot]
        if slots and self._channel is not None:
            self._send("unpin", {}, pack_slots(slots))

    def used(self, keys: Sequence[BlockKey], *, tenant: str = "") -> None:
        if keys:
            self._send("used", {"tenant": pack_text(tenant)}, pack_keys(keys))

    def offer(
        self,
        keys: Sequence[BlockKey],
        *,
        tenant: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> None:
        fields = {"tenant": pack_text(tenant), "parents": pack_parents(parents)}
        self._send("offer", fields, pack_keys(keys))

    def note(self, match: Match) -> None:
        hits = {run.tier: match.num_from(run.tier) for run in match.runs}
        self._tell([LookedUp(match.num_asked, tuple(hits.items()))])

    def retain(self, keys: Sequence[BlockKey], seconds: float, name: str) -> int:
        return self._count("retain", {"seconds": seconds, "name": pack_text(name)}, keys)

    def release(self, name: str) -> int:
        return self._count("release", {"name": pack_text(name)})

    def demote(self, keys: Sequence[BlockKey]) -> int:
        return self._count("demote", {}, keys)

    def discard(self, keys: Sequence[BlockKey]) -> int:
        return self._count("discard", {}, keys)

    def prefetch(
        self,
        keys: Sequence[BlockKey],
        *,
        tenant: str = "",
        retain_seconds: float | None = None,
        name: str = "",
    ) -> int:
        fields = {
            "tenant": pack_text(tenant),
            "retain_seconds": retain_seconds,
            "name": pack_text(name),
        }
        num_blocks = self._count("prefetch", fields, keys)
        self._is_prefetching |= bool(num_blocks)
        return num_blocks

    def keep_together(self, keys: Sequence[BlockKey]) -> None:
        self._send("keep_together", {}, pack_keys(keys))

    def supersede(self, keys: Sequence[BlockKey]) -> None:
        self._send("supersede", {}, pack_keys(keys))

    def quarantine(self) -> None:
        """Stop using stored KV, on this node and for all of its clients with this model."""
        self._is_quarantined = True
        self._send("quarantine", {})

    def empty_host(self) -> int:
        return self._count("empty_host", {})

    # Time passes.

    def step(self) -> list[Done]:
        """Exchange news with the node, and return what has ended. Never blocks."""
        self._pump()
        self._check_deadlines()
        self._try_again()
        dones, self._dones = self._dones, []
        self._tell(
            TicketDone(
                done.direction, len(done.keys), done.verdicts.count(Verdict.OK), done.seconds
            )
            for done in dones
        )
        return dones

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
        """Block until there is news, or time is up."""
        waiter = poll()
        waiter.register(self._wake_file, POLLIN)
        channel = self._channel or self._joining
        if channel is not None and not channel.is_closed:
            waiter.register(channel.fileno(), POLLIN | (POLLOUT if channel.has_unsent else 0))
        waiter.poll(max(0, math.ceil(timeout_seconds * 1000)))

    def drain(self, timeout_seconds: float = 60.0) -> bool:
        """Wait until nothing is under way, including the node's writes of this model's blocks."""
        end = time.monotonic() + timeout_seconds
        while time.monotonic() < end:
            self._dones = self.step() + self._dones
            if not self._tickets:
                reply = self._call("is_moving", {})
                if reply is None or not reply.fields["is_moving"]:
                    return True
            self.pause(0.01)
        return False

    def recover(self, timeout_seconds: float = 600.0) -> bool:
        """The node recovers its disk by itself."""
        return self.drain(timeout_seconds)

    def check(self) -> None:
        """Raise BookError if this client's books, or the node's, do not add up."""
        for transfer_id, (ticket, _) in self._ticket_of.items():
            if ticket in self._tickets and transfer_id not in self._tickets[ticket].flying:
                raise BookError(f"copy {transfer_id} of ticket {ticket} is not counted")
        reply = self._call("check", {})
        if reply is not None and reply.fields["error"]:
            raise BookError(f"the node: {reply.fields['error']}")

    def let_go(self, timeout_seconds: float) -> bool:
        """End all loads and saves and remove all pins, because the client has lost its books."""
        for ticket in list(self._tickets):
            self.cancel(ticket)
        end = time.monotonic() + timeout_seconds
        while self._tickets or self._ticket_of:
            if time.monotonic() >= end:
                return False
            self.pause(0.01)
            self.step()
        self._dones = []
        self.unpin(list(self._pins.elements()))
        return True

    def close(self, timeout_seconds: float = 30.0) -> bool:
        """Finish what is under way, and say goodbye. The node keeps the blocks."""
        if self._closed:
            return True
        end = time.monotonic() + timeout_seconds
        while (self._tickets or self._ticket_of) and time.monotonic() < end:
            self._dones += self.step()
            self.pause(0.01)
        ended = not (self._tickets or self._ticket_of)
        return self._leave(max(0.1, end - time.monotonic()), ended=ended)

    def abandon(self, timeout_seconds: float) -> bool:
        """Leave without finishing, because the client's books cannot be trusted."""
        return self._closed or self._leave(timeout_seconds, ended=True)

    def __enter__(self) -> NodeTiers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The connection.

    def _leave(self, timeout_seconds: float, *, ended: bool) -> bool:
        self._closed = True
        stopped = self._copies.close(timeout_seconds)
        has_told = False
        if stopped and ended and self._channel is not None:
            has_told = say_goodbye(self._channel, min(timeout_seconds, _ANSWER_SECONDS))
        self._drop_channel()
        if stopped and ended:
            untold = self._ended_tokens[:-1] if has_told else self._ended_tokens
            keep_for_later(self._path, untold)
        if self._joining is not None:
            self._joining.close()
            self._joining = None
        if stopped:
            for file in (self._place.file, self._place.seals_file, self._wake_file):
                os.close(file)
        return stopped and ended

    def _attach_first(self, channel: Channel) -> Place:
        try:
            self._send_attach(channel)
            place = read_place(channel, wait_for_frame(channel, _START_SECONDS))
            told(self._path, self._told_tokens)
            return place
        except WireError as error:
            channel.close()
            os.close(self._wake_file)
            if isinstance(error, NodeEnded):
                raise
            raise ConfigError(f"the node at {self._path}: {error}") from None

    def _send_attach(self, channel: Channel) -> None:
        self._told_tokens = to_tell(self._path)
        send_attach(
            channel,
            self._spec,
            self._values,
            name=self._name,
            in_one=self._in_one,
            events=True,
            ended=[*self._ended_tokens, *self._told_tokens],
        )

    def _try_again(self) -> None:
        """Attach to a node that is back, once nothing uses the memory of the last one."""
        now = time.monotonic()
        if self._joining is not None:
            self._join(self._joining, now)
            return
        if self._channel is not None or self._closed or now < self._next_try:
            return
        self._next_try = now + _RETRY_SECONDS
        if self._pins or self._ticket_of:
            return
        try:
            self._joining = connect(self._path)
        except OSError:
            return
        send_hello(self._joining)

    def _join(self, channel: Channel, now: float) -> None:
        try:
            channel.flush()
            frames = channel.receive()
            for place, frame in enumerate(frames):
                if frame.kind == "settings":
                    self._compare(read_settings(frame))
                    self._send_attach(channel)
                else:
                    self._replace(read_place(channel, frame))
                    channel.put_back(frames[place + 1 :])
                    self._channel, self._joining = channel, None
                    log.info("attached to the node at %s again", self._path)
                    return
            if channel.is_closed:
                raise WireError("the node has closed the connection")
        except (PenstockError, OSError) as error:
            channel.close()
            self._joining = None
            self._next_try = now + _REFUSED_RETRY_SECONDS
            self._say(f"the node at {self._path} is not used: {error}")

    def _compare(self, settings: NodeSettings) -> None:
        if settings.codecs != self._settings.codecs:
            raise WireError("its codecs have changed; restart this process to use it")
        self._settings = settings

    def _replace(self, place: Place) -> None:
        """Use another node's memory, at the same addresses."""
        assert self.host is not None
        try:
            if place.shape != self._place.shape:
                raise WireError("its DRAM has another size; restart this process to use it")
            self._remap(partial(self._use_memory, place))
        except (PenstockError, OSError):
            if self._place is place:
                self._ended_tokens.append(place.token)
            else:
                os.close(place.file)
                os.close(place.seals_file)
            raise
        self._ended_tokens = []
        told(self._path, self._told_tokens)

    def _use_memory(self, place: Place) -> None:
        assert self.host is not None
        self.host.replace_memory(place.file)
        self._seals_memory = _map_seals(place)
        self._seals.replace_memory(memoryview(self._seals_memory))
        for file in (self._place.file, self._place.seals_file):
            os.close(file)
        self._place = place

    def _lose_node(self, why: str) -> None:
        """The node is gone: everything that it would have ended ends here."""
        self._drop_channel()
        self._say(f"the node at {self._path} is gone ({why}): nothing is loaded until it is back")
        for ticket in list(self._tickets):
            self._end_here(ticket, Verdict.FAILED)

    def _drop_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            self._ended_tokens.append(self._place.token)
        self._lookups.clear()
        self._late_pins.clear()
        self._replies.clear()
        self._in_host.clear()
        self._hangs_since = self._probe = None
        self._reset_state()

    def _reset_state(self) -> None:
        self._rates: dict[Tier, LinkRate] = {}
        self._num_blocks = self._num_retained = 0
        self._is_prefetching = False
        self._is_quarantined = getattr(self, "_is_quarantined", False)

    def _say(self, sentence: str) -> None:
        now = time.monotonic()
        if now - self._last_told >= _TELL_SECONDS:
            self._last_told = now
            log.warning("%s", sentence)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_file, 1)

    def _send(self, kind: str, fields: Mapping[str, Any], *parts: bytes) -> None:
        """Send a request that has no answer. Lost if no node listens."""
        if self._channel is not None and (self._hangs_since is None or kind == "unpin"):
            self._channel.send(kind, fields, *parts)
            self._channel.flush()

    def _call(self, kind: str, fields: Mapping[str, Any], *parts: bytes) -> Frame | None:
        """Ask the node and wait for its answer. None if there is no node, or it hangs."""
        if not self.is_attached or self._channel is None:
            return None
        call = next(self._calls)
        self._send(kind, {**fields, "call": call}, *parts)
        end = time.monotonic() + _ANSWER_SECONDS
        while True:
            self._pump()
            if (reply := self._replies.pop(call, None)) is not None:
                return reply
            if self._channel is None:
                return None
            left = end - time.monotonic()
            if left <= 0:
                break
            self.pause(left)
        if kind == "pin":
            self._late_pins.add(call)
        self._hang(time.monotonic())
        return None

    def _count(
        self, kind: str, fields: Mapping[str, Any], keys: Sequence[BlockKey] | None = None
    ) -> int:
        parts = () if keys is None else (pack_keys(keys),)
        reply = self._call(kind, fields, *parts)
        return 0 if reply is None else int(reply.fields["num"])

    # News.

    def _pump(self) -> None:
        """Take what has arrived, from the node and from copies, without waiting."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_file)
        channel = self._channel
        if channel is not None:
            try:
                channel.flush()
                frames = channel.receive()
                for frame in frames:
                    self._hear(frame)
                if frames:
                    self._hangs_since = self._probe = None
                    self._heard = time.monotonic()
            except (*_WRONG, WireError) as error:
                self._lose_node(f"it sent something wrong: {error}")
            else:
                if channel.is_closed and self._channel is channel:
                    self._lose_node("the connection has ended")
        self._settle_copies()
        if self._channel is not None:
            self._channel.flush()

    def _hear(self, frame: Frame) -> None:
        fields, parts = frame.fields, frame.parts
        match frame.kind:
            case "reply":
                call = int(fields["call"])
                if fields.get("lookup") is not None:  # its end may be the very next frame
                    self._lookups.add(LookupId(int(fields["lookup"])))
                if call in self._late_pins:
                    self._late_pins.discard(call)
                    late = [slot for slot in unpack_slots(parts[0]) if slot is not None]
                    self._send("unpin", {}, pack_slots(late))
                elif "lookup" not in fields or self._hangs_since is None:
                    self._replies[call] = frame
                    if len(self._replies) > 64:  # answers that nobody waits for any more
                        del self._replies[min(self._replies)]
            case "transfer":
                self._copy(fields, parts)
            case "cancel":
                self._copies.cancel(TransferId(int(fields["transfer"])))
            case "done":
                self._node_ended(fields, parts)
            case "looked_up":
                self._lookups.discard(LookupId(int(fields["lookup"])))
            case "state":
                self._num_blocks = int(fields["num_blocks"])
                self._num_retained = int(fields["num_retained"])
                self._is_prefetching = bool(fields["is_prefetching"])
                self._is_quarantined |= bool(fields["is_quarantined"])
                self._rates = {
                    Tier(int(tier)): LinkRate(rate, latency, math.inf if most is None else most)
                    for tier, (rate, latency, most) in fields["rates"].items()
                }
            case "event":
                event = unpack_event(fields, parts[0])
                self._note_host(event)
                self._tell([event])
            case "refused":
                self._lose_node(str(fields.get("why", "")))
            case _:
                raise WireError(f'the node sent "{frame.kind[:40]}", which is not known')

    def _note_host(self, event: Event) -> None:
        if isinstance(event, Stored) and event.tier is Tier.HOST:
            self._in_host.update(event.keys)
        elif isinstance(event, Removed) and event.tier is Tier.HOST:
            self._in_host.difference_update(event.keys)

    def _copy(self, fields: Mapping[str, Any], parts: Sequence[bytes]) -> None:
        """Make a copy that the node asks for, or refuse it."""
        keys = unpack_keys(parts[0])
        load = bool(fields["load"])
        ends = (Tier.HOST, Tier.DEVICE) if load else (Tier.DEVICE, Tier.HOST)
        number = fields["ticket"]
        ticket = None if number is None else self._tickets.get(TicketId(int(number)))
        transfer = Transfer(
            TransferId(int(fields["transfer"])),
            *ends,
            keys,
            unpack_given_slots(parts[1]),
            unpack_given_slots(parts[2]),
            fields["deadline"],
            ticket=None if ticket is None else TicketId(int(number)),
        )
        if not len(keys) == len(transfer.source_slots) == len(transfer.target_slots):
            raise WireError("a copy has not as many slots as blocks")
        if ticket is None or ticket.ends_as is not None or not self._accepts(transfer):
            self._report(Outcome(transfer.id, (Verdict.CANCELLED,) * len(keys)))
            return
        assert transfer.ticket is not None
        self._check_slots(ticket, transfer)
        ticket.is_hit = load and bool(fields.get("hit", False))
        ticket.flying.add(transfer.id)
        self._ticket_of[transfer.id] = (transfer.ticket, transfer)
        if not self._copies.submit(transfer):
            self._ended(Outcome(transfer.id, (Verdict.DROPPED,) * len(keys)))

    def _check_slots(self, ticket: _Open, transfer: Transfer) -> None:
        """A copy to or from a wrong place would be wrong KV. Whoever is at fault, refuse it."""
        loads = transfer.direction is Direction.LOAD
        assert self.host is not None
        on_device = transfer.target_slots if loads else transfer.source_slots
        in_host = transfer.source_slots if loads else transfer.target_slots
        is_right = transfer.direction is ticket.direction
        is_right &= max(in_host, default=0) < self.host.num_slots
        if not is_right or list(map(ticket.slots.get, transfer.keys)) != list(on_device):
            raise WireError("it asks for a copy that belongs to no load or save of this process")

    def _accepts(self, transfer: Transfer) -> bool:
        """Whether a copy for a ticket that is open may still be made."""
        return True

    def _settle_copies(self) -> None:
        for outcome in self._copies.poll():
            self._ended(outcome)

    def _ended(self, outcome: Outcome) -> None:
        number, transfer = self._ticket_of.pop(outcome.transfer_id)
        self._tell(_events_of(transfer, outcome, self.host_block_bytes))
        self._report(outcome)
        ticket = self._tickets.get(number)
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

    def _report(self, outcome: Outcome) -> None:
        if self._channel is not None:
            self._channel.send(
                "report",
                {
                    "transfer": outcome.transfer_id,
                    "seconds": outcome.seconds,
                    "error": outcome.error[:1000],
                    "ended": outcome.ended,
                },
                pack_verdicts(outcome.verdicts),
            )

    def _node_ended(self, fields: Mapping[str, Any], parts: Sequence[bytes]) -> None:
        number = TicketId(int(fields["ticket"]))
        pins = tuple(unpack_slots(parts[2]))
        ticket = self._tickets.get(number)
        if ticket is None or ticket.ends_as is not None:
            # It ended here before: nobody knows of its pins.
            if late := [slot for slot in pins if slot is not None]:
                self._send("unpin", {}, pack_slots(late))
            return
        verdicts = unpack_verdicts(parts[0])
        if len(verdicts) != len(ticket.keys):
            raise WireError("a ticket ended with another number of blocks")
        if pins:
            found = self._verified_pins(ticket.keys, pins)
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
            unpack_tiers(parts[1]),
            float(fields["seconds"]),
            pins,
        )
        self._end_if_over(number, ticket)

    def _verified_pins(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot | None]
    ) -> list[Slot | None]:
        """Enter pins, except for blocks that cannot be read here: these are given back."""
        if len(slots) != len(keys):
            raise WireError("the node pinned another number of blocks")
        assert self.host is not None
        reach = self.host.num_for_device
        taken = [slot for slot in slots if slot is not None]
        here = [(key, slot) for key, slot in zip(keys, slots, strict=True) if slot is not None]
        verdicts = self._seals.verdicts([key for key, _ in here], taken)
        bad = {
            slot
            for slot, verdict in zip(taken, verdicts, strict=True)
            if verdict is not Verdict.OK or slot >= reach
        }
        if bad:
            self._send("unpin", {}, pack_slots([slot for slot in taken if slot in bad]))
        found = [None if slot in bad else slot for slot in slots]
        self._pins.update(slot for slot in found if slot is not None)
        return found

    # Tickets.

    def _open_ticket(
        self,
        direction: Direction,
        keys: Sequence[BlockKey],
        slots: Sequence[Slot | None],
        seconds: float | None,
    ) -> TicketId:
        if len(keys) != len(slots):
            raise BookError(f"got {len(keys)} blocks but {len(slots)} device slots")
        by_key = dict(zip(keys, slots, strict=True))
        if len(by_key) != len(keys):
            raise BookError(f"a {direction.value} names a block twice")
        number = TicketId(next(self._ticket_ids))
        now = time.monotonic()
        deadline = None if seconds is None else now + seconds + _LATE_SECONDS
        self._tickets[number] = _Open(direction, tuple(keys), by_key, now, deadline)
        return number

    def _end_here(self, number: TicketId, verdict: Verdict) -> None:
        """End a ticket without the node, once no copy touches its slots."""
        ticket = self._tickets[number]
        ticket.ends_as = ticket.ends_as or verdict
        for transfer_id in ticket.flying:
            self._copies.cancel(transfer_id)
        self._end_if_over(number, ticket)

    def _end_if_over(self, number: TicketId, ticket: _Open) -> None:
        if ticket.flying or (ticket.done is None and ticket.ends_as is None):
            return
        del self._tickets[number]
        if ticket.done is None:
            verdicts = (ticket.ends_as or Verdict.FAILED,) * len(ticket.keys)
            seconds = time.monotonic() - ticket.started
            nowhere: tuple[Tier | None, ...] = (None,) * len(ticket.keys)
            direction = ticket.direction
            ticket.done = Done(number, direction, ticket.keys, verdicts, nowhere, seconds)
        self._dones.append(ticket.done)

    def _check_node(self, now: float) -> None:
        """Notice that a node hangs while something is under way, even if nothing is asked."""
        is_waiting = bool(self._tickets or self._lookups)
        if not is_waiting or self._channel is None or self._hangs_since is not None:
            return
        if self._probe is not None:
            if now - self._probe > _ANSWER_SECONDS:
                self._hang(now)
        elif now - self._heard > _ANSWER_SECONDS:
            self._probe = now
            self._send("is_moving", {"call": next(self._calls)})

    def _hang(self, now: float) -> None:
        self._hangs_since = now
        self._say(f"the node at {self._path} hangs: nothing is loaded until it answers")

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        self._check_node(now)
        if self._hangs_since is not None and now - self._hangs_since > _ANSWER_SECONDS:
            # Saves have no deadline, but their blocks are needed.
            for number in list(self._tickets):
                self._end_here(number, Verdict.EXPIRED)
            self._lookups.clear()
        for number, ticket in list(self._tickets.items()):
            if ticket.deadline is not None and now >= ticket.deadline and ticket.ends_as is None:
                self._send("cancel", {"ticket": number})
                self._end_here(number, Verdict.EXPIRED)

    def _require_open(self) -> None:
        if self._closed:
            raise PenstockError("the connection to the node is closed; open a new one")

    def _tell(self, events: Iterable[Event]) -> None:
        tell(self._observers, events)


def open_node(path: Path, wait_seconds: float = _START_SECONDS) -> tuple[Channel, NodeSettings]:
    """Connect and ask for the settings, on which codecs and keys depend. Raises ConfigError.

    If a node ends before it has answered, wait for the next one, as for one that is not there yet.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        channel = find_node(path, max(0.0, deadline - time.monotonic()))
        try:
            send_hello(channel)
            return channel, read_settings(wait_for_frame(channel, _START_SECONDS))
        except WireError as error:
            channel.close()
            if not isinstance(error, NodeEnded) or time.monotonic() >= deadline:
                raise ConfigError(f"the node at {path}: {error}") from None
        time.sleep(0.1)


def _map_seals(place: Place) -> mmap.mmap:
    num_bytes = place.num_slots * KEY_BYTES
    return mmap.mmap(place.seals_file, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


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
