"""Line: a client's connection to its node, while it is attached: requests, calls and their answers.

A node may hang or be gone at any time. A call waits once for ANSWER_SECONDS; after that, the node
hangs, and nothing waits for it until it says something.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from select import POLLIN, POLLOUT, poll
from typing import Any, TypeVar

from penstock.node.connection import NodeSettings
from penstock.node.goodbye import say_goodbye
from penstock.node.wire import Channel, Frame, WireError

log = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0  # a node that takes longer hangs
_TELL_SECONDS = 60.0  # between two sentences in the log

_WRONG = (LookupError, TypeError, ValueError, AttributeError, OverflowError)

_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _Call:
    """A question that the node has not answered."""

    read: Callable[[Frame], Any]
    late: Callable[[Frame], None]
    is_late: bool = False  # nobody waits for it any more
    has_answer: bool = False
    answer: Any = None


class Line:
    """Use it from one thread only. Only `wake` is safe on any thread."""

    def __init__(self, path: Path, settings: NodeSettings, exchange: Callable[[], None]) -> None:
        """`exchange` takes what has arrived (see `receive`): a call repeats it until it is over."""
        self.path = path
        self.settings = settings  # of the node at the other end
        self._exchange = exchange
        self._channel: Channel | None = None
        self._numbers = count(1)
        self._calls: dict[int, _Call] = {}
        self._hangs_since: float | None = None
        self._heard = time.monotonic()  # when the node last said something
        self._probed: float | None = None  # when it was asked whether it is there
        self._last_told = -math.inf
        self._wake_file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False  # then the number of this file may be another's

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    @property
    def is_answering(self) -> bool:
        return self._channel is not None and self._hangs_since is None

    def use(self, channel: Channel) -> None:
        """A node has attached this client."""
        self._channel = channel

    def drop(self) -> None:
        """End the connection, if there is one. Calls that wait get no answer."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._calls.clear()
        self._hangs_since = self._probed = None

    def say_goodbye(self, timeout_seconds: float) -> bool:
        """Nothing of the session is running. False if the node could not be told."""
        if self._channel is None:
            return False
        return say_goodbye(self._channel, min(timeout_seconds, ANSWER_SECONDS))

    def close(self) -> None:
        """Nobody may `wake` it any more."""
        self.drop()
        self._is_closed = True
        os.close(self._wake_file)

    # What is said.

    def send(self, kind: str, fields: Mapping[str, Any], *parts: bytes) -> None:
        """Send a request that has no answer. Lost if no node listens."""
        if self.is_answering:
            self.queue(kind, fields, *parts)
            self.flush()

    def queue(self, kind: str, fields: Mapping[str, Any], *parts: bytes) -> None:
        """Let a node know something with the next `flush`, also if it hangs now."""
        if self._channel is not None:
            self._channel.send(kind, fields, *parts)

    def flush(self) -> None:
        if self._channel is not None:
            self._channel.flush()

    def call(
        self,
        kind: str,
        fields: Mapping[str, Any],
        *parts: bytes,
        read: Callable[[Frame], _Answer],
        late: Callable[[Frame], None] = lambda frame: None,
    ) -> _Answer | None:
        """Ask the node and wait for its answer. None if there is no node, or it hangs.

        `read` is called before anything that the node says after its answer is heard, because that
        may be the end of what the answer began. `late` is called if nobody waits any more.
        """
        if not self.is_answering:
            return None
        number = next(self._numbers)
        call = self._calls[number] = _Call(read, late)
        self.send(kind, {**fields, "call": number}, *parts)
        end = time.monotonic() + ANSWER_SECONDS
        while True:
            self._exchange()
            if call.has_answer:
                answer: _Answer = call.answer
                return answer
            if self._channel is None:
                return None
            left = end - time.monotonic()
            if left <= 0:
                break
            self.pause(left)
        call.is_late = True
        self._hang(time.monotonic())
        return None

    # What is heard.

    def receive(self, hear: Callable[[Frame], None]) -> str | None:
        """Take what has arrived, without waiting. Returns why the node is lost; None if it is not.

        `hear` gets everything but answers.
        """
        if self._is_closed:
            return None
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_file)
        channel = self._channel
        if channel is None:
            return None
        try:
            channel.flush()
            frames = channel.receive()
            for frame in frames:
                if frame.kind == "refused":
                    return str(frame.fields.get("why", ""))
                if frame.kind == "reply":
                    self._take_answer(frame)
                else:
                    hear(frame)
        except (*_WRONG, WireError) as error:
            return f"it sent something wrong: {error}"
        if frames:
            self._hangs_since = self._probed = None
            self._heard = time.monotonic()
        return "the connection has ended" if channel.is_closed else None

    def _take_answer(self, frame: Frame) -> None:
        call = self._calls.pop(int(frame.fields["call"]), None)
        if call is None:
            return
        if call.is_late:
            call.late(frame)
        else:
            call.answer = call.read(frame)
            call.has_answer = True

    def wake(self) -> None:
        """End a `pause`."""
        os.eventfd_write(self._wake_file, 1)

    def pause(self, timeout_seconds: float, instead: Channel | None = None) -> None:
        """Block until there is news, or time is up. `instead` counts if there is no connection."""
        waiter = poll()
        if not self._is_closed:
            waiter.register(self._wake_file, POLLIN)
        channel = self._channel or instead
        if channel is not None and not channel.is_closed:
            waiter.register(channel.fileno(), POLLIN | (POLLOUT if channel.has_unsent else 0))
        waiter.poll(max(0, math.ceil(timeout_seconds * 1000)))

    # Whether the node hangs.

    def hangs_for_long(self, now: float) -> bool:
        return self._hangs_since is not None and now - self._hangs_since > ANSWER_SECONDS

    def probe(self, now: float) -> None:
        """Something is under way: notice that the node hangs, even if nothing is asked."""
        if not self.is_answering:
            return
        if self._probed is not None:
            if now - self._probed > ANSWER_SECONDS:
                self._hang(now)
        elif now - self._heard > ANSWER_SECONDS:
            self._probed = now
            self.send("is_moving", {"call": next(self._numbers)})

    def warn(self, sentence: str) -> None:
        """Into the log, but not too often."""
        now = time.monotonic()
        if now - self._last_told >= _TELL_SECONDS:
            self._last_told = now
            log.warning("%s", sentence)

    def _hang(self, now: float) -> None:
        self._hangs_since = now
        self.warn(f"the node at {self.path} hangs: nothing is loaded until it answers")
