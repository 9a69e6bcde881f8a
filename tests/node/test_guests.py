"""A connection may end at any point of a node's step: it costs that client only."""

from __future__ import annotations

import gc
import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.codecs.blocks import BlockValues, PartValues
from penstock.config import Config, HostConfig
from penstock.errors import BookError
from penstock.node import guests, rooms, wire
from penstock.node.connection import connect, read_place, send_attach
from penstock.node.service import NodeService
from penstock.node.session import Session
from penstock.node.wire import VERSION, Channel, Frame, pack_keys, pack_slots
from penstock.types import BlockKey, Slot, Verdict
from penstock.units import MiB
from tests.node.nodes import BLOCK_BYTES, namespace, num_files

KEYS = [BlockKey(bytes([n]) * 32) for n in range(64)]


class Stepped:
    """A node whose steps are made by the test, and whose clients "die" when the test says so."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / "node.sock"
        self.service = NodeService(Config(host=HostConfig(size_bytes=16 * MiB)), self.path)
        self._pid_files: list[int] = []
        self._clients: list[Client] = []
        self.num_faults = 0  # that the test expects
        monkeypatch.setattr(guests, "pid_file_of", self._pid_file_of)

    def _pid_file_of(self, connection: socket.socket) -> int:
        self._pid_files.append(os.eventfd(0))
        return os.dup(self._pid_files[-1])

    def client(self, model: str = "tiny") -> Client:
        number = len(self._pid_files)
        client = Client(self, model)
        client.pid_file = self._pid_files[number]
        self._clients.append(client)
        return client

    def step(self) -> None:
        self.service.step(0.0)

    def clients(self) -> int:
        num: int = self.service.describe()["num_clients"]
        return num

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for file in self._pid_files:
            os.close(file)
        assert self.service.close()
        assert self.service.num_faults == self.num_faults


class Client:
    def __init__(self, node: Stepped, model: str) -> None:
        self._node = node
        self.pid_file = -1
        self.channel: Channel = connect(node.path, 5.0)
        spec = namespace(model).block_spec(BLOCK_BYTES)
        values = BlockValues((PartValues(BLOCK_BYTES),))
        send_attach(self.channel, spec, values, name="raw", in_one=False, events=True)
        self.place = read_place(self.channel, self.hear("attached"))
        os.close(self.place.file)
        os.close(self.place.seals_file)

    def send(self, kind: str, fields: dict[str, Any], *parts: bytes) -> None:
        self.channel.send(kind, fields, *parts)
        self.channel.flush()

    def hear(self, kind: str) -> Frame:
        """Let the node make steps until it has sent a frame of this kind."""
        for _ in range(100):
            self._node.step()
            frames = self.channel.receive()
            for place, frame in enumerate(frames):
                if frame.kind == kind:
                    self.channel.put_back(frames[place + 1 :])
                    return frame
        raise AssertionError(f"the node sent no {kind}")

    def begin_save(self, key: BlockKey, ticket: int) -> int:
        self.send("save", {"ticket": ticket}, pack_keys([key]), pack_slots([Slot(0)]))
        return int(self.hear("transfer").fields["transfer"])

    def end_save(self, transfer: int) -> None:
        """All clients of the model are told of the block in the node's next step."""
        self.send("report", {"transfer": transfer}, bytes([Verdict.OK]))

    def stop_reading(self) -> None:
        """What the node sends from now on fails; nothing that it could read says so."""
        self.channel._socket.shutdown(socket.SHUT_RD)

    def die(self) -> None:
        os.eventfd_write(self.pid_file, 1)

    def close(self) -> None:
        self.channel.close()


@contextmanager
def stepped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stepped]:
    node = Stepped(folder, monkeypatch)
    try:
        yield node
    finally:
        node.close()


def test_a_client_dies_in_the_step_in_which_it_cannot_be_sent_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stepped(tmp_path, monkeypatch) as node:
        living, victim = node.client(), node.client()
        transfer = living.begin_save(KEYS[0], 1)
        victim.stop_reading()
        victim.die()
        living.end_save(transfer)
        node.step()
        assert node.clients() == 1
        node.step()
        node.service.check()
        living.send("match", {"call": 1}, pack_keys(KEYS[:1]))
        assert living.hear("reply").fields["runs"], "the living client is served"


def test_a_client_that_cannot_be_sent_to_leaves_but_keeps_its_slots_while_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stepped(tmp_path, monkeypatch) as node:
        living, victim = node.client(), node.client()
        victim.begin_save(KEYS[1], 1)
        transfer = living.begin_save(KEYS[0], 1)
        victim.stop_reading()
        living.end_save(transfer)
        node.step()
        node.step()
        with pytest.raises(BrokenPipeError):
            victim.channel._socket.send(b"x")
        assert node.clients() == 2, "its process may still copy"
        victim.die()
        node.step()
        assert node.clients() == 1
        node.service.check()


