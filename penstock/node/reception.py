"""Reception: answers those who have no session at a node yet, and gives them one."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from typing import Any

from penstock.build import codec_settings
from penstock.config import Config
from penstock.errors import PenstockError
from penstock.install import VERSION
from penstock.node.guests import Guest, Guests, Life, take_pid_file
from penstock.node.room import Dram
from penstock.node.rooms import Rooms
from penstock.node.session import Session
from penstock.node.wire import VERSION as PROTOCOL
from penstock.node.wire import Frame, WireError, unpack_text

log = logging.getLogger(__name__)

_WRONG = (LookupError, TypeError, ValueError, AttributeError, OverflowError)


class Reception:
    def __init__(
        self, config: Config, dram: Dram, rooms: Rooms, describe: Callable[[], dict[str, Any]]
    ) -> None:
        self._config = config
        self._dram = dram
        self._rooms = rooms
        self._describe = describe
        self._next_number = 0

    def greet(self, guests: Guests, guest: Guest, frame: Frame, now: float) -> None:
        """Answer one frame. Raises WireError."""
        version = frame.fields.get("protocol")
        if version != PROTOCOL:
            raise WireError(
                f"the node speaks version {PROTOCOL} of the protocol (Penstock {VERSION}), the "
                f"client version {_short(version)}: expected the same; upgrade the older one"
            )
        if guest.session is not None and frame.kind in ("attach", "join"):
            raise WireError("this connection has a session already")
        try:
            if frame.kind == "hello":
                guest.channel.send("settings", self._settings())
            elif frame.kind == "describe":
                guest.channel.send("description", self._describe())
            elif frame.kind == "attach":
                self._attach(guests, guest, frame, now)
            elif frame.kind == "join":
                self._join(guests, guest, frame)
            else:
                raise WireError(f'attach first: "{frame.kind[:40]}" needs a session')
        except (*_WRONG, RecursionError) as error:
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

    def _attach(self, guests: Guests, guest: Guest, frame: Frame, now: float) -> None:
        fields = frame.fields
        name = unpack_text(fields.get("name", ""))[:80]
        if ended := {str(token) for token in fields.get("ended", [])}:
            guests.end_sessions(ended)
            guests.bury(now)
            self._rooms.remove_unused(now)
        try:
            room = self._rooms.find(fields, now)
        except (PenstockError, OSError) as error:
            raise WireError(str(error)) from None
        take_pid_file(guest)
        self._next_number += 1
        max_blocks = self._rooms.max_blocks(room)
        max_pins = int(max_blocks * self._config.node.pin_share)
        session = Session(
            self._next_number,
            secrets.token_hex(16),
            name,
            guest.channel,
            room,
            max_pins=max_pins,
            wants_events=bool(fields.get("events", False)),
        )
        guest.session, guest.is_client = session, True
        guests.watch(Life(session), guest)
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

    def _join(self, guests: Guests, guest: Guest, frame: Frame) -> None:
        """A further process of a client: it gets the memory, and its copies count until it ends."""
        token = str(frame.fields["token"])
        life = guests.life_of(token)
        if life is None:
            raise WireError("no client has this token: attach first")
        guest.session = life.session
        take_pid_file(guest)
        guests.watch(life, guest)
        self._send_memory(guest, "joined", {})

    def _send_memory(self, guest: Guest, kind: str, fields: dict[str, Any]) -> None:
        """Hand over the DRAM, and the seals of the client's model to read."""
        assert guest.session is not None
        seals_file = guest.session.room.seals_file
        reading = os.open(f"/proc/self/fd/{seals_file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            guest.channel.send(kind, fields, files=[self._dram.file, reading])
        finally:
            os.close(reading)
        guest.channel.flush()


def _short(value: object) -> str:
    return str(value)[:20] if isinstance(value, str | int | float) else "unknown"
