"""Mooncake, with a real master; peers that lend memory are processes of their own."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from client_contract import BODY_BYTES, ClientContract, item, items

from penstock.errors import ConfigError, Corrupt, Full, Missing, StoreError
from penstock.stores.envelope import HEAD_BYTES
from penstock.stores.mooncake import MooncakeClient
from penstock.stores.mooncake_memory import Cargo, address_of
from penstock.stores.remote import Item
from servers import is_skipped, pause
from servers.mooncake_master import MooncakeMaster, why_not

TIMEOUT_SECONDS = 4.0
PATIENCE_SECONDS = 30.0
HANGING_SECONDS = 45.0  # the library itself would wait for 60

# Lends memory, puts one value, and stays until its standard input ends.
_PEER = """
import sys
import threading
from penstock.stores.mooncake import MooncakeClient
from penstock.stores.remote import Item

url, name, size = sys.argv[1:]
client = MooncakeClient(url, timeout_seconds=20)
value = [Item(name, memoryview(bytearray(b"h" * 192)), memoryview(b"b" * int(size)))]
print(client.put(value, None), flush=True)
sys.stdin.read()
client.close()
"""


class Peer:
    def __init__(self, master: MooncakeMaster, name: str, segment: str = "64MiB") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PEER, master.url(segment=segment), name, str(BODY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"[None]\n"

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """Of all tests that do it no harm."""
    if is_skipped(why_not()):
        pytest.skip(str(why_not()))
    running = MooncakeMaster(tmp_path_factory.mktemp("mooncake"))
    yield running
    running.kill()


@pytest.fixture(scope="module")
def lent(master: MooncakeMaster) -> Iterator[MooncakeMaster]:
    peer = Peer(master, "penstock/1/peer/a")
    yield master
    peer.end()


@pytest.fixture
def own_master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    if is_skipped(why_not()):
        pytest.skip(str(why_not()))
    own = MooncakeMaster(tmp_path / "master", running=False)
    yield own
    own.kill()


@pytest.fixture
def connect() -> Iterator[Callable[[str], MooncakeClient]]:
    opened: list[MooncakeClient] = []

    def make(url: str) -> MooncakeClient:
        opened.append(MooncakeClient(url, timeout_seconds=TIMEOUT_SECONDS))
        return opened[-1]

    yield make
    for client in opened:
        client.close()


class SomeArena:
    def __init__(self, num_slots: int) -> None:
        self.block_bytes = BODY_BYTES
        self.stride_bytes = -(-BODY_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self.num_slots = num_slots
        self._memory = memoryview(mmap.mmap(-1, num_slots * self.stride_bytes))
        self.address = address_of(self._memory)

    def view(self, slot: int) -> memoryview:
        return self._memory[slot * self.stride_bytes : (slot + 1) * self.stride_bytes]

    def item(self, name: str, slot: int, body: bytes = b"") -> Item:
        place = self.view(slot)[:BODY_BYTES]
        place[: len(body)] = body
        head = os.urandom(HEAD_BYTES) if body else bytes(HEAD_BYTES)
        return Item(name, memoryview(bytearray(head)), place)


class TestMooncake(ClientContract):
    @pytest.fixture
    def client(
        self, lent: MooncakeMaster, connect: Callable[[str], MooncakeClient]
    ) -> MooncakeClient:
        return connect(lent.url())


def test_memory_that_it_lends_itself_serves_as_well(
    own_master: MooncakeMaster, connect: Callable[[str], MooncakeClient]
) -> None:
    """The library copies within the process, without a network."""
    own_master.start()
    client = connect(own_master.url(segment="16MiB"))
    put = items(["a", "b"])
    assert client.put([*put, item("longer", os.urandom(BODY_BYTES + 1))], None) == [None] * 3
    got = [item("a"), item("longer"), item("b")]
    assert [type(answer) for answer in client.get(got)] == [type(None), Corrupt, type(None)]
    assert [bytes(got[0].body), bytes(got[2].body)] == [bytes(i.body) for i in put]


def test_one_reads_what_another_process_put(
    lent: MooncakeMaster, connect: Callable[[str], MooncakeClient]
) -> None:
    got = item("penstock/1/peer/a")
    assert connect(lent.url()).get([got]) == [None]
    assert bytes(got.head) == b"h" * HEAD_BYTES
    assert bytes(got.body) == b"b" * BODY_BYTES


@pytest.mark.parametrize("before", [True, False])
def test_bodies_in_registered_memory_and_outside(
    lent: MooncakeMaster, connect: Callable[[str], MooncakeClient], before: bool
) -> None:
    """Whether the arena is known before the first call, or after it."""
    client, arena, prefix = connect(lent.url()), SomeArena(6), os.urandom(8).hex()
    if not before:
        client.exists(["penstock/1/peer/a"])
    client.register(arena)
    put = [arena.item(f"{prefix}/{slot}", slot, os.urandom(BODY_BYTES)) for slot in range(3)]
    put += items([f"{prefix}/outside"])
    put.append(Item(f"{prefix}/bytes", put[-1].head, memoryview(bytes(put[-1].body))))
    assert client.put(put, None) == [None] * 5
    for _ in range(2):  # of which the first meets the peer
        got = [arena.item(f"{prefix}/{slot}", slot + 3) for slot in range(3)]
        got += [item(f"{prefix}/outside"), item(f"{prefix}/bytes")]
        assert client.get(got) == [None] * 5
        assert [bytes(i.body) for i in got] == [bytes(i.body) for i in put]
        assert [bytes(i.head) for i in got] == [bytes(i.head) for i in put]
        for slot in range(3, 6):
            assert bytes(arena.view(slot)[BODY_BYTES:]) == bytes(arena.stride_bytes - BODY_BYTES)
            arena.view(slot)[:] = bytes(arena.stride_bytes)


def test_a_value_that_was_just_read_can_be_replaced_and_removed(
    lent: MooncakeMaster, connect: Callable[[str], MooncakeClient]
) -> None:
    """Reading leases it for seconds."""
    client, name = connect(lent.url()), os.urandom(8).hex()
    client.put(items([name]), None)
    assert client.get([item(name)]) == [None]
    newer, got = items([name]), item(name)
    assert client.put(newer, None) == [None]
    assert client.get([got]) == [None]
    assert bytes(got.body) == bytes(newer[0].body)
    client.remove([name])
    assert client.exists([name]) == [False]


def test_a_name_twice_in_a_batch_fills_both(
    lent: MooncakeMaster, connect: Callable[[str], MooncakeClient]
) -> None:
    client, name = connect(lent.url()), os.urandom(8).hex()
    put = items([name])
    client.put(put, None)
    got = [item(name), item(name)]
    assert client.get(got) == [None, None]
    assert {bytes(i.body) for i in got} == {bytes(put[0].body)}


def test_where_nobody_lends_memory_there_is_no_room(
    own_master: MooncakeMaster, connect: Callable[[str], MooncakeClient]
) -> None:
    own_master.start()
    (answer,) = connect(own_master.url()).put(items(["a"]), None)
    assert isinstance(answer, Full)
    assert "segment=" in str(answer)


def test_what_does_not_fit_is_full_and_what_fits_is_kept(
    own_master: MooncakeMaster, connect: Callable[[str], MooncakeClient]
) -> None:
    own_master.start()
    client = connect(own_master.url(segment="16MiB"))
    answers = client.put(items([f"big/{i}" for i in range(100)]), None)
    assert {type(answer) for answer in answers} == {type(None), Full}


def test_a_master_that_is_not_there_is_tried_again(
    own_master: MooncakeMaster, connect: Callable[[str], MooncakeClient]
) -> None:
    client = connect(own_master.url(segment="16MiB"))
    start = time.monotonic()
    (answer,) = client.put(items(["a"]), None)
    assert isinstance(answer, StoreError)
    with pytest.raises(StoreError):
        client.exists(["a"])
    with pytest.raises(StoreError):
        list(client.find("a"))
    assert time.monotonic() - start < HANGING_SECONDS
    own_master.start()
    _put_at_last(client, "a")


@pytest.mark.parametrize("hurt", [MooncakeMaster.kill, MooncakeMaster.pause])
def test_a_master_that_goes_is_an_error_and_comes_back(
    own_master: MooncakeMaster,
    connect: Callable[[str], MooncakeClient],
    hurt: Callable[[MooncakeMaster], None],
) -> None:
    own_master.start()
    client = connect(own_master.url(segment="16MiB"))
    assert client.put(items(["a"]), None) == [None]
    hurt(own_master)
    start = time.monotonic()
    for answers in (client.get([item("a")]), client.put(items(["b"]), None)):
        assert type(answers[0]) is StoreError
    for call in (client.exists, client.remove):
        with pytest.raises(StoreError):
            call(["a"])
    assert time.monotonic() - start < HANGING_SECONDS
    if hurt is MooncakeMaster.pause:
        own_master.resume()
    else:
        own_master.start()
    _put_at_last(client, "c")
    got = item("c")
    assert client.get([got]) == [None]


def test_a_hung_master_at_the_start_does_not_stop_the_process(
    own_master: MooncakeMaster, connect: Callable[[str], MooncakeClient]
) -> None:
    own_master.start()
    own_master.pause()
    client = connect(own_master.url())
    start = time.monotonic()
    assert type(client.get([item("a")])[0]) is StoreError
    assert time.monotonic() - start < HANGING_SECONDS
    own_master.resume()
    end = time.monotonic() + PATIENCE_SECONDS
    while type(client.get([item("a")])[0]) is not Missing:
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.parametrize("known", [True, False])
def test_a_peer_that_hangs_is_an_error_in_time(
    own_master: MooncakeMaster, connect: Callable[[str], MooncakeClient], known: bool
) -> None:
    own_master.start()
    peer = Peer(own_master, "a")
    try:
        client, got = connect(own_master.url()), item("a")
        if known:
            assert client.get([got]) == [None]
        else:
            assert client.exists(["a"]) == [True]
        pause(peer.process)
        start = time.monotonic()
        assert type(client.get([got])[0]) is StoreError
        assert type(client.put(items(["b"]), None)[0]) is StoreError
        assert time.monotonic() - start < HANGING_SECONDS
        peer.process.send_signal(signal.SIGCONT)
        end = time.monotonic() + PATIENCE_SECONDS
        while client.get([got]) != [None]:
            assert time.monotonic() < end
            time.sleep(0.2)
        assert bytes(got.body) == b"b" * BODY_BYTES
    finally:
        peer.end()


def test_a_closed_client_refuses(
    lent: MooncakeMaster, connect: Callable[[str], MooncakeClient]
) -> None:
    client = connect(lent.url())
    client.exists(["a"])
    client.close()
    client.close()
    assert type(client.get([item("a")])[0]) is StoreError
    with pytest.raises(StoreError):
        client.exists(["a"])


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://",
        "redis://host:50051",
        "mooncake://host:no",
        "mooncake://host:50051/path",
        "mooncake://user:password@host:50051",
        "mooncake://host:50051?segments=4GiB",
        "mooncake://host:50051?segment=4G",
        "mooncake://host:50051?segment",
        "mooncake://host:50051?segment=1MiB",
        "mooncake://host:50051?protocol=pigeon",
        "mooncake://host:50051?metrics=many",
    ],
)
def test_a_url_that_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        MooncakeClient(url, timeout_seconds=1)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[mooncake\]'"):
        MooncakeClient("mooncake://host:50051", timeout_seconds=1)


def test_a_shared_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr("penstock.stores.mooncake_library.importlib.import_module", fail)
    with pytest.raises(ConfigError, match=r"libibverbs\.so\.1.*apt-get install libibverbs1"):
        MooncakeClient("mooncake://host:50051", timeout_seconds=1)


class _Lister(BaseHTTPRequestHandler):
    reply: ClassVar[tuple[int, bytes]]

    def do_GET(self) -> None:
        status, body = self.reply
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("reply", "why"),
    [((500, b""), "HTTP status 500"), ((302, b""), "HTTP status 302"), ((200, b"\xff"), "decode")],
)
def test_a_list_of_names_that_cannot_be_had_is_an_error(reply: tuple[int, bytes], why: str) -> None:
    handler = type("_Handler", (_Lister,), {"reply": reply})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"mooncake://127.0.0.1:50051?metrics={server.server_port}"
        try:
            with pytest.raises(StoreError, match=rf"names cannot be listed \(.*{why}.*metrics="):
                list(MooncakeClient(url, timeout_seconds=PATIENCE_SECONDS).find("x"))
        finally:
            server.shutdown()


def test_a_list_of_names_that_never_comes_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        url = f"mooncake://127.0.0.1:50051?metrics={port}"
        with pytest.raises(StoreError, match=rf"cannot be listed \(timed out\).*127.0.0.1:{port}"):
            list(MooncakeClient(url, timeout_seconds=0.2).find("x"))
    for gone in (port, 70000):
        url = f"mooncake://[::1]:50051?metrics={gone}"
        with pytest.raises(StoreError, match="names cannot be listed"):
            list(MooncakeClient(url, timeout_seconds=1).find("x"))


def _put_at_last(client: MooncakeClient, name: str) -> None:
    """The library mounts its memory again within seconds of the master's return."""
    end = time.monotonic() + PATIENCE_SECONDS
    while client.put(items([name]), None) != [None]:
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_block_with_its_head_behind_it_crosses_in_one_piece() -> None:
    body_bytes, memory = 5000, memoryview(bytearray(2 * (5000 + 192)))
    start = address_of(memory)

    def address(part: memoryview) -> int:
        inside = start <= (place := address_of(part)) < start + len(memory)
        return place if inside else 0

    def item(number: int) -> Item:
        slot = memory[number * (body_bytes + 192) :][: body_bytes + 192]
        return Item(f"{number}", slot[body_bytes:], slot[:body_bytes])

    alone = Item("alone", memoryview(bytearray(192)), memoryview(bytearray(b"b" * body_bytes)))
    apart = Item("apart", memoryview(bytearray(b"h" * 192)), memory[:body_bytes])
    taken: list[memoryview] = []

    def take(num_bytes: int) -> memoryview:
        taken.append(memoryview(bytearray(num_bytes)))
        return taken[-1]

    cargo = Cargo([item(0), item(1), alone, apart], address, take)
    assert cargo.sizes == [[5192], [5192], [5192], [5000, 192]]
    assert cargo.addresses[:2] == [[start], [start + 5192]]
    assert len(taken[0]) == 5192 + 192, "what lies elsewhere is copied"
    cargo.load()
    assert taken[0][:5000] == b"b" * 5000
    assert taken[0][5192:] == b"h" * 192
