"""NodeService: the loop of a node. One thread serves all clients; others move blocks below DRAM.

A client that dies, or sends nonsense, loses its session; nobody else notices. If the books of a
room are broken (a bug), its clients are told to go on without it, and the room is made anew.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.build import codec_settings, tier_codecs
from penstock.config import Config, as_typed
from penstock.errors import ConfigError, PenstockError
from penstock.events import (
    ClientLeft,
    ClientRefused,
    ModelRemoved,
    ModelUsage,
    NodeEvent,
    NodeObserver,
    NodeUsage,
    OfModel,
    tell,
)
from penstock.install import VERSION
from penstock.node.preparing import Preparation
from penstock.node.room import Dram, NodeRoom
from penstock.node.session import Session, encode_events, encode_state
from penstock.node.shares import Shares, extent_size
from penstock.node.socket_file import listen
from penstock.node.values_wire import unpack_values
from penstock.node.wire import VERSION as PROTOCOL
from penstock.node.wire import Channel, Frame, WireError
from penstock.stores.host import HostMemory
from penstock.stores.shared_cap import DividedFolder
from penstock.types import BlockSpec
from penstock.units import format_bytes

log = logging.getLogger(__name__)

_BUSY_SECONDS = 0.002  # how often rooms are stepped while something is under way
_IDLE_SECONDS = 0.2
_MAX_CLIENTS = 512
_MAX_UNSENT_BYTES = 64 << 20  # a client that does not read its answers is not served
_UNWATCHED_SECONDS = 30.0  # how long a process that cannot be watched may go on copying
_USAGE_SECONDS = 1.0  # how often observers are told
_STUCK_SECONDS = 30.0  # a loop that takes longer is not healthy
_EMPTY_ROOM_SECONDS = 3600.0  # a room without clients keeps its DRAM at least this long


@dataclass(slots=True, eq=False)
class _Guest:
    """A connection: first unknown, then a client or one of a client's further processes."""

    number: int  # of its socket, also once that is closed
    channel: Channel
    pid_file: int | None
    session: Session | None = None
    is_client: bool = False  # and not a further process of one
    has_left: bool = False
    is_blocked: bool = False  # its socket takes no more: wait until it does


@dataclass(slots=True, eq=False)
class _Life:
    """The processes of a session that may still copy."""

    session: Session
    pid_files: set[int] = field(default_factory=set)
    is_unwatched: bool = False  # a process of it cannot be watched
    closed: float | None = None  # since when its connection is


