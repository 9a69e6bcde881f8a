"""Guests: the connections of a node, and the processes behind them.

A client that dies, or sends nonsense, loses its connection; nobody else notices. What it had is
given back once none of its processes can touch DRAM any more.

A fault of the node itself that has to do with one guest costs that guest only: it is logged, and
counted for tests.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.events import ClientLeft, ClientRefused, NodeEvent
from penstock.node.room import NodeRoom
from penstock.node.session import Session
from penstock.node.wire import Channel, Frame, WireError

log = logging.getLogger(__name__)

_MAX_CLIENTS = 512
_MAX_UNSENT_BYTES = 64 << 20  # a client that does not read its answers is not served
_MAX_SENTENCE = 1000  # characters
_ACCEPT_AGAIN_SECONDS = 0.5  # after a connection could not be accepted
_UNWATCHED_SECONDS = 30.0  # how long a process that cannot be watched may go on copying


@dataclass(slots=True, eq=False)
class Guest:
    """A connection: first unknown, then a client or one of a client's further processes."""

    number: int  # of its socket, also once that is closed
    channel: Channel
    pid_file: int | None
    session: Session | None = None
    is_client: bool = False  # and not a further process of one
    has_left: bool = False
    is_blocked: bool = False  # its socket takes no more: wait until it does


@dataclass(slots=True, eq=False)
class Life:
    """The processes of a session that may still copy."""

    session: Session
    pid_files: set[int] = field(default_factory=set)
    is_unwatched: bool = False  # a process of it cannot be watched
    closed: float | None = None  # since when its connection is