def test_a_goodbye_is_heard_though_the_client_cannot_be_sent_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that has said goodbye reads no more news. Its process lives on."""
    with stepped(tmp_path, monkeypatch) as node:
        client = node.client()
        (session,) = (life.session for life in node.service._guests._lives)
        session.channel.send("event", {})  # between the node's looking and its sending
        client.send("bye", {})
        client.stop_reading()
        node.service._guests.send()
        node.step()
        assert node.clients() == 0


def test_a_node_closes_with_guests_of_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attached, unknown, with a dead connection, and gone: no file stays open."""
    files = num_files()
    with stepped(tmp_path, monkeypatch) as node:
        attached, dead, gone = node.client(), node.client(), node.client()
        unknown = connect(node.path)
        node.step()
        transfer = attached.begin_save(KEYS[0], 1)
        dead.stop_reading()
        gone.close()
        attached.end_save(transfer)
        assert node.service.close()
        unknown.close()
    assert num_files() <= files


def fails(*_: object) -> None:
    raise RuntimeError("a fault of the node")


@pytest.mark.parametrize("where", ["_hear", "_send"])
def test_a_fault_that_has_to_do_with_one_guest_costs_that_guest_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with stepped(tmp_path, monkeypatch) as node:
        living, victim = node.client(), node.client()
        victim.begin_save(KEYS[1], 1)
        (_, number) = node.service._guests._guests
        right = getattr(guests.Guests, where)
        monkeypatch.setattr(
            guests.Guests,
            where,
            lambda self, guest: (fails if guest.number == number else right)(self, guest),
        )
        victim.send("match", {"call": 1}, pack_keys(KEYS[:1]))
        node.step()
        node.num_faults = 1
        assert node.clients() == 2, "the victim's process may still copy"
        with pytest.raises(BrokenPipeError):
            victim.channel._socket.send(b"x")
        victim.die()
        node.step()
        assert node.clients() == 1
        living.send("match", {"call": 1}, pack_keys(KEYS[:1]))
        assert living.hear("reply")


def test_news_that_cannot_be_sent_cost_one_client_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stepped(tmp_path, monkeypatch) as node:
        living, victim = node.client(), node.client()
        room = next(iter(node.service._rooms))
        session = node.service._guests.sessions_of(room)[1]
        monkeypatch.setattr(session, "send_news", fails)
        node.step()
        node.num_faults = 1
        with pytest.raises(BrokenPipeError):
            victim.channel._socket.send(b"x")
        living.send("match", {"call": 1}, pack_keys(KEYS[:1]))
        assert living.hear("reply")


@pytest.mark.parametrize("what", ["hang_up", "give_back"])
def test_a_client_whose_end_breaks_the_books_costs_its_model_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def breaks(self: Session) -> None:
        if self.room is room:
            node.num_faults += 1
            raise BookError("a fault of the node")
        right(self)

    with stepped(tmp_path, monkeypatch) as node:
        living, neighbor, victim = node.client("other"), node.client(), node.client()
        room = list(node.service._rooms)[1]
        right = getattr(Session, what)
        monkeypatch.setattr(Session, what, breaks)
        victim.send("bye", {})
        assert "attach again" in neighbor.hear("refused").fields["why"]
        assert [each["model"] for each in node.service.describe()["models"]] == ["other"]
        living.send("match", {"call": 1}, pack_keys(KEYS[:1]))
        assert living.hear("reply")
        again = node.client()
        assert again.begin_save(KEYS[0], 1)


def test_a_broken_model_waits_for_clients_that_may_still_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stepped(tmp_path, monkeypatch) as node:
        client = node.client()
        client.begin_save(KEYS[0], 1)
        (room,) = node.service._rooms
        free = node.service._rooms.free_bytes
        node.service._break(room)
        node.step()
        assert node.service._rooms.free_bytes == free, "the client may still write there"
        client.die()
        node.step()
        assert node.service._rooms.free_bytes > free


def test_a_broken_model_does_not_wait_for_clients_that_have_nothing_in_dram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stepped(tmp_path, monkeypatch) as node:
        client, reader = node.client(), node.client()
        transfer = client.begin_save(KEYS[0], 1)
        client.end_save(transfer)
        client.hear("done")
        reader.send("pin", {"call": 1}, pack_keys(KEYS[:1]))
        reader.hear("reply")
        (room,) = node.service._rooms
        free = node.service._rooms.free_bytes
        node.service._break(room)
        node.step()
        assert node.clients() == 1, "the other one may still read what it has pinned"
        assert node.service._rooms.free_bytes == free
        reader.die()
        node.step()
        assert node.service._rooms.free_bytes > free