class NodeService:
    """Owns the DRAM, the rooms and the socket. `serve` runs until `stop`."""

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        group: int | None = None,
        observers: Sequence[NodeObserver] = (),
        prepare: bool = False,
    ) -> None:
        """Listen at `path`, for this user, and for `group` if given. Raises ConfigError.

        If `prepare`, the kernel allocates the DRAM in the background; otherwise, when it is used.
        """
        self._config = config
        self._observers = observers
        self.path = path
        size = extent_size(config.host.size_bytes)
        num_extents = config.host.size_bytes // size
        if num_extents < 1:
            raise ConfigError(
                f"host.size is {format_bytes(config.host.size_bytes)}: a node needs at least "
                f"{format_bytes(size)}; enlarge it."
            )
        self._memory = HostMemory(
            num_extents * size,
            huge_pages=config.host.huge_pages,
            numa_node=config.host.numa_node,
        )
        self._dram = Dram(self._memory.file, num_extents * size, size)
        cap = max(1, int(num_extents * config.node.model_cap))
        floor = min(cap, int(num_extents * config.node.model_floor))
        self._shares = Shares(num_extents, floor=floor, cap=cap)
        self._disk: DividedFolder | None = None
        if config.disk.path is not None:
            num_models = 1 << 30 if config.disk.read_only else config.node.disk_models
            self._disk = DividedFolder(Path(config.disk.path), config.disk.size_bytes, num_models)
        self._rooms: dict[bytes, NodeRoom] = {}  # by namespace
        self._leaving: list[NodeRoom] = []  # broken rooms that clients may still touch
        self._empty_since: dict[int, float] = {}
        self._next_number = 0
        self._guests: dict[int, _Guest] = {}
        self._lives: list[_Life] = []
        self._selector = selectors.DefaultSelector()
        self._wake_file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_stopping = self._is_closed = False
        try:
            self._listener = listen(path, group)
        except BaseException:
            self._selector.close()
            os.close(self._wake_file)
            self._memory.close()
            raise
        self._socket_id = _id_of(path)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_file, selectors.EVENT_READ, self._woken)
        self._preparation = Preparation(self._memory) if prepare else None
        self._started = self._last_step = time.monotonic()
        self._last_usage: NodeUsage | None = None
        self._next_usage = 0.0

    def wake(self) -> None:
        """Let `serve` look at once. Safe on any thread, and in a signal handler."""
        with suppress(OSError):
            os.eventfd_write(self._wake_file, 1)

    def stop(self) -> None:
        """End `serve` soon. Safe on any thread, and in a signal handler."""
        self._is_stopping = True
        self.wake()

    def serve(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """Until `stop`, or until `is_done`, which is asked several times a second."""
        while not self._is_stopping and not is_done():
            self.step(_BUSY_SECONDS if self._is_busy else _IDLE_SECONDS)

    def step(self, timeout_seconds: float) -> None:
        """Wait for something to do, and do it."""
        for key, _ in self._selector.select(timeout_seconds):
            # Unless what another client sent has ended it.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = time.monotonic()
        for room in self._all_rooms():
            self._step_room(room, now)
        self._share_dram(now)
        for guest in list(self._guests.values()):
            self._send(guest)
        self._bury(now)
        self._remove_rooms(now)
        if now >= self._next_usage:
            self._next_usage = now + _USAGE_SECONDS
            self._tell_usage()
        self._last_step = time.monotonic()

    @property
    def is_preparing(self) -> bool:
        """Whether DRAM is still being allocated in the background."""
        return self._preparation is not None and self._preparation.is_running

    @property
    def prepared_share(self) -> float:
        return self._prepared_bytes / self._dram.num_bytes

    def problem(self) -> str | None:
        """Why the node does not work at the moment; None if it does. Safe on any thread."""
        seconds = time.monotonic() - self._last_step
        if seconds < _STUCK_SECONDS:
            return None
        return f"the node has not answered its clients for {seconds:.0f} s"

    def check(self) -> None:
        """Raise BookError if the books of a room do not add up."""
        for room in self._rooms.values():
            room.check()
        self._shares.check()

    def describe(self) -> dict[str, Any]:
        """What the node holds, for people and programs."""
        return {
            "version": VERSION,
            "protocol": PROTOCOL,
            "pid": os.getpid(),
            "seconds": time.monotonic() - self._started,
            "num_clients": len(self._lives),
            "prepared_bytes": self._prepared_bytes,
            "dram_bytes": self._dram.num_bytes,
            "free_bytes": self._shares.num_free * self._dram.extent_bytes,
            "models": [
                {
                    "model": room.model,
                    "namespace": room.spec.namespace.hex(),
                    "dram_bytes": room.num_bytes,
                    "blocks": room.offloader.num_host_blocks,
                    "free_blocks": room.offloader.num_free_host_blocks,
                    "pinned": room.offloader.num_pinned,
                    "clients": [life.session.name for life in self._lives_of(room)],
                }
                for room in self._rooms.values()
            ],
        }

    def close(self, timeout_seconds: float = 30.0) -> bool:
        """Finish writes to lower tiers and stop. Clients go on without the node."""
        if self._is_closed:
            return True
        self._is_stopping = self._is_closed = True
        if self._preparation is not None:
            self._preparation.stop()
        with suppress(OSError):
            if _id_of(self.path) == self._socket_id:  # and not the socket of a newer node
                os.unlink(self.path)
        self._listener.close()
        for guest in list(self._guests.values()):
            self._leave(guest)
        for life in self._lives:
            life.session.give_back()
        deadline = time.monotonic() + timeout_seconds
        closed = True
        for room in self._rooms.values():
            closed &= room.close(max(0.1, deadline - time.monotonic()))
        for room in self._leaving:
            closed &= room.abandon(max(0.1, deadline - time.monotonic()))
        for life in self._lives:
            for file in life.pid_files:
                os.close(file)
        self._lives, self._rooms = [], {}
        if self._disk is not None:
            self._disk.close()
        self._selector.close()
        os.close(self._wake_file)
        self._memory.close()
        return closed

    # The loop.

    @property
    def _is_busy(self) -> bool:
        return any(room.offloader.is_moving for room in self._rooms.values())

    def _all_rooms(self) -> list[NodeRoom]:
        return list(self._rooms.values())

    def _woken(self) -> None:
        with suppress(OSError):
            os.eventfd_read(self._wake_file)

    def _step_room(self, room: NodeRoom, now: float) -> None:
        try:
            for extent, heir in room.advance_going():
                self._numbered(heir).open([extent])
            for done in room.offloader.step():
                if not any(life.session.send_done(done) for life in self._lives_of(room)):
                    # Its client is gone, and so is everybody who would unpin these.
                    room.switchboard.ticket_ended(done.ticket)
                    room.offloader.unpin([slot for slot in done.pins if slot is not None])
            events, room.events[:] = list(room.events), []
        except Exception:
            log.exception("the books of %s are broken: its clients go on without it", room.model)
            self._break(room)
            return
        if lives := self._lives_of(room):
            packed, state = encode_events(events), encode_state(room.offloader)
            for life in lives:
                life.session.send_news(packed, state)
        self._tell(*(OfModel(room.id, event) for event in events))

    def _share_dram(self, now: float) -> None:
        for room in self._all_rooms():
            donor = room.wants_more(now)
            if donor is not None:
                self._numbered(donor).give_up_one(room.number)

    def _numbered(self, number: int) -> NodeRoom:
        rooms = (*self._rooms.values(), *self._leaving)
        return next(room for room in rooms if room.number == number)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        channel = Channel(connection)
        if len(self._guests) >= _MAX_CLIENTS:
            sentence = f"the node has {_MAX_CLIENTS} clients already: expected fewer; stop some"
            channel.send("refused", {"why": sentence})
            channel.flush()
            channel.close()
            self._tell(ClientRefused("full", sentence))
            return
        guest = _Guest(connection.fileno(), channel, _pid_file_of(connection))
        self._guests[guest.number] = guest
        self._selector.register(guest.number, selectors.EVENT_READ, lambda: self._hear(guest))

    def _hear(self, guest: _Guest) -> None:
        now = time.monotonic()
        try:
            for frame in guest.channel.receive():
                if guest.session is not None and guest.is_client:
                    self._handle(guest.session, frame, now)
                else:
                    self._greet(guest, frame, now)
                if guest.has_left or (guest.session is not None and guest.session.has_left):
                    break
                if guest.channel.num_unsent_bytes > _MAX_UNSENT_BYTES:
                    raise WireError("it does not read what the node sends")
        except WireError as error:
            self._refuse(guest, str(error), "attach" if guest.session is None else "request")
        except Exception:
            log.exception("a request of a client failed")
            self._refuse(guest, "the node could not carry out a request; see its log", "request")
        if guest.channel.is_closed or (guest.session is not None and guest.session.has_left):
            self._leave(guest)
            return
        if guest.session is not None and guest.is_client:
            guest.session.send_copies()
        guest.channel.flush()  # it waits for the answer: do not let it wait for the other rooms
        if guest.channel.is_closed:
            self._leave(guest)

    def _handle(self, session: Session, frame: Frame, now: float) -> None:
        try:
            session.handle(frame, now)
        except WireError:
            try:
                session.room.check()
            except Exception:
                log.exception("a wrong request has broken the books of %s", session.room.model)
                self._break(session.room)
            raise
        except Exception:
            log.exception("the books of %s are broken: its clients go on", session.room.model)
            self._break(session.room)

    def _greet(self, guest: _Guest, frame: Frame, now: float) -> None:
        """Answer somebody who has no session yet."""
        version = frame.fields.get("protocol")
        if version != PROTOCOL:
            raise WireError(
                f"the node speaks version {PROTOCOL} of the protocol (Penstock {VERSION}), the "
                f"client version {str(version)[:20]}: expected the same; upgrade the older one"
            )
        if guest.session is not None and frame.kind in ("attach", "join"):
            raise WireError("this connection has a session already")
        try:
            if frame.kind == "hello":
                guest.channel.send("settings", self._settings())
            elif frame.kind == "describe":
                guest.channel.send("description", self.describe())
            elif frame.kind == "attach":
                self._attach(guest, frame, now)
            elif frame.kind == "join":
                self._join(guest, frame)
            else:
                raise WireError(f'attach first: "{frame.kind[:40]}" needs a session')
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise WireError(f'the request "{frame.kind}" is incomplete: {error!r}') from None

    def _settings(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "protocol": PROTOCOL,
            "codecs": {int(tier): name for tier, name in codec_settings(self._config).items()},
            "load_deadline_seconds": self._config.transfer.load_deadline_seconds,
            "has_remote": self._config.remote.url is not None,
            "has_disk": self._config.disk.path is not None,
        }

    def _attach(self, guest: _Guest, frame: Frame, now: float) -> None:
        fields = frame.fields
        if ended := {str(token) for token in fields.get("ended", [])}:
            self._end_sessions(ended)
            self._bury(now)
            self._remove_rooms(now)
        try:
            room = self._room(frame, now)
        except (PenstockError, OSError) as error:
            raise WireError(str(error)) from None
        _take_pid_file(guest)
        self._next_number += 1
        max_blocks = self._shares.cap * self._dram.extent_bytes // room.arena.stride_bytes
        max_pins = int(max_blocks * self._config.node.pin_share)
        session = Session(
            self._next_number,
            secrets.token_hex(16),
            str(fields.get("name", ""))[:80],
            guest.channel,
            room,
            max_pins=max_pins,
            wants_events=bool(fields.get("events", False)),
        )
        guest.session, guest.is_client = session, True
        self._watch(_Life(session), guest)
        arena = room.arena
        self._send_memory(
            guest,
            "attached",
            {
                "token": session.token,
                "dram_bytes": self._dram.num_bytes,
                "num_slots": arena.num_slots,
                "block_bytes": arena.block_bytes,
                "stride_bytes": arena.stride_bytes,
                "max_blocks": max_blocks,
                "max_pins": max_pins,
            },
        )
        log.info("%s uses %s", session.name or "a client", room.model)

    def _join(self, guest: _Guest, frame: Frame) -> None:
        """A further process of a client: it gets the memory, and its copies count until it ends."""
        token = str(frame.fields["token"])
        life = next((life for life in self._lives if life.session.token == token), None)
        if life is None:
            raise WireError("no client has this token: attach first")
        guest.session = life.session
        _take_pid_file(guest)
        self._watch(life, guest)
        self._send_memory(guest, "joined", {})

    def _send_memory(self, guest: _Guest, kind: str, fields: dict[str, Any]) -> None:
        """Hand over the DRAM, and the seals of the client's model to read."""
        assert guest.session is not None
        seals_file = guest.session.room.seals_file
        reading = os.open(f"/proc/self/fd/{seals_file}", os.O_RDONLY | os.O_CLOEXEC)
        guest.channel.send(kind, fields, files=[self._dram.file, reading])
        guest.channel.flush()
        os.close(reading)

    def _watch(self, life: _Life, guest: _Guest) -> None:
        if life not in self._lives:
            self._lives.append(life)
        file = guest.pid_file
        if file is None:
            life.is_unwatched = True
            return
        try:
            self._selector.register(file, selectors.EVENT_READ, lambda: self._died(life, file))
        except (OSError, ValueError):
            os.close(file)
            life.is_unwatched = True
        else:
            life.pid_files.add(file)

    def _died(self, life: _Life, file: int) -> None:
        self._selector.unregister(file)
        os.close(file)
        life.pid_files.discard(file)

    def _room(self, frame: Frame, now: float) -> NodeRoom:
        """The room for a client's blocks, made if it is the first. Raises PenstockError."""
        fields = frame.fields
        spec = BlockSpec(
            bytes.fromhex(fields["namespace"]),
            int(fields["block_bytes"]),
            int(fields["block_tokens"]),
            tuple((str(name), str(text)) for name, text in fields.get("description", [])),
        )
        if len(spec.namespace) != 32 or spec.block_bytes < 1 or spec.block_tokens < 1:
            raise WireError("the blocks of this client are not described correctly")
        codecs = tier_codecs(self._config, unpack_values(fields["values"]))
        if codecs.host.raw_bytes != spec.block_bytes:
            raise WireError("the values of a block do not add up to its size")
        found = self._rooms.get(spec.namespace)
        if found is not None:
            if found.codecs.host.packed_bytes != codecs.host.packed_bytes:
                raise WireError(
                    f"{found.model} is in use with blocks of another size: all clients with one "
                    "namespace must have the same layout"
                )
            return found
        if len(self._rooms) >= self._config.node.max_models:
            self._remove_unused_room()
        if len(self._rooms) >= self._config.node.max_models:
            raise WireError(
                f"the node has {len(self._rooms)} models already, as many as it may have: raise "
                "node.max_models, or wait until one is not used any more"
            )
        with as_typed(self._config):
            self._next_number += 1
            room = NodeRoom(
                self._next_number,
                self._config,
                spec,
                codecs,
                self._dram,
                self._shares,
                in_one=bool(fields.get("in_one", False)),
                divided=self._part_of_disk(),
                notify=self.wake,
                now=now,
            )
        self._rooms[spec.namespace] = room
        return room

    def _part_of_disk(self) -> DividedFolder | None:
        """The disk, if it has a part for one more model."""
        if self._disk is None:
            return None
        if not self._disk.has_part:
            self._remove_unused_room(with_disk=True)
        if self._disk.has_part:
            return self._disk
        log.warning(
            "a model has no part of the disk, only DRAM: the disk is used by as many models as "
            "node.disk_models says (%d). Raise it to divide the disk among more models.",
            self._config.node.disk_models,
        )
        return None

    def _send(self, guest: _Guest) -> None:
        if not guest.is_blocked:  # else `_hear` does it, once the socket takes more
            guest.channel.flush()
        if guest.channel.is_closed:
            self._leave(guest)
            return
        if guest.channel.has_unsent != guest.is_blocked:
            guest.is_blocked = guest.channel.has_unsent
            events = selectors.EVENT_READ
            if guest.is_blocked:
                events |= selectors.EVENT_WRITE
            key = self._selector.get_key(guest.number)
            self._selector.modify(guest.number, events, key.data)
        if guest.channel.num_unsent_bytes > _MAX_UNSENT_BYTES:
            self._refuse(guest, "it does not read what the node sends", "request")

    # Ends.

    def _refuse(self, guest: _Guest, sentence: str, reason: str) -> None:
        if guest.channel.is_closed:
            return
        log.warning("a client is refused: %s", sentence)
        guest.channel.send("refused", {"why": sentence})
        guest.channel.flush()
        self._leave(guest)
        self._tell(ClientRefused(reason, sentence))

    def _expel(self, session: Session, why: str, reason: str) -> None:
        for guest in list(self._guests.values()):
            if guest.session is session and guest.is_client:
                self._refuse(guest, why, reason)

    def _leave(self, guest: _Guest) -> None:
        """A connection has ended. Nothing else closes one: its number may be used again at once.

        A channel may say before that it is closed: then its socket is still open.
        """
        if guest.has_left:
            return
        guest.has_left = True
        del self._guests[guest.number]
        self._selector.unregister(guest.number)
        guest.channel.close()
        if guest.session is None:
            if guest.pid_file is not None:
                os.close(guest.pid_file)
        elif guest.is_client:
            guest.session.hang_up()

    def _end_sessions(self, tokens: set[str]) -> None:
        """A client says that nothing of its earlier sessions is running."""
        for life in self._lives:
            if life.session.token in tokens:
                life.session.has_left = True
                self._leave_all_of(life.session)

    def _leave_all_of(self, session: Session) -> None:
        for guest in list(self._guests.values()):
            if guest.session is session:
                self._leave(guest)

    def _bury(self, now: float) -> None:
        """Give back what clients had that are gone."""
        for life in list(self._lives):
            session = life.session
            if session.channel.is_closed and life.closed is None:
                life.closed = now
            patience = _UNWATCHED_SECONDS if life.is_unwatched else 0.0
            is_dead = not life.pid_files and life.closed is not None
            if session.has_left or (is_dead and now >= (life.closed or now) + patience):
                self._lives.remove(life)
                self._leave_all_of(session)
                session.give_back()
                for file in list(life.pid_files):
                    self._died(life, file)
                self._tell(ClientLeft(session.room.id, is_lost=not session.has_left))
                log.info("%s has left %s", session.name or "a client", session.room.model)

    def _break(self, room: NodeRoom) -> None:
        if room.is_broken:
            return
        room.is_broken = True
        self._rooms.pop(room.spec.namespace, None)
        self._leaving.append(room)
        for life in self._lives_of(room):
            self._expel(
                life.session, "the node has lost its books of this model; attach again", "broken"
            )
        self._tell(ModelRemoved(room.id, is_broken=True))

    def _remove_rooms(self, now: float) -> None:
        for room in [room for room in self._leaving if not room.num_sessions]:
            self._leaving.remove(room)
            room.abandon(1.0)
        for namespace, room in list(self._rooms.items()):
            if room.num_sessions:
                self._empty_since.pop(room.number, None)
                continue
            since = self._empty_since.setdefault(room.number, now)
            if now - since > _EMPTY_ROOM_SECONDS and not room.offloader.is_moving:
                self._remove_room(namespace)

    def _remove_unused_room(self, *, with_disk: bool = False) -> None:
        """Remove the room that has had no clients for longest, if there is one."""
        unused = [
            (self._empty_since.get(room.number, math.inf), namespace)
            for namespace, room in self._rooms.items()
            if not room.num_sessions
            and not room.offloader.is_moving
            and (room.has_disk or not with_disk)
        ]
        if unused:
            self._remove_room(min(unused)[1])

    def _remove_room(self, namespace: bytes) -> None:
        room = self._rooms.pop(namespace)
        self._empty_since.pop(room.number, None)
        room.close(1.0)
        self._tell(ModelRemoved(room.id, is_broken=False))

    # What observers are told.

    def _tell(self, *events: NodeEvent) -> None:
        tell(self._observers, events)

    def _tell_usage(self) -> None:
        if not self._observers:
            return
        usage = NodeUsage(
            self._dram.num_bytes,
            self._shares.num_free * self._dram.extent_bytes,
            self._prepared_bytes,
            tuple(
                ModelUsage(
                    room.id, room.num_bytes, len(self._lives_of(room)), room.offloader.num_pinned
                )
                for room in self._rooms.values()
            ),
        )
        if usage != self._last_usage:
            self._last_usage = usage
            self._tell(usage)

    @property
    def _prepared_bytes(self) -> int:
        return 0 if self._preparation is None else self._preparation.num_bytes

    def _lives_of(self, room: NodeRoom) -> list[_Life]:
        return [life for life in self._lives if life.session.room is room]


def _id_of(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _pid_file_of(connection: socket.socket) -> int | None:
    """A file that becomes readable when the process at the other end has ended."""
    with suppress(OSError, struct.error):
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, _, _ = struct.unpack("3i", peer)
        if pid > 0:
            return os.pidfd_open(pid)
    return None


def _take_pid_file(guest: _Guest) -> None:
    """A client in another PID namespace cannot be found by its number: it sends its own file."""
    for file in guest.channel.files:
        if guest.pid_file is None and _is_pid_file(file):
            guest.pid_file = file
        else:
            os.close(file)
    guest.channel.files = []


def _is_pid_file(file: int) -> bool:
    """Other files would become readable too early, or never."""
    try:
        return "\nPid:" in Path(f"/proc/self/fdinfo/{file}").read_text()
    except OSError:
        return False
