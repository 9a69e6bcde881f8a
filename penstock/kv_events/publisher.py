"""Publishes KV events on a ZeroMQ socket, from a thread of its own.

A message has three frames, as in vLLM: topic, sequence number, batch. A reader may miss some of
them, because it connects late or reads too slowly. So that it is never wrong for long:

- When a reader subscribes, everything that is held is published again, after an `AllBlocksCleared`.
  The same happens after changes were dropped because the queue was full.
- Sequence numbers start at the time in nanoseconds. They rise even when the server restarts, so
  that a reader does not take new batches for old ones.
- The replay socket sends the batches from a given number on. The oldest batch that it keeps is
  the beginning of the last full publication, unless that is too large.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_address
from itertools import islice
from threading import Event, Thread
from typing import Any

import zmq

from penstock.errors import ConfigError
from penstock.kv_events.held import HeldBlock, HeldBlocks, TierChange
from penstock.kv_events.wire import CLEARED, events_of, pack
from penstock.types import Tier

log = logging.getLogger(__name__)

_HWM = 100_000  # batches that wait for one slow reader; further ones are lost for it
_BATCH_BLOCKS = 1024
_REPLAY_BYTES = 64 << 20
_MIN_RESET_SECONDS = 1.0  # between two full publications ...
_RESET_SHARE = 10  # ... or so many times as long as the last one took
_CLOSE_SECONDS = 2.0
_LINGER_MS = 500
_UNSUBSCRIBED, _SUBSCRIBED = b"\x00", b"\x01"  # how messages from readers begin
_END = (-1).to_bytes(8, "big", signed=True)


class KvEventPublisher:
    def __init__(
        self,
        endpoint: str,
        topic: str = "",
        replay_endpoint: str | None = None,
        *,
        held: HeldBlocks | None = None,
        replay_bytes: int = _REPLAY_BYTES,
    ) -> None:
        """Open the sockets. Raises ConfigError if that fails; then nothing stays open."""
        self.held = held or HeldBlocks()
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        # An XPUB is a PUB that is told about subscriptions.
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._socket.set_hwm(_HWM)
        try:
            self.endpoint = _open(self._socket, endpoint, "kv_events")
            self.replay_endpoint = None
            if replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self.replay_endpoint = _open(self._replay, replay_endpoint, "kv_events_replay")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._next_number = time.time_ns()
        self._num_readers = 0
        self._must_reset = False
        self._next_reset = 0.0
        self._kept: deque[tuple[int, bytes]] = deque()  # for the replay socket
        self._num_kept_bytes = 0
        self._max_kept_bytes = replay_bytes
        self._is_kept_from_reset = False
        self._stop = Event()
        self.held.on_change = self._wake
        self._thread = Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell readers that nothing is held any more, and stop."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._wake()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("KV events: the publisher does not stop; it is left behind")
            return
        self.held.on_change = lambda: None
        os.close(self._wakeup)

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    # The publisher's thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                poller.poll(self._milliseconds_to_wait())
                try:
                    self._advance()
                except Exception:
                    # Routers then know less. Requests are not affected.
                    log.exception("KV events: publishing failed; everything is published again")
                    self._must_reset = True
                    self._next_reset = time.monotonic() + _MIN_RESET_SECONDS
            self._send([CLEARED])
        finally:
            self._context.destroy(linger=_LINGER_MS)

    def _milliseconds_to_wait(self) -> int | None:
        if not self._must_reset or not self._num_readers:
            return None
        return max(0, int(1000 * (self._next_reset - time.monotonic())) + 1)

    def _advance(self) -> None:
        with suppress(BlockingIOError):  # a reader woke us, not a change
            os.eventfd_read(self._wakeup)
        self._take_subscriptions()
        self._serve_replay()
        if not self._num_readers:
            self._forget()
            return
        while not self._stop.is_set():
            changes = None if self._must_reset else self.held.take(_BATCH_BLOCKS)
            if changes is None:
                self._must_reset = True
                if time.monotonic() >= self._next_reset:
                    self._publish_all()
                return
            if not changes:
                return
            self._send(list(events_of(changes)))

    def _take_subscriptions(self) -> None:
        while self._socket.poll(0):
            message = self._socket.recv()
            kind, topic = message[:1], message[1:]
            if kind not in (_UNSUBSCRIBED, _SUBSCRIBED) or not self._topic.startswith(topic):
                continue
            self._num_readers += 1 if kind == _SUBSCRIBED else -1
            self._must_reset |= kind == _SUBSCRIBED

    def _forget(self) -> None:
        """Nobody listens. The next reader gets everything."""
        self.held.forget_changes()
        self._must_reset = True
        self._clear_kept()

    def _publish_all(self) -> None:
        began = time.monotonic()
        self._must_reset = False
        blocks = self.held.reset()
        self._clear_kept()
        self._is_kept_from_reset = True
        self._send([CLEARED])
        for changes in _batches(_all_of(blocks), _BATCH_BLOCKS):
            self._send(list(events_of(changes)))
            time.sleep(0)  # let the engine's thread have the interpreter
        now = time.monotonic()
        self._next_reset = now + max(_MIN_RESET_SECONDS, _RESET_SHARE * (now - began))

    def _send(self, events: Sequence[dict[str, Any]]) -> None:
        number, payload = self._next_number, pack(events)
        self._next_number += 1
        if self._replay is not None:
            self._keep(number, payload)
        self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    # Replay.

    def _keep(self, number: int, payload: bytes) -> None:
        self._kept.append((number, payload))
        self._num_kept_bytes += len(payload)
        while self._num_kept_bytes > self._max_kept_bytes:
            _, oldest = self._kept.popleft()
            self._num_kept_bytes -= len(oldest)
            self._is_kept_from_reset = False

    def _clear_kept(self) -> None:
        self._kept.clear()
        self._num_kept_bytes = 0
        self._is_kept_from_reset = False

    def _serve_replay(self) -> None:
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning(
                    "KV events: a replay request has %d frames: expected an empty one, and the "
                    "first sequence number in 8 bytes",
                    len(frames) - 1,
                )
                continue
            reader, start = frames[0], int.from_bytes(frames[2], "big")
            first = self._kept[0][0] if self._kept else self._next_number
            if start < first and not self._is_kept_from_reset:
                self._publish_all()
            for number, payload in self._kept:
                if number >= start:
                    message = (reader, b"", self._topic, number.to_bytes(8, "big"), payload)
                    self._replay.send_multipart(message)
            self._replay.send_multipart((reader, b"", b"", _END, b""))


def _all_of(blocks: Iterable[HeldBlock]) -> Iterator[TierChange]:
    for tier in Tier:
        yield from (TierChange(tier, block, True) for block in blocks if block.is_in(tier))


def _batches(changes: Iterator[TierChange], size: int) -> Iterator[list[TierChange]]:
    while batch := list(islice(changes, size)):
        yield batch


def _open(socket: zmq.Socket[bytes], endpoint: str, option: str) -> str:
    """Listen on an address of this machine, or else connect. Returns the address in use.

    vLLM connects to every address but `*`. A reader on the same machine that listens itself is
    reached by its name, for example tcp://localhost:5557.
    """
    try:
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        if _is_own(endpoint) or option == "kv_events_replay":
            try:
                socket.bind(endpoint)
                return socket.getsockopt_string(zmq.LAST_ENDPOINT)
            except zmq.ZMQError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV) or "*" in endpoint:
                    raise
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{option} is {endpoint!r}, which cannot be opened ({error}): expected an address such "
            "as tcp://*:5557; correct it, or choose another port."
        ) from None
    return endpoint


def _is_own(endpoint: str) -> bool:
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp" or "*" in rest:
        return True
    try:
        ip_address(rest.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True
