"""The Redis client against a real redis-server: plain, with a password, TLS, full, clustered."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_contract import ClientContract, item, items

from penstock.errors import ConfigError, Full, Missing, StoreError
from penstock.stores.redis import RedisClient
from servers import free_port, is_skipped
from servers.redis_server import WHY_NOT, RedisServer

needs_redis = pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))
TIMEOUT_SECONDS = 2.0


_opened: list[RedisClient] = []


def connect(url: str, timeout_seconds: float = 20.0) -> RedisClient:
    _opened.append(RedisClient(url, timeout_seconds=timeout_seconds))
    return _opened[-1]


@pytest.fixture(autouse=True)
def _close_clients() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """For tests that kill it."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@needs_redis
class TestPlain(ClientContract):
    @pytest.fixture
    def client(self, server: RedisServer) -> Iterator[RedisClient]:
        client = connect(server.url)
        yield client
        client.close()


@needs_redis
class TestPassword(ClientContract):
    @pytest.fixture
    def client(self, tmp_path: Path) -> Iterator[RedisClient]:
        server = RedisServer(tmp_path, "--requirepass", "p@ss:word/")
        client = connect(f"valkey://:p%40ss%3Aword%2F@127.0.0.1:{server.port}/0")
        yield client
        client.close()
        server.kill()


@needs_redis
class TestSocket(ClientContract):
    @pytest.fixture
    def client(self, tmp_path: Path) -> Iterator[RedisClient]:
        server = RedisServer(tmp_path, "--unixsocket", str(tmp_path / "r.sock"))
        client = connect(f"unix://{tmp_path}/r.sock?db=1")
        yield client
        client.close()
        server.kill()


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    port = free_port()
    server = RedisServer(
        folder,
        *("--tls-port", str(port), "--port", "0", "--tls-auth-clients", "no"),
        *("--tls-cert-file", str(certificate), "--tls-key-file", str(key)),
        *("--tls-ca-cert-file", str(certificate)),
        port=port,
    )
    yield server
    server.kill()


@needs_redis
class TestTls(ClientContract):
    @pytest.fixture
    def client(self, tls_server: RedisServer) -> Iterator[RedisClient]:
        authority = tls_server.folder / "cert.pem"
        client = connect(f"rediss://127.0.0.1:{tls_server.port}/0?ssl_ca_certs={authority}")
        yield client
        client.close()