@pytest.mark.parametrize("fault", [None, OSError("a store cannot be closed")])
def test_dram_is_not_given_to_others_while_a_thread_may_write_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: OSError | None
) -> None:
    def hangs(timeout_seconds: float) -> bool:
        if fault is not None:
            raise fault
        return False

    monkeypatch.setattr(rooms, "_ABANDON_AGAIN_SECONDS", 0.0)
    with stepped(tmp_path, monkeypatch) as node:
        client = node.client()
        (room,) = node.service._rooms
        free = node.service._rooms.free_bytes
        right = room.offloader.abandon
        monkeypatch.setattr(room.offloader, "abandon", hangs)
        node.service._break(room)
        for _ in range(3):
            node.step()
        assert not node.clients()
        assert node.service._rooms.free_bytes == free
        client = node.client()  # meanwhile, the model has a new room
        assert client.begin_save(KEYS[0], 1)
        node.service.check()
        monkeypatch.setattr(room.offloader, "abandon", right)
        taken = node.service._rooms.free_bytes
        node.step()
        assert node.service._rooms.free_bytes > taken
        node.service.check()


def test_an_unused_model_with_a_tier_that_hangs_keeps_its_dram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "_ABANDON_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(rooms, "_EMPTY_ROOM_SECONDS", 0.0)
    with stepped(tmp_path, monkeypatch) as node:
        client = node.client()
        (room,) = node.service._rooms
        free = node.service._rooms.free_bytes
        right = room.offloader.abandon
        monkeypatch.setattr(room.offloader, "abandon", lambda timeout_seconds: False)
        client.send("bye", {})
        for _ in range(3):
            node.step()
        assert not list(node.service._rooms)
        assert node.service._rooms.free_bytes == free
        monkeypatch.setattr(room.offloader, "abandon", right)
        node.step()
        assert node.service._rooms.free_bytes > free


def test_a_goodbye_is_heard_behind_many_unread_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_READ_BYTES", 4096)  # instead of a socket that holds 4 MiB
    with stepped(tmp_path, monkeypatch) as node:
        living, leaving = node.client(), node.client()
        leaving.begin_save(KEYS[1], 1)  # so that the node waits for its process
        for _ in range(30):
            leaving.channel.send("used", {"tenant": ""}, pack_keys(KEYS * 2))
        leaving.channel.send("bye", {})
        leaving.channel.flush()
        assert not leaving.channel.has_unsent, "the socket takes it all"
        # The node notices first that it cannot send, because it has news for all clients.
        (room,) = node.service._rooms
        leaving.close()
        for session in node.service._guests.sessions_of(room):
            session.channel.send("state", {})
        node.service._guests.send()
        for _ in range(20):
            node.step()
        assert node.clients() == 1
        living.send("match", {"call": 1}, pack_keys(KEYS[:1]))
        assert living.hear("reply")


def test_a_node_closes_with_a_broken_model_that_a_client_still_touches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stepped(tmp_path, monkeypatch) as node:
        client = node.client()
        client.begin_save(KEYS[0], 1)
        (room,) = node.service._rooms
        abandoned: list[float] = []
        right = room.abandon
        monkeypatch.setattr(room, "abandon", lambda s: bool(abandoned.append(s)) or right(s))
        node.service._break(room)
        node.step()
        assert node.service.close()
        assert len(abandoned) == 1


def test_a_node_without_free_files_waits_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with stepped(tmp_path, monkeypatch) as node:
        late = connect(node.path)
        gc.collect()  # a file that is freed later would be a file to spare
        unused = os.dup(0)
        os.close(unused)
        resource.setrlimit(resource.RLIMIT_NOFILE, (unused, hard))
        try:
            with caplog.at_level(logging.WARNING):
                for _ in range(3):
                    node.step()
                    assert node.service._selector.select(0) == [], "the loop would spin"
                    node.service._guests.accept_again(float("inf"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        (record,) = caplog.records
        assert "ulimit" in record.message
        node.service._guests.accept_again(float("inf"))
        late.send("hello", {"protocol": VERSION})
        late.flush()
        node.step()
        node.step()
        assert late.receive()
        late.close()


def test_memory_that_is_sent_late_is_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client does not read, so its socket is full when it attaches."""
    with stepped(tmp_path, monkeypatch) as node:
        channel = connect(node.path)
        spec = namespace("tiny").block_spec(BLOCK_BYTES)
        values = BlockValues((PartValues(BLOCK_BYTES),))
        while not any(guest.is_blocked for guest in node.service._guests._guests.values()):
            for _ in range(100):
                channel.send("describe", {"protocol": VERSION})
            channel.flush()
            node.step()
        send_attach(channel, spec, values, name="raw", in_one=False, events=False)
        for _ in range(100):
            channel.flush()
            node.step()
            if node.clients():
                break
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]  # take closed numbers
        for _ in range(10_000):
            node.step()
            found = [frame for frame in channel.receive() if frame.kind == "attached"]
            if found:
                break
        place = read_place(channel, found[0])
        assert os.fstat(place.file).st_ino == os.fstat(node.service._memory.file).st_ino
        (room,) = node.service._rooms
        assert os.fstat(place.seals_file).st_ino == os.fstat(room.seals_file).st_ino
        for file in (place.file, place.seals_file, *others):
            os.close(file)
        channel.close()