class Guests:
    """`greet` answers a guest without a session, `handle` the request of a client.

    `set_aside` is called with a room whose books turn out to be broken.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        *,
        greet: Callable[[Guest, Frame, float], None],
        handle: Callable[[Session, Frame, float], None],
        set_aside: Callable[[NodeRoom], None],
        tell: Callable[[NodeEvent], None],
    ) -> None:
        self._selector = selector
        self._listener = listener
        self._greet = greet
        self._handle = handle
        self._set_aside = set_aside
        self._tell = tell
        self._guests: dict[int, Guest] = {}  # by their sockets' numbers
        self._lives: list[Life] = []
        self.num_faults = 0  # of the node, that cost a guest its connection
        self._accepts_again: float | None = None  # when: it does not accept now
        self._has_warned = False
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def num_clients(self) -> int:
        return len(self._lives)

    def sessions_of(self, room: NodeRoom) -> list[Session]:
        """Also of clients whose connections have ended, but that may still copy."""
        return [life.session for life in self._lives if life.session.room is room]

    def life_of(self, token: str) -> Life | None:
        """The client that has this token."""
        return next((life for life in self._lives if life.session.token == token), None)

    def watch(self, life: Life, guest: Guest) -> None:
        """A guest's process may copy for a client, until it has ended."""
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

    def send(self) -> None:
        """Send what is queued for everybody."""
        for guest in list(self._guests.values()):
            try:
                self._send(guest)
            except Exception:
                self._drop(guest)

    def drop(self, session: Session) -> None:
        """The node has failed to serve a client (inside an `except`): it goes on without it."""
        for guest in list(self._guests.values()):
            if guest.session is session:
                self._drop(guest)

    def accept_again(self, now: float) -> None:
        """If none could be accepted for a while."""
        if self._accepts_again is not None and now >= self._accepts_again:
            self._accepts_again = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def bury(self, now: float) -> None:
        """Give back what clients had that are gone."""
        for life in list(self._lives):
            session = life.session
            if session.channel.is_closed and life.closed is None:
                life.closed = now
            patience = _UNWATCHED_SECONDS if life.is_unwatched else 0.0
            is_dead = not life.pid_files and life.closed is not None
            # Nobody can ask it for copies any more, so its processes need not be waited for.
            is_idle = life.closed is not None and not session.may_touch_dram
            is_over = is_idle or (is_dead and now >= (life.closed or now) + patience)
            if session.has_left or is_over:
                self._lives.remove(life)
                self._leave_all_of(session)
                self._end(session, session.give_back)
                for file in list(life.pid_files):
                    self._died(life, file)
                self._tell(ClientLeft(session.room.id, is_lost=not session.has_left))
                log.info("%s has left %s", session.name or "a client", session.room.model)

    def expel(self, session: Session, why: str, reason: str) -> None:
        """End the connection of a client."""
        for guest in list(self._guests.values()):
            if guest.session is session and guest.is_client:
                self._refuse(guest, why, reason)

    def end_sessions(self, tokens: set[str]) -> None:
        """A client says that nothing of its earlier sessions is running."""
        for life in self._lives:
            if life.session.token in tokens:
                life.session.has_left = True
                self._leave_all_of(life.session)

    def close(self) -> None:
        """End all connections. Clients go on without the node."""
        self._listener.close()
        for guest in list(self._guests.values()):
            self._leave(guest)
        for life in self._lives:
            self._end(life.session, life.session.give_back)
            for file in life.pid_files:
                os.close(file)
        self._lives = []

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # It stays in the queue, and the listener stays readable.
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._pause_accepting(error)
            return
        self._has_warned = False
        channel = Channel(connection)
        if len(self._guests) >= _MAX_CLIENTS:
            sentence = f"the node has {_MAX_CLIENTS} clients already: expected fewer; stop some"
            channel.send("refused", {"why": sentence})
            channel.flush()
            channel.close()
            self._tell(ClientRefused("full", sentence))
            return
        guest = Guest(connection.fileno(), channel, pid_file_of(connection))
        try:
            self._selector.register(guest.number, selectors.EVENT_READ, lambda: self._attend(guest))
        except OSError as error:
            log.warning("a client is not accepted: %s", error.strerror)
            channel.close()
            if guest.pid_file is not None:
                os.close(guest.pid_file)
            return
        self._guests[guest.number] = guest

    def _pause_accepting(self, error: OSError) -> None:
        self._selector.unregister(self._listener)
        self._accepts_again = time.monotonic() + _ACCEPT_AGAIN_SECONDS
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the node cannot accept more clients (%s): expected fewer than %d connections and "
                "files; stop some, or raise the limit of open files (ulimit -n)",
                error.strerror,
                len(self._guests),
            )

    def _attend(self, guest: Guest) -> None:
        try:
            self._hear(guest)
        except Exception:
            self._drop(guest)

    def _hear(self, guest: Guest) -> None:
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
            self.num_faults += 1
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

    def _send(self, guest: Guest) -> None:
        if not guest.is_blocked:  # else `_hear` does it, once the socket takes more
            guest.channel.flush()
        if guest.channel.is_deaf:
            self._hear(guest)  # its last words: a goodbye, perhaps behind much else
        is_silent = guest.channel.is_deaf and not guest.channel.has_more
        if guest.channel.is_closed or is_silent:
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

    def _refuse(self, guest: Guest, sentence: str, reason: str) -> None:
        if guest.channel.is_closed:
            return
        sentence = sentence[:_MAX_SENTENCE]  # it may quote what the client has sent
        log.warning("a client is refused: %s", sentence)
        guest.channel.send("refused", {"why": sentence})
        guest.channel.flush()
        self._leave(guest)
        self._tell(ClientRefused(reason, sentence))

    def _leave(self, guest: Guest) -> None:
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
            self._end(guest.session, guest.session.hang_up)

    def _end(self, session: Session, end: Callable[[], None]) -> None:
        """End something of a session. If that fails, the books of its room are broken."""
        try:
            end()
        except Exception:
            self.num_faults += 1
            log.exception("the end of a client has broken the books of %s", session.room.model)
            self._set_aside(session.room)

    def _drop(self, guest: Guest) -> None:
        """The node has failed (inside an `except`)."""
        self.num_faults += 1
        log.exception("the node failed to serve a client, and drops it")
        self._leave(guest)

    def _leave_all_of(self, session: Session) -> None:
        for guest in list(self._guests.values()):
            if guest.session is session:
                self._leave(guest)

    def _died(self, life: Life, file: int) -> None:
        self._selector.unregister(file)
        os.close(file)
        life.pid_files.discard(file)


def pid_file_of(connection: socket.socket) -> int | None:
    """A file that becomes readable when the process at the other end has ended."""
    with suppress(OSError, struct.error):
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, _, _ = struct.unpack("3i", peer)
        if pid > 0:
            return os.pidfd_open(pid)
    return None


def take_pid_file(guest: Guest) -> None:
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
