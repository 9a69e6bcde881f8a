"""Handshake: how a client gets a session at a node, for the first time and again.

A node that is gone may be back at any time. The client attaches to it once nothing uses the memory
of the last one.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path

from penstock.codecs.blocks import BlockValues
from penstock.errors import ConfigError, PenstockError
from penstock.node.client_memory import ClientMemory
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
from penstock.node.goodbye import keep_for_later, to_tell, told
from penstock.node.line import Line
from penstock.node.wire import Channel, WireError
from penstock.types import BlockSpec

log = logging.getLogger(__name__)

_START_SECONDS = 30.0  # to attach for the first time: the node may open a disk
_RETRY_SECONDS = 1.0
_REFUSED_RETRY_SECONDS = 30.0


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


class Handshake:
    def __init__(
        self, line: Line, spec: BlockSpec, values: BlockValues, *, name: str, in_one: bool
    ) -> None:
        self._line = line
        self._spec = spec
        self._values = values
        self._name = name
        self._in_one = in_one
        self._ended_tokens: list[str] = []  # of this client's sessions that a node may still have
        self._told_tokens: tuple[str, ...] = ()  # of earlier clients in this process
        self.channel: Channel | None = None  # a new connection that is not attached yet
        self._next_try = 0.0

    def first(self, channel: Channel) -> Place:
        """Raises ConfigError, or NodeEnded if the node ends before it has answered."""
        try:
            self._send_attach(channel)
            place = read_place(channel, wait_for_frame(channel, _START_SECONDS))
        except WireError as error:
            channel.close()
            if isinstance(error, NodeEnded):
                raise
            raise ConfigError(f"the node at {self._line.path}: {error}") from None
        told(self._line.path, self._told_tokens)
        return place

    def session_ended(self, token: str) -> None:
        """A session has no connection any more. The next node to be attached to is told."""
        self._ended_tokens.append(token)

    def try_again(self, memory: ClientMemory, *, is_unused: bool) -> bool:
        """Attach to a node that is back, if the memory of the last one is not used any more.

        Never waits: call it again and again. Returns True if this client is attached now.
        """
        now = time.monotonic()
        if self.channel is not None:
            return self._go_on(self.channel, memory, now)
        if now >= self._next_try:
            self._next_try = now + _RETRY_SECONDS
            if is_unused:
                with suppress(OSError):
                    self.channel = connect(self._line.path)
                    send_hello(self.channel)
        return False

    def stop(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def keep_goodbyes(self, *, has_told_last: bool) -> None:
        """The client is closed: the next one in this process tells the node of its sessions."""
        untold = self._ended_tokens[:-1] if has_told_last else self._ended_tokens
        keep_for_later(self._line.path, untold)

    def _send_attach(self, channel: Channel) -> None:
        self._told_tokens = to_tell(self._line.path)
        send_attach(
            channel,
            self._spec,
            self._values,
            name=self._name,
            in_one=self._in_one,
            events=True,
            ended=[*self._ended_tokens, *self._told_tokens],
        )

    def _go_on(self, channel: Channel, memory: ClientMemory, now: float) -> bool:
        try:
            channel.flush()
            frames = channel.receive()
            for number, frame in enumerate(frames):
                if frame.kind == "settings":
                    self._compare(read_settings(frame))
                    self._send_attach(channel)
                else:
                    self._replace(memory, read_place(channel, frame))
                    channel.put_back(frames[number + 1 :])
                    self.channel = None
                    self._line.use(channel)
                    log.info("attached to the node at %s again", self._line.path)
                    return True
            if channel.is_closed:
                self.stop()  # the node has ended meanwhile, and may be back soon
        except (PenstockError, OSError) as error:
            self.stop()
            self._next_try = now + _REFUSED_RETRY_SECONDS
            self._line.warn(f"the node at {self._line.path} is not used: {error}")
        return False

    def _compare(self, settings: NodeSettings) -> None:
        if settings.codecs != self._line.settings.codecs:
            raise WireError("its codecs have changed; restart this process to use it")
        self._line.settings = settings

    def _replace(self, memory: ClientMemory, place: Place) -> None:
        try:
            memory.replace(place)
        except (PenstockError, OSError):
            if memory.place is place:
                self._ended_tokens.append(place.token)
            raise
        self._ended_tokens = []
        told(self._line.path, self._told_tokens)
