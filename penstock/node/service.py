"""NodeService: the loop of a node. One thread serves all clients; others move blocks below DRAM.

If the books of a room are broken (a bug), its clients are told to go on without it, and the room is
made anew.
"""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.events import (
    ModelRemoved,
    ModelUsage,
    NodeEvent,
    NodeObserver,
    NodeUsage,
    OfModel,
    tell,
)
from penstock.install import VERSION
from penstock.node.guests import Guests
from penstock.node.preparing import Preparation
from penstock.node.reception import Reception
from penstock.node.room import Dram, NodeRoom
from penstock.node.rooms import Rooms
from penstock.node.session import Session, encode_events, encode_state
from penstock.node.shares import extent_size
from penstock.node.socket_file import listen
from penstock.node.wire import VERSION as PROTOCOL
from penstock.node.wire import Frame, WireError
from penstock.stores.host import HostMemory
from penstock.units import format_bytes

log = logging.getLogger(__name__)

_BUSY_SECONDS = 0.002  # how often rooms are stepped while something is under way
_IDLE_SECONDS = 0.2
_USAGE_SECONDS = 1.0  # how often observers are told
_STUCK_SECONDS = 30.0  # a loop that takes longer is not healthy


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
        self._rooms = Rooms(config, self._dram, notify=self.wake, tell=self._tell)
        self._selector = selectors.DefaultSelector()
        self._wake_file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_stopping = self._is_closed = False
        self._num_faults = 0
        try:
            listener = listen(path, group)
        except BaseException:
            self._selector.close()
            os.close(self._wake_file)
            self._rooms.close(0.0)
            self._memory.close()
            raise
        self._socket_id = _id_of(path)
        reception = Reception(config, self._dram, self._rooms, self.describe)
        self._guests = Guests(
            self._selector,
            listener,
            greet=lambda *asked: reception.greet(self._guests, *asked),
            handle=self._handle,
            set_aside=self._break,
            tell=self._tell,
        )
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
            self.step(_BUSY_SECONDS if self._rooms.is_moving else _IDLE_SECONDS)

    def step(self, timeout_seconds: float) -> None:
        """Wait for something to do, and do it."""
        for key, _ in self._selector.select(timeout_seconds):
            # Unless what another client sent has ended it.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = time.monotonic()
        for room in self._rooms:
            self._step_room(room, now)
        self._guests.accept_again(now)
        self._guests.send()
        self._guests.bury(now)
        self._rooms.remove_unused(now)
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

    @property
    def num_faults(self) -> int:
        """Faults of the node that cost one client or model. Each is in the log."""
        return self._guests.num_faults + self._num_faults

    def check(self) -> None:
        """Raise BookError if the books of a room do not add up."""
        self._rooms.check()

    def describe(self) -> dict[str, Any]:
        """What the node holds, for people and programs."""
        return {
            "version": VERSION,
            "protocol": PROTOCOL,
            "pid": os.getpid(),
            "seconds": time.monotonic() - self._started,
            "num_clients": self._guests.num_clients,
            "prepared_bytes": self._prepared_bytes,
            "dram_bytes": self._dram.num_bytes,
            "free_bytes": self._rooms.free_bytes,
            "models": [
                {
                    "model": room.model,
                    "namespace": room.spec.namespace.hex(),
                    "dram_bytes": room.num_bytes,
                    "blocks": room.offloader.num_host_blocks,
                    "free_blocks": room.offloader.num_free_host_blocks,
                    "pinned": room.offloader.num_pinned,
                    "clients": [session.name for session in self._guests.sessions_of(room)],
                }
                for room in self._rooms
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
        self._guests.close()
        closed = self._rooms.close(timeout_seconds)
        self._selector.close()
        os.close(self._wake_file)
        self._memory.close()
        return closed

    # The loop.

    def _woken(self) -> None:
        with suppress(OSError):
            os.eventfd_read(self._wake_file)

    def _step_room(self, room: NodeRoom, now: float) -> None:
        try:
            for extent, number in room.advance_going():
                heir = self._rooms.numbered(number)
                if not heir.is_broken:  # else the extent is free once that room is gone
                    heir.open([extent])
            sessions = self._guests.sessions_of(room)
            for done in room.offloader.step():
                if not any(session.send_done(done) for session in sessions):
                    # Its client is gone, and so is everybody who would unpin these.
                    room.switchboard.ticket_ended(done.ticket)
                    room.offloader.unpin([slot for slot in done.pins if slot is not None])
            self._rooms.share_dram(room, now)
            events, room.events[:] = list(room.events), []
            if sessions:
                packed, state = encode_events(events), encode_state(room.offloader)
        except Exception:
            self._num_faults += 1
            log.exception("the books of %s are broken: its clients go on without it", room.model)
            self._break(room)
            return
        for session in sessions:
            try:
                session.send_news(packed, state)
            except Exception:
                self._guests.drop(session)
        self._tell(*(OfModel(room.id, event) for event in events))

    def _handle(self, session: Session, frame: Frame, now: float) -> None:
        try:
            session.handle(frame, now)
        except WireError:
            try:
                session.room.check()
            except Exception:
                self._num_faults += 1
                log.exception("a wrong request has broken the books of %s", session.room.model)
                self._break(session.room)
            raise
        except Exception:
            self._num_faults += 1
            log.exception("the books of %s are broken: its clients go on", session.room.model)
            self._break(session.room)

    def _break(self, room: NodeRoom) -> None:
        if room.is_broken:
            return
        self._rooms.set_aside(room)
        for session in self._guests.sessions_of(room):
            self._guests.expel(
                session, "the node has lost its books of this model; attach again", "broken"
            )
        self._tell(ModelRemoved(room.id, is_broken=True))

    # What observers are told.

    def _tell(self, *events: NodeEvent) -> None:
        tell(self._observers, events)

    def _tell_usage(self) -> None:
        if not self._observers:
            return
        usage = NodeUsage(
            self._dram.num_bytes,
            self._rooms.free_bytes,
            self._prepared_bytes,
            tuple(
                ModelUsage(
                    room.id,
                    room.num_bytes,
                    len(self._guests.sessions_of(room)),
                    room.offloader.num_pinned,
                )
                for room in self._rooms
            ),
        )
        if usage != self._last_usage:
            self._last_usage = usage
            self._tell(usage)

    @property
    def _prepared_bytes(self) -> int:
        return 0 if self._preparation is None else self._preparation.num_bytes


def _id_of(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
