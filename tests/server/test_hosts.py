"""Names under which a server may be asked: no page of a stranger's reaches it through a browser."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from server.running import Local
from starlette.responses import PlainTextResponse

from penstock.errors import ConfigError
from penstock.server.app import AppSettings
from penstock.server.hosts import HostCheck, Hosts, listens_on_loopback

EVERYWHERE = [
    ("GET", "/"),
    ("GET", "/metrics"),
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("GET", "/v1/penstock/state"),
    ("GET", "/v1/penstock/live"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("OPTIONS", "/v1/completions"),
]


@pytest.mark.parametrize(("method", "path"), EVERYWHERE)
def test_a_page_whose_name_leads_here_is_refused(server: Local, method: str, path: str) -> None:
    forwarded = {"X-Forwarded-Host": "localhost", "Forwarded": "host=localhost"}
    with server.client() as client:
        answer = client.request(
            method, path, headers={"Host": "evil.example:8000", **forwarded}, content=b""
        )
        assert answer.status_code == 403
        error = answer.json()["error"]
        assert error["code"] == "host_not_allowed"
        assert "--allowed-host" in error["message"]
        assert "evil.example" in error["message"]
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("localhost.:1", True),
        ("api.localhost", True),
        ("127.0.0.1", True),
        ("127.8.9.10:80", True),
        ("[::1]:8000", True),
        ("[::ffff:127.0.0.1]", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("evillocalhost", False),
        ("127.0.0.1.evil.example", False),
        ("127.0.0.1@evil.example", False),
        ("evil.example#localhost", False),
        ("evil.example/localhost", False),
        ("localhost/evil", False),
        ("localhost:x", False),
        ("0.0.0.0", False),
        ("192.168.0.7", False),
        ("[fe80::1]", False),
        ("[", False),
        ("", False),
        ("x" * 1000, False),
    ],
)
def test_names_of_loopback(host: str, is_known: bool) -> None:
    assert Hosts().knows(host) is is_known


def test_names_that_are_allowed() -> None:
    hosts = Hosts(["LLM.example.com", ".corp.example", "10.0.0.7", "[fd00::1]"])
    for host in ("llm.example.com:443", "a.b.corp.example", "10.0.0.7:80", "[fd00::1]:80"):
        assert hosts.knows(host), host
    for host in ("corp.example", "evilcorp.example", "x.llm.example.com", "10.0.0.8"):
        assert not hosts.knows(host), host
    assert Hosts(["*"]).knows("whatever")
    for wrong in ("http://a", "a/b", "a:80", "", "a b/", "*.example.com/x"):
        with pytest.raises(ConfigError, match="--allowed-host"):
            Hosts([wrong])


def test_beyond_loopback_addresses_and_the_machines_own_name_are_known() -> None:
    hosts = Hosts(beyond_loopback=True)
    for host in ("192.168.0.7:8000", "[fd00::1]", "localhost", f"{socket.gethostname()}:80"):
        assert hosts.knows(host), host
    # As containers, clusters and their Prometheus ask: nobody can have these on the web.
    for host in (
        "penstock:8000",
        "llm.default.svc",
        "llm.default.svc.cluster.local:80",
        "a.internal",
    ):
        assert hosts.knows(host), host
        assert not Hosts().knows(host), host
    for host in ("evil.example", "local.evil.example", "evil.xlocal", "penstock.evil", ".", "a b"):
        assert not hosts.knows(host), host
    for address, is_loopback in (("127.0.0.1", True), ("0.0.0.0", False)):
        with socket.socket() as listener:
            listener.bind((address, 0))
            assert listens_on_loopback(listener) is is_loopback


def _ask(check: HostCheck, method: str, **headers: str) -> int:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": method,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(check(scope, receive, send))  # type: ignore[arg-type]
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("http://127.0.0.1:8000", 200),
        ("https://evil.example", 403),
        ("null", 403),
        ("vscode-webview://abc", 200),
    ],
)
def test_who_sends_from_a_page_names_it(origin: str, status: int) -> None:
    check = HostCheck(PlainTextResponse("in"), Hosts(), None)
    assert _ask(check, "POST", host="localhost:8000", origin=origin) == status
    assert _ask(check, "GET", host="localhost:8000", origin=origin) == 200  # nothing changes
    assert _ask(check, "POST", host="localhost:8000") == 200
    keyed = HostCheck(PlainTextResponse("in"), Hosts(), "key")
    given = {"host": "localhost", "origin": origin, "authorization": "Bearer key"}
    assert _ask(keyed, "POST", **given) == 200


def test_who_has_the_key_asks_under_any_name(local: Callable[..., Local]) -> None:
    server = local(settings=AppSettings(api_key="s3cret", allowed_hosts=("known.example",)))
    strange = {"Host": "strange.example"}
    with server.client() as client:
        for key, status in (("s3cret", 200), ("wrong", 403)):
            headers = {**strange, "Authorization": f"Bearer {key}"}
            assert client.get("/v1/models", headers=headers).status_code == status
            assert client.get("/metrics", headers=headers).status_code == status
        known = {"Host": "known.example"}
        assert client.get("/v1/models", headers=known).status_code == 401
        assert client.get("/metrics", headers=known).status_code == 200