@needs_redis
def test_a_certificate_that_nobody_vouches_for_is_refused(tls_server: RedisServer) -> None:
    client = connect(f"rediss://127.0.0.1:{tls_server.port}/0")
    (answer,) = client.get([item("a")])
    assert type(answer) is StoreError
    assert "ertificate" in str(answer)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    folder = tmp_path_factory.mktemp("cluster")
    nodes: list[RedisServer] = []
    # The bus listens 10,000 ports higher; choose ports for which that is one, too.
    while len(nodes) < 3:
        port = free_port()
        if port + 10_000 < 65_536:
            nodes.append(
                RedisServer(folder / str(len(nodes)), "--cluster-enabled", "yes", port=port)
            )
    places = [f"127.0.0.1:{node.port}" for node in nodes]
    subprocess.run(
        ["redis-cli", "--cluster", "create", *places, "--cluster-yes"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    yield nodes
    for node in nodes:
        node.kill()


@needs_redis
class TestCluster(ClientContract):
    @pytest.fixture
    def client(self, cluster: list[RedisServer]) -> Iterator[RedisClient]:
        places = ",".join(f"127.0.0.1:{node.port}" for node in cluster)
        client = connect(f"redis+cluster://{places}")
        end = time.monotonic() + 20
        # On all nodes: each learns by itself that the cluster is complete.
        while any(client.put(items([f"is it up {i}" for i in range(60)], 10), None)):
            assert time.monotonic() < end
            time.sleep(0.1)
        yield client
        client.close()


@needs_redis
class TestSentinel(ClientContract):
    @pytest.fixture
    def client(self, server: RedisServer, tmp_path: Path) -> Iterator[RedisClient]:
        port = free_port()
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\nsentinel monitor kv 127.0.0.1 {server.port} 1\n"
        )
        with subprocess.Popen(
            ["redis-server", str(config), "--sentinel"], stdout=subprocess.DEVNULL
        ) as guard:
            end = time.monotonic() + 20
            while time.monotonic() < end:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            client = connect(f"redis+sentinel://127.0.0.1:{port}/kv/0")
            yield client
            client.close()
            guard.kill()


@needs_redis
def test_a_value_expires(server: RedisServer) -> None:
    client = connect(server.url)
    name = os.urandom(8).hex()
    client.put(items([name], 100), 1.0)
    assert client.exists([name]) == [True]
    end = time.monotonic() + 20
    while client.exists([name]) == [True]:
        assert time.monotonic() < end
        time.sleep(0.1)


@needs_redis
def test_a_key_evicted_between_lookup_and_load_is_missing(tmp_path: Path) -> None:
    """A peer blocks a worker for ever there."""
    server = RedisServer(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    client = connect(server.url)
    names = [str(number) for number in range(60)]
    put = items(names)
    assert client.put(put, None) == [None] * 60
    got = [item(name) for name in names]
    answers = client.get(got)
    assert {type(answer) for answer in answers} == {Missing, type(None)}
    for answer, one, other in zip(answers, put, got, strict=True):
        assert answer is not None or bytes(one.body) == bytes(other.body)
    server.kill()


@needs_redis
def test_a_server_without_room_says_so_and_goes_on_serving(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    client = connect(server.url)
    answers = client.put(items([str(number) for number in range(40)]), None)
    assert answers[0] is None
    assert isinstance(answers[-1], Full)
    assert client.get([item("0")]) == [None]
    server.kill()


@needs_redis
def test_a_server_whose_disk_takes_nothing_says_so(tmp_path: Path) -> None:
    """It keeps serving what it has, and takes no more until its disk does."""
    folder = tmp_path / "disk"
    server = RedisServer(folder, "--save", "1 1")
    client = connect(server.url)
    assert client.put(items(["a"]), None) == [None]
    shutil.rmtree(folder)
    end = time.monotonic() + 60
    while True:
        (answer,) = client.put(items([os.urandom(8).hex()]), None)
        if answer is not None:
            break
        assert time.monotonic() < end
        time.sleep(0.2)
    assert isinstance(answer, Full)
    assert client.get([item("a")]) == [None]
    server.kill()


@needs_redis
@pytest.mark.parametrize("login", ["", ":wrong@", "nobody:word@"])
def test_a_wrong_password_is_said(tmp_path: Path, login: str) -> None:
    server = RedisServer(tmp_path, "--requirepass", "word")
    client = connect(f"redis://{login}127.0.0.1:{server.port}")
    answers = client.get([item("a"), item("b")])
    assert [type(answer) for answer in answers] == [StoreError, StoreError]
    with pytest.raises(StoreError, match=r"NOAUTH|WRONGPASS|uthentication|nvalid"):
        client.exists(["a"])
    server.kill()


@needs_redis
def test_a_server_that_is_killed_and_comes_back_serves_again(own_server: RedisServer) -> None:
    client = connect(own_server.url, TIMEOUT_SECONDS)
    assert client.put(items(["a"]), None) == [None]
    own_server.kill()
    (answer,) = client.get([item("a")])
    assert type(answer) is StoreError
    with pytest.raises(StoreError):
        client.exists(["a"])
    own_server.start()
    assert client.exists(["a"]) == [False], "it forgot, and says so at the first question"
    assert client.put(items(["a"]), None) == [None]


@needs_redis
@pytest.mark.parametrize("moment", ["load", "save"])
def test_a_server_killed_in_the_middle_costs_its_blocks_alone(
    own_server: RedisServer, moment: str
) -> None:
    client = connect(own_server.url, TIMEOUT_SECONDS)
    names = [str(number) for number in range(64)]
    put = items(names, 2 << 20)
    client.put(put, None)
    killer = threading.Timer(0.02, own_server.kill)
    killer.start()
    if moment == "load":
        answers = client.get([item(name, num_bytes=2 << 20) for name in names])
    else:
        answers = client.put(put, None)
    killer.join()
    assert {type(answer) for answer in answers} <= {StoreError, type(None)}
    own_server.start()
    assert client.put(items(["after"]), None) == [None]


@needs_redis
def test_a_server_that_hangs_is_left_within_the_timeout(own_server: RedisServer) -> None:
    client = connect(own_server.url, 3.0)
    assert client.put(items(["a"]), None) == [None]
    own_server.pause()
    (answer,) = client.get([item("a")])
    assert type(answer) is StoreError
    own_server.resume()
    # The late reply is read by nobody: what is asked next gets its own answer.
    got = item("b")
    assert [type(answer) for answer in client.get([got])] == [Missing]


def test_a_port_that_accepts_and_never_answers() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = connect(f"redis://127.0.0.1:{silent.getsockname()[1]}", 0.3)
        (answer,) = client.get([item("a")])
        assert type(answer) is StoreError
        with pytest.raises(StoreError):
            client.exists(["a"])
        with pytest.raises(StoreError):
            list(client.find("a"))


def test_a_server_that_speaks_another_language() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def talk() -> None:
            for _ in range(8):
                try:
                    peer, _ = other.accept()
                except OSError:
                    return
                with peer:
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=talk, daemon=True).start()
        client = connect(f"redis://127.0.0.1:{other.getsockname()[1]}", 2.0)
        (answer,) = client.get([item("a")])
        assert type(answer) is StoreError


@pytest.mark.parametrize(
    "url",
    [
        "redis://host:notaport",
        "redis://host/0?socket_timeout=soon",
        "redis+sentinel://host:26379",
        "redis+sentinel://host:26379/service/none",
        "redis+cluster://",
        "redis+cluster://host:port",
    ],
)
def test_a_url_that_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        connect(url)
