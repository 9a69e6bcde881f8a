"""The HTTP client that `advise`, `top`, `dashboard` and `chat` share, against a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from penstock.errors import ConfigError
from penstock.watch.http import RequestFailed, parse_url, read_body, read_lines, request


class Answering(BaseHTTPRequestHandler):
    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        body = {"/lines": 'data: {"text": "a\u2028b"}\n\nlast'.encode()}.get(self.path, b"x" * 1000)
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("Location", "/lines")
        self.send_header("Content-Length", str(len(body) + (self.path == "/short")))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    Answering.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_lines_end_at_line_feeds_only(address: str) -> None:
    with request("GET", parse_url(f"http://{address}/lines"), timeout_seconds=9) as response:
        assert list(read_lines(response)) == [
            'data: {"text": "a\u2028b"}'.encode(),
            b"",
            b"last",
        ]


def test_bodies_are_bounded(address: str) -> None:
    with request("GET", parse_url(f"http://{address}"), timeout_seconds=9) as response:
        assert len(read_body(response, 1000)) == 1000
    with request("GET", parse_url(f"http://{address}"), timeout_seconds=9) as response:
        assert len(read_body(response, 999)) > 999


def test_a_body_that_ends_early(address: str) -> None:
    url = parse_url(f"http://{address}/short")
    with (
        pytest.raises(RequestFailed, match="RemoteProtocolError"),
        request("GET", url, timeout_seconds=9) as response,
    ):
        read_body(response, 10_000)


def test_redirects_are_not_followed(address: str) -> None:
    with request("GET", parse_url(f"http://{address}/moved"), timeout_seconds=9) as response:
        assert response.status_code == 302
    assert [path for path, _ in Answering.asked] == ["/moved"]


def test_proxies_and_passwords_are_not_used(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for key, sent in ((None, None), ("key", "Bearer key")):
        url = parse_url(f"http://user:secret@{address}/")
        with request("GET", url, timeout_seconds=9, api_key=key) as response:
            assert response.status_code == 200
        assert Answering.asked.pop() == ("/", sent)


def test_reasons_are_the_systems_own_words() -> None:
    url = parse_url("http://127.0.0.1:1")
    with (
        pytest.raises(RequestFailed, match=r"^Connection refused$"),
        request("GET", url, timeout_seconds=9),
    ):
        pass
    with (
        pytest.raises(RequestFailed, match=r"^UnicodeEncodeError$"),
        request("GET", url, timeout_seconds=9, api_key="\udcff"),
    ):
        pass


@pytest.mark.parametrize("host", ["a..b", "xn--a", "a" * 70, "999.1.1.1", "[v1.x]"])
def test_hosts_that_cannot_be_are_failed_requests(host: str) -> None:
    """Some of them are refused by httpx, others only when the name is looked up."""
    with (
        pytest.raises(RequestFailed),
        request("GET", parse_url(f"http://{host}:1"), timeout_seconds=9),
    ):
        pass


@pytest.mark.parametrize(
    "url", ["", "host", "ftp://host", "http://host:0", "http://a b", "http://a\n"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="the URL is"):
        parse_url(url)
