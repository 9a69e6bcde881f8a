"""The bytes between a node and its clients, over a Unix stream socket.

A frame, in little-endian order:

    u32  length of the header
    u32  length of the body
    header: JSON, [kind, fields, [length of each part of the body]]
    body: the parts, one after the other

Keys are 32 bytes each, slots are i64 (-1: none), verdicts and tiers are one byte each (255: none).
Nothing is pickled. A frame that breaks these rules raises WireError, and the connection is closed.
File descriptors travel with the first byte of a frame.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from penstock.errors import PenstockError
from penstock.types import KEY_BYTES, BlockKey, Slot, Tier, Verdict

VERSION = 1
"""Of the protocol. Clients and nodes of different versions refuse each other with a sentence."""

_LENGTHS = struct.Struct("<II")
_MAX_HEADER = 1 << 20
_MAX_BODY = 1 << 26  # two million keys
_MAX_FILES = 4
_FILES_BYTES = socket.CMSG_LEN(_MAX_FILES * array("i").itemsize)
_READ_BYTES = 1 << 18
_MAX_READS = 16  # at a time, so that a client that sends without pause does not keep out others
_MAX_TEXT = 4096  # characters of a tenant or a session's name
_NONE = 255


class WireError(PenstockError):
    """The other side sent bytes that are not a frame, or a frame that means nothing."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    parts: Sequence[bytes] = ()


def encode(kind: str, fields: Mapping[str, Any], *parts: bytes) -> bytes:
    lengths = [len(part) for part in parts]
    header = json.dumps([kind, fields, lengths], separators=(",", ":")).encode()
    return b"".join((_LENGTHS.pack(len(header), sum(lengths)), header, *parts))


