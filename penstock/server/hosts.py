"""Which Host headers the server accepts: the guard against DNS rebinding.

A malicious page can make its own domain name resolve to this server. The browser then treats the
server as the page's own, sends requests and lets the page read the responses. But the page cannot
choose the Host header, which is its domain name. So only these names are accepted:

* the names and addresses of loopback
* the names that the operator has allowed (`--allowed-host`)
* if the server listens beyond loopback: any IP address (a page's name is not an address), this
  machine's own names, and names that cannot exist on the web: single words, as containers use, and
  names below .local, .internal and .svc, as clusters use

A request with the API key is accepted under any name, because a malicious page does not have the
key. For requests that change something, the Origin header is checked in the same way: a page can
send those without reading the response. X-Forwarded-Host is ignored: any client can set it.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import ConfigError
from penstock.server.errors import ApiError

ANY = "*"
_MAX_NAME_CHARS = 253
_PRIVATE_NAME = re.compile(r"[a-z0-9_-]+|[a-z0-9_.-]+\.(local|internal|svc)")
_READS_ONLY = ("GET", "HEAD", "OPTIONS")


class Hosts:
    """The names that are accepted. Without arguments: only those of loopback."""

    def __init__(self, allowed: Iterable[str] = (), *, beyond_loopback: bool = False) -> None:
        """Raises ConfigError for an invalid name."""
        names = {check_name(name) for name in allowed}
        if beyond_loopback:
            names |= {own.lower() for own in (socket.gethostname(), socket.getfqdn()) if own}
        self._allows_any = ANY in names
        self._names = {name for name in names if not name.startswith(".")}
        self._domains = tuple(name for name in names if name.startswith("."))
        self._beyond_loopback = beyond_loopback

    def knows(self, host: str) -> bool:
        """Whether a Host header, with or without a port, names this server."""
        if self._allows_any:
            return True
        name = _without_port(host)
        if name is None:
            return False
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            is_loopback = name == "localhost" or name.endswith(".localhost")
            is_private = self._beyond_loopback and _PRIVATE_NAME.fullmatch(name) is not None
            is_allowed = name in self._names or name.endswith(self._domains)
            return is_loopback or is_private or is_allowed
        mapped = getattr(address, "ipv4_mapped", None)
        address = mapped or address
        return address.is_loopback or self._beyond_loopback or name in self._names


def check_name(name: str) -> str:
    """The name in lower case. `.example.com` means all names below it. Raises ConfigError."""
    plain = name.strip().lower()
    bare = plain.removeprefix(".")
    parsed = plain if plain == ANY else _without_port(bare)
    if parsed is None or (plain != ANY and ("/" in bare or parsed != bare.strip("[]").rstrip("."))):
        raise ConfigError(
            f"--allowed-host is {name[:80]!r}: expected a host name or address without scheme "
            "and port, .example.com for all names below it, or * for any; correct it."
        )
    return f".{parsed}" if plain.startswith(".") else parsed


def listens_on_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def has_key(headers: Headers, api_key: str) -> bool:
    """Whether the request has the key in its Authorization header, as OpenAI's clients send it."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    is_right = hmac.compare_digest(given.strip().encode("latin-1"), api_key.encode())
    return scheme.lower() == "bearer" and is_right


class HostCheck:
    """Middleware that refuses requests whose Host or Origin is not accepted."""

    def __init__(self, app: ASGIApp, hosts: Hosts, api_key: str | None) -> None:
        self._app = app
        self._hosts = hosts
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refusal(scope["method"], Headers(scope=scope))
            if refusal is not None:
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> ApiError | None:
        # Every browser sends one Host header. All of several must be accepted.
        strange = next((h for h in headers.getlist("host") if not self._hosts.knows(h)), None)
        what = "Host"
        if strange is None and method not in _READS_ONLY:
            origins = headers.getlist("origin")
            strange = next((o for o in origins if not self._is_ours(o, headers)), None)
            what = "Origin"
        if strange is None or (self._api_key is not None and has_key(headers, self._api_key)):
            return None
        return ApiError(
            403,
            f"the {what} header is {strange[:80]!r}: expected a name of this server (this "
            "protects it from web pages of other sites); start it with --allowed-host NAME to "
            "allow a name, or send the API key if it has one.",
            code="host_not_allowed",
        )

    def _is_ours(self, origin: str, headers: Headers) -> bool:
        """Apps and extensions have other schemes than web pages; `null` is a page."""
        scheme, separator, host = origin.partition("://")
        if not separator:
            return False
        if scheme.lower() not in ("http", "https"):
            return True
        return host in headers.getlist("host") or self._hosts.knows(host)


def _without_port(host: str) -> str | None:
    """The name in a Host header, in lower case; None if it is invalid."""
    if not host or len(host) > _MAX_NAME_CHARS + len("[]:65535"):
        return None
    try:
        parts = urlsplit(f"//{host}")
        name, _ = parts.hostname, parts.port
    except ValueError:
        return None
    if name is None or parts.netloc != host or "@" in host:
        return None
    return name.rstrip(".") or None
