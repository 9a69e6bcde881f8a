"""A client's connection to a node: it connects, asks for the settings, and attaches.

Nothing here waits unless it says so, because a node may hang at any point.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from select import POLLIN, POLLOUT, poll
from typing import Any

from penstock.codecs.blocks import BlockValues
from penstock.errors import ConfigError
from penstock.node.values_wire import pack_values
from penstock.node.wire import VERSION, Channel, Frame, WireError
from penstock.types import BlockSpec, Tier

SCHEME = "unix://"


class NodeEnded(WireError):
    """The connection has ended without a word: the node is gone, and may be back soon."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What a client must know before it can describe its blocks."""

    codecs: Mapping[Tier, str]  # the setting of each tier in use
    load_deadline_seconds: float
    has_remote: bool


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a node's DRAM in which a client's blocks are. The files belong to the caller."""

    token: str
    dram_bytes: int
    num_slots: int
    block_bytes: int
    stride_bytes: int
    max_blocks: int  # the most that the model may have there
    max_pins: int  # the most of them that this client may pin
    file: int
    seals_file: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.dram_bytes, self.num_slots, self.block_bytes, self.stride_bytes


def socket_path(url: str) -> Path:
    """The path in a URL such as unix:///run/penstock/node.sock."""
    path = url.removeprefix(SCHEME)
    if not url.startswith(SCHEME) or not path.startswith("/"):
        raise ConfigError(
            f"node.url is {url!r}: expected unix:// and an absolute path, such as "
            "unix:///run/penstock/node.sock; correct it, or leave it out."
        )
    return Path(path)


def connect(path: Path, timeout_seconds: float = 0.2) -> Channel:
    """Raises OSError if no node is listening."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_seconds)
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return Channel(connection)


def send_hello(channel: Channel) -> None:
    channel.send("hello", {"protocol": VERSION})
    channel.flush()


def read_settings(frame: Frame) -> NodeSettings:
    """Raises WireError."""
    expect(frame, "settings")
    try:
        return NodeSettings(
            {Tier(int(tier)): str(name) for tier, name in frame.fields["codecs"].items()},
            float(frame.fields["load_deadline_seconds"]),
            bool(frame.fields["has_remote"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"the node's settings cannot be read: {error!r}") from None


def send_attach(
    channel: Channel,
    spec: BlockSpec,
    values: BlockValues,
    *,
    name: str,
    in_one: bool,
    events: bool,
    ended: Sequence[str] = (),
) -> None:
    """`ended`: the tokens of earlier sessions of this client, of which nothing is running."""
    fields: dict[str, Any] = {
        "protocol": VERSION,
        "name": name,
        "namespace": spec.namespace.hex(),
        "block_bytes": spec.block_bytes,
        "block_tokens": spec.block_tokens,
        "description": list(spec.description),
        "values": pack_values(values),
        "in_one": in_one,
        "events": events,
        "ended": list(ended),
    }
    files = []
    with suppress(OSError, AttributeError):
        files.append(os.pidfd_open(os.getpid()))
    channel.send("attach", fields, files=files)
    channel.flush()
    for file in files:
        os.close(file)


def read_place(channel: Channel, frame: Frame) -> Place:
    """Raises WireError."""
    expect(frame, "attached")
    if len(channel.files) != 2:
        raise WireError("the node did not send its memory")
    file, seals_file = channel.files
    channel.files = []
    try:
        return Place(
            token=str(frame.fields["token"]),
            dram_bytes=int(frame.fields["dram_bytes"]),
            num_slots=int(frame.fields["num_slots"]),
            block_bytes=int(frame.fields["block_bytes"]),
            stride_bytes=int(frame.fields["stride_bytes"]),
            max_blocks=int(frame.fields["max_blocks"]),
            max_pins=int(frame.fields["max_pins"]),
            file=file,
            seals_file=seals_file,
        )
    except (LookupError, TypeError, ValueError) as error:
        os.close(file)
        os.close(seals_file)
        raise WireError(f"the node's answer cannot be read: {error!r}") from None


def wait_for_frame(channel: Channel, timeout_seconds: float) -> Frame:
    """The next frame. Raises WireError if it does not come in time, NodeEnded if it cannot come."""
    deadline = time.monotonic() + timeout_seconds
    waiter = poll()
    while True:
        channel.flush()
        if frames := channel.receive():
            channel.put_back(frames[1:])
            return frames[0]
        left = deadline - time.monotonic()
        if channel.is_closed:
            raise NodeEnded("the node has closed the connection")
        if left <= 0:
            raise WireError(f"the node does not answer within {timeout_seconds:g} s")
        waiter.register(channel.fileno(), POLLIN | (POLLOUT if channel.has_unsent else 0))
        waiter.poll(max(1, int(left * 1000)))


def ask_description(channel: Channel, timeout_seconds: float) -> dict[str, Any]:
    """What a node holds, for people and programs. Raises WireError."""
    channel.send("describe", {"protocol": VERSION})
    frame = wait_for_frame(channel, timeout_seconds)
    expect(frame, "description")
    return dict(frame.fields)


def find_node(path: Path, wait_seconds: float) -> Channel:
    """Connect, and wait for a node that is being started. Raises ConfigError."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return connect(path)
        except PermissionError:
            raise ConfigError(
                f"this user may not use the node at {path}: expected its user or its group; start "
                "the node with --group, or run as its user."
            ) from None
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"no node is listening at {path} ({error.strerror or error}): expected one; "
                    "start it with `penstock node`, or remove the setting node.url."
                ) from None
        time.sleep(0.1)


def expect(frame: Frame, kind: str) -> None:
    """Raise WireError unless the frame is of this kind."""
    if frame.kind == "refused":
        raise WireError(str(frame.fields.get("why", "the node refuses this client")))
    if frame.kind != kind:
        raise WireError(f'the node answered "{frame.kind[:40]}", expected "{kind}"')