class Reader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Raises WireError."""
        buffer = self._buffer
        buffer += data
        frames = []
        start = 0
        while len(buffer) - start >= _LENGTHS.size:
            header_bytes, body_bytes = _LENGTHS.unpack_from(buffer, start)
            if header_bytes > _MAX_HEADER or body_bytes > _MAX_BODY:
                raise WireError(f"a frame of {header_bytes} + {body_bytes} bytes is too large")
            first = start + _LENGTHS.size
            end = first + header_bytes + body_bytes
            if len(buffer) < end:
                break
            header = bytes(buffer[first : first + header_bytes])
            body = bytes(memoryview(buffer)[first + header_bytes : end])
            frames.append(_decode(header, body))
            start = end
        if start:
            del buffer[:start]
        return frames


def _decode(header: bytes, body: bytes) -> Frame:
    try:
        kind, fields, lengths = json.loads(header)
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"the header of a frame cannot be read: {error}") from None
    well_formed = (
        isinstance(kind, str)
        and isinstance(fields, dict)
        and isinstance(lengths, list)
        and all(type(length) is int and length >= 0 for length in lengths)
    )
    if not well_formed or sum(lengths) != len(body):
        raise WireError("the header of a frame does not describe its body")
    parts = []
    start = 0
    for length in lengths:
        parts.append(body[start : start + length])
        start += length
    return Frame(kind, fields, parts)


class Channel:
    """One end of a connection. Buffers what it sends; `flush` and `receive` never block."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(False)
        self._reader = Reader()
        self._unsent = bytearray()
        self._files_to_send: list[int] = []
        self._unread: list[Frame] = []
        self.files: list[int] = []  # received; whoever takes one closes it
        self.is_closed = False
        self.has_more = False  # `receive` has not taken all that had arrived
        self.is_deaf = False  # the other side takes nothing more; its last words can still be read

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def num_unsent_bytes(self) -> int:
        return len(self._unsent)

    def send(
        self, kind: str, fields: Mapping[str, Any], *parts: bytes, files: Iterable[int] = ()
    ) -> None:
        """Queue a frame. Files are sent with the first byte that is still queued.

        The caller may close its files at once: later, their numbers would be others'.
        """
        self._files_to_send += map(os.dup, files)
        self._unsent += encode(kind, fields, *parts)

    def send_encoded(self, frames: bytes) -> None:
        """Queue frames that are encoded already, because others get the same."""
        self._unsent += frames

    def flush(self) -> None:
        """Send as much as the socket takes now. Sets `is_deaf` if it takes nothing any more."""
        if self.is_deaf:
            self._unsent.clear()
        while self._unsent and not self.is_closed:
            try:
                if self._files_to_send:
                    chunk = bytes(self._unsent[:_READ_BYTES])
                    sent = socket.send_fds(self._socket, [chunk], self._files_to_send)
                    self._close_files_to_send()
                else:
                    sent = self._socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.is_deaf = True
                self._unsent.clear()
                self._close_files_to_send()
                return
            del self._unsent[:sent]

    def receive(self) -> list[Frame]:
        """Frames that have arrived. Sets `is_closed` at the end of the stream. Raises WireError."""
        frames, self._unread = self._unread, []
        self.has_more = False
        for _ in range(_MAX_READS):
            if self.is_closed:
                break
            try:
                # `socket.recv_fds` ignores its flags, and a child would inherit the files.
                data, ancillary, _, _ = self._socket.recvmsg(
                    _READ_BYTES, _FILES_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self.is_closed = True
                break
            for level, kind, numbers in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    files = array("i")
                    files.frombytes(numbers[: len(numbers) - len(numbers) % files.itemsize])
                    self.files += files
            if len(self.files) > _MAX_FILES:
                raise WireError("more files were received than any frame has")
            if not data:
                self.is_closed = True
                break
            frames += self._reader.feed(data)
            if len(data) < _READ_BYTES:
                break
        else:
            self.has_more = True
        return frames

    def put_back(self, frames: Iterable[Frame]) -> None:
        """Let the next `receive` return these first."""
        self._unread = [*frames, *self._unread]

    def close(self) -> None:
        self.is_closed = True
        for file in self.files:
            os.close(file)
        self.files = []
        self._close_files_to_send()
        self._socket.close()

    def _close_files_to_send(self) -> None:
        for file in self._files_to_send:
            os.close(file)
        self._files_to_send = []


def pack_keys(keys: Sequence[BlockKey]) -> bytes:
    return b"".join(keys)


def unpack_keys(part: bytes) -> tuple[BlockKey, ...]:
    if len(part) % KEY_BYTES:
        raise WireError(f"{len(part)} bytes are not a number of keys")
    return tuple(
        [BlockKey(part[start : start + KEY_BYTES]) for start in range(0, len(part), KEY_BYTES)]
    )


def pack_slots(slots: Sequence[Slot | None]) -> bytes:
    return _little(array("q", [-1 if slot is None else slot for slot in slots])).tobytes()


def unpack_slots(part: bytes) -> list[Slot | None]:
    return [None if slot < 0 else Slot(slot) for slot in _integers(part)]


def unpack_given_slots(part: bytes) -> tuple[Slot, ...]:
    """Slots of which none may be missing."""
    slots = _integers(part)
    if slots and min(slots) < 0:
        raise WireError("a slot is missing")
    return tuple(map(Slot, slots))


def pack_verdicts(verdicts: Sequence[Verdict]) -> bytes:
    return bytes(verdicts)


def unpack_verdicts(part: bytes) -> tuple[Verdict, ...]:
    if not part.strip(b"\0"):
        return (Verdict.OK,) * len(part)
    try:
        return tuple(map(Verdict, part))
    except ValueError as error:
        raise WireError(str(error)) from None


def pack_tiers(tiers: Sequence[Tier | None]) -> bytes:
    return bytes([_NONE if tier is None else tier for tier in tiers])


def unpack_tiers(part: bytes) -> tuple[Tier | None, ...]:
    try:
        return tuple([None if tier == _NONE else Tier(tier) for tier in part])
    except ValueError as error:
        raise WireError(str(error)) from None


def pack_parents(parents: Mapping[int, BlockKey | None]) -> list[list[Any]]:
    """For a header: parents are rare."""
    return [[place, None if key is None else key.hex()] for place, key in parents.items()]


def unpack_parents(value: Any) -> dict[int, BlockKey | None]:
    try:
        parents = {
            int(place): None if key is None else BlockKey(bytes.fromhex(key))
            for place, key in value
        }
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"parents cannot be read: {error}") from None
    if any(key is not None and len(key) != KEY_BYTES for key in parents.values()):
        raise WireError(f"parents cannot be read: a key has {KEY_BYTES} bytes")
    return parents


def pack_text(text: str) -> str:
    """A name that users may have chosen. One that a node would refuse is replaced by its hash."""
    if len(text) <= _MAX_TEXT and _is_unicode(text):
        return text
    return xxhash.xxh3_128_hexdigest(text.encode(errors="surrogatepass"))


def unpack_text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not _is_unicode(value):
        raise WireError(f"expected a text of at most {_MAX_TEXT} characters")
    return value


def _is_unicode(text: str) -> bool:
    """Lone surrogates cannot be written to a log or a metric."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _integers(part: bytes) -> list[int]:
    if len(part) % 8:
        raise WireError(f"{len(part)} bytes are not a number of slots")
    return _little(array("q", part)).tolist()


def _little(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
