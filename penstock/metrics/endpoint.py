"""/metrics and /health over HTTP, with the standard library alone."""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from penstock.errors import ConfigError

_TEXT = "text/plain; charset=utf-8"
_MAX_SECONDS = 10.0  # for a client to send its request, and to read the answer


class MetricsEndpoint:
    """Answers GET and HEAD on threads of its own until `close`."""

    def __init__(
        self,
        host: str,
        port: int,
        expose: Callable[[], bytes],
        content_type: str,
        problem: Callable[[], str | None],
    ) -> None:
        """`problem` says why the process is not healthy; None if it is. Raises ConfigError."""

        class Answer(_Answer):
            pass

        Answer.pages = {
            "/metrics": lambda: (200, content_type, expose()),
            "/health": lambda: _health(problem()),
        }
        self._server = _listen(host, port, Answer)
        address, bound = self._server.server_address[:2]
        name = str(address)
        Answer.is_local = ipaddress.ip_address(name.partition("%")[0]).is_loopback
        self.is_local = Answer.is_local
        self.url = f"http://[{name}]:{bound}" if ":" in name else f"http://{name}:{bound}"
        threading.Thread(
            target=self._server.serve_forever, name="penstock-metrics", daemon=True
        ).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Answer(BaseHTTPRequestHandler):
    pages: dict[str, Callable[[], tuple[int, str, bytes]]]
    is_local: bool
    timeout = _MAX_SECONDS
    server_version = "penstock"
    sys_version = ""

    def do_GET(self) -> None:
        status, kind, body = self._page()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Scrapes are not worth a line."""

    def _page(self) -> tuple[int, str, bytes]:
        # A web page of another site can make its name resolve to loopback, but not choose the Host
        # header. See `penstock.server.hosts`.
        if self.is_local and not _names_loopback(self.headers.get("Host", "localhost")):
            return 403, _TEXT, b"the Host header does not name this machine's loopback\n"
        page = self.pages.get(self.path.partition("?")[0])
        if page is None:
            return 404, _TEXT, b"there are /metrics and /health here\n"
        return page()


class _Server(ThreadingHTTPServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


def _health(problem: str | None) -> tuple[int, str, bytes]:
    return (200, _TEXT, b"ok\n") if problem is None else (503, _TEXT, f"{problem}\n".encode())


def _listen(host: str, port: int, answer: type[_Answer]) -> _Server:
    advice = "choose another with --metrics-host and --metrics-port."
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        server = _Server6 if family == socket.AF_INET6 else _Server
        return server((str(address[0]), port), answer)
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r} has no address ({error.strerror}); {advice}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "another process listens there; stop it"
            advice = f"or {advice}"
        raise ConfigError(f"cannot listen on port {port} of {host}: {reason}, {advice}") from None


def _names_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
