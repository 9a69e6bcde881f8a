"""Frames survive any cutting of the stream, and anything else is a WireError."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.node import wire
from penstock.node.wire import Channel, Frame, Reader, WireError, encode
from penstock.types import BlockKey, Slot, Tier, Verdict
from tests.node.nodes import num_files

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
frames = st.lists(
    st.tuples(
        st.text(max_size=12),
        st.dictionaries(st.text(max_size=8), plain, max_size=4),
        st.lists(st.binary(max_size=80), max_size=4),
    ),
    min_size=1,
    max_size=5,
)


@given(sent=frames, data=st.data())
def test_every_frame_survives_any_cutting(sent: list[Any], data: Any) -> None:
    stream = b"".join(encode(kind, fields, *parts) for kind, fields, parts in sent)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    reader, got = Reader(), []
    for start, end in pairwise([0, *sorted(cuts), len(stream)]):
        got += reader.feed(stream[start:end])
    assert [(f.kind, f.fields, list(f.parts)) for f in got] == sent


@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused_or_awaited(data: bytes) -> None:
    reader = Reader()
    try:
        for start in range(0, len(data), 7):
            reader.feed(data[start : start + 7])
    except WireError:
        pass


def framed(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<II", len(header), len(body)) + header + body


@given(header=plain, body=st.binary(max_size=40))
def test_any_json_as_a_header_is_a_frame_or_refused(header: Any, body: bytes) -> None:
    try:
        (frame,) = Reader().feed(framed(json.dumps(header).encode(), body))
    except WireError:
        return
    assert isinstance(frame.kind, str)
    assert b"".join(frame.parts) == body


@pytest.mark.parametrize(
    "stream",
    [
        struct.pack("<II", 0xFFFFFFFF, 0),
        struct.pack("<II", 2, 0xFFFFFFFF),
        framed(b"5"),
        framed(b"null"),
        framed(b"{}"),
        framed(b'"abc"'),
        framed(b'["a",{},[],4]'),
        framed(b'["a",[],[]]'),
        framed(b"[1,{},[]]"),
        framed(b'["a",{},[1]]'),
        framed(b'["a",{},[-1,1]]'),
        framed(b'["a",{},[true]]', b"x"),
        framed(b'["a",{},[1.0]]', b"x"),
        framed(b'["a",{},[NaN]]', b"x"),
        framed(b'["a",{},{}]'),
        framed(b"[" * 500_000),
        framed(b'["a",' + b'{"a":' * 100_000),
        framed(b"\xff\xfe\x00"),
        framed(b""),
        framed(b'["a",{},[' + b"9" * 5000 + b"]]"),
    ],
)
def test_what_is_not_a_frame_is_refused(stream: bytes) -> None:
    with pytest.raises(WireError):
        Reader().feed(stream)


@given(part=st.binary(max_size=100))
@settings(max_examples=300)
def test_parts_are_read_or_refused(part: bytes) -> None:
    for unpack in (
        wire.unpack_keys,
        wire.unpack_slots,
        wire.unpack_given_slots,
        wire.unpack_verdicts,
        wire.unpack_tiers,
    ):
        with suppress(WireError):
            unpack(part)


@given(value=plain)
def test_parents_are_read_or_refused(value: Any) -> None:
    try:
        parents = wire.unpack_parents(value)
    except WireError:
        return
    assert all(key is None or len(key) == 32 for key in parents.values())


@pytest.mark.parametrize("value", [[[math.inf, None]], [[math.nan, None]], [[0, "ab"]], [[0]], 7])
def test_wrong_parents_are_refused(value: Any) -> None:
    with pytest.raises(WireError):
        wire.unpack_parents(value)


@given(
    keys=st.lists(st.binary(min_size=32, max_size=32).map(BlockKey)),
    slots=st.lists(st.none() | st.integers(0, 2**62).map(Slot)),
    verdicts=st.lists(st.sampled_from(Verdict)),
    tiers=st.lists(st.none() | st.sampled_from(Tier)),
)
def test_what_is_packed_is_unpacked(
    keys: list[BlockKey],
    slots: list[Slot | None],
    verdicts: list[Verdict],
    tiers: list[Tier | None],
) -> None:
    assert list(wire.unpack_keys(wire.pack_keys(keys))) == keys
    assert wire.unpack_slots(wire.pack_slots(slots)) == slots
    assert list(wire.unpack_verdicts(wire.pack_verdicts(verdicts))) == verdicts
    assert list(wire.unpack_tiers(wire.pack_tiers(tiers))) == tiers
    parents = dict(enumerate([None, *keys]))
    sent = json.loads(json.dumps(wire.pack_parents(parents)))
    assert wire.unpack_parents(sent) == parents


@given(text=st.text(st.characters(exclude_categories=()), max_size=50) | st.just("long" * 9999))
def test_any_name_that_a_user_chose_can_be_sent(text: str) -> None:
    assert wire.unpack_text(wire.pack_text(text)) is not None
    if len(text) <= 50 and text.isprintable():
        assert wire.pack_text(text) == text


def pair() -> tuple[Channel, Channel]:
    one, two = socket.socketpair()
    return Channel(one), Channel(two)


def test_files_travel_with_a_frame_and_none_leaks() -> None:
    before = num_files()
    one, two = pair()
    file = os.memfd_create("sent")
    one.send("big", {}, bytes(100_000), files=[file, file])
    one.flush()
    os.close(file)
    got: list[Frame] = []
    while not got:
        one.flush()
        got = two.receive()
    assert [frame.kind for frame in got] == ["big"]
    assert len(two.files) == 2
    assert not any(os.get_inheritable(each) for each in two.files), "a child would keep them open"
    one.close()
    two.close()
    assert num_files() <= before


def test_too_many_files_are_refused_and_none_leaks() -> None:
    before = num_files()
    one, two = pair()
    file = os.memfd_create("sent")
    for _ in range(3):
        one.send("files", {}, files=[file] * 3)
        one.flush()
    two.receive()
    with pytest.raises(WireError, match="more files"):
        two.receive()
    one.close()
    two.close()
    os.close(file)
    assert num_files() <= before


def test_the_rest_of_a_batch_is_not_lost() -> None:
    one, two = pair()
    for number in range(3):
        one.send("frame", {"number": number})
    one.flush()
    first, *rest = two.receive()
    two.put_back(rest)
    one.send("frame", {"number": 3})
    one.flush()
    assert [first.fields["number"]] + [f.fields["number"] for f in two.receive()] == [0, 1, 2, 3]
    one.close()
    two.close()


class Endless:
    """A stream from which every read takes as much as it may."""

    def __init__(self) -> None:
        self.num_reads = 0
        self._stream = b""

    def setblocking(self, blocking: bool) -> None:
        pass

    def recvmsg(self, num_bytes: int, *_: int) -> tuple[bytes, list[Any], int, None]:
        self.num_reads += 1
        assert self.num_reads < 1000
        while len(self._stream) < num_bytes:
            self._stream += encode("more", {}, bytes(10_000))
        data, self._stream = self._stream[:num_bytes], self._stream[num_bytes:]
        return data, [], 0, None


def test_a_sender_without_pause_does_not_keep_the_receiver() -> None:
    """`receive` returns although there is always more to read."""
    endless: Any = Endless()
    assert Channel(endless).receive()


def test_last_words_are_heard_though_nothing_more_can_be_sent() -> None:
    """A client says goodbye and closes, while the node sends it news that it has not read."""
    ours, theirs = (Channel(end) for end in socket.socketpair())
    ours.send("news", {})
    ours.flush()
    theirs.send("bye", {})
    theirs.flush()
    theirs.close()  # with news unread, so that the next thing sent is an error
    ours.send("news", {})
    ours.flush()
    assert ours.is_deaf
    assert not ours.has_unsent
    assert [frame.kind for frame in ours.receive()] == ["bye"]
    ours.receive()
    assert ours.is_closed
    ours.close()
