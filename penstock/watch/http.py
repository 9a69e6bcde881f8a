"""HTTP requests to another server: no proxies, no redirects, and no credentials from its URL.

httpx is imported on first use, because the core must import without it.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from penstock.config.urls import shown_value
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    import httpx


class RequestFailed(PenstockError):
    """There was no response, or it broke off. The message is the reason, in a few words."""

    def __init__(self, reason: str, *, is_timeout: bool = False) -> None:
        super().__init__(reason)
        self.is_timeout = is_timeout


def parse_url(url: str) -> SplitResult:
    """The URL without user and password. Raises ConfigError unless it is an http(s) URL."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or not url.isprintable() or " " in url:
        raise ConfigError(
            f"the URL is {shown_value(url)}: expected one such as http://127.0.0.1:8000; correct it"
        )
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="")


@contextmanager
def request(
    method: str,
    url: SplitResult,
    *,
    timeout_seconds: float,
    api_key: str | None = None,
    body: object = None,
) -> Iterator[httpx.Response]:
    """Send a request, with `body` as JSON; read the response inside the `with` block.

    The timeout holds for connecting and for each read. Raises RequestFailed, also from the block
    if the connection breaks while it reads.
    """
    import httpx

    # Leaving the block early closes the connection, so that the server stops generating.
    headers = {"Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        with (
            httpx.Client(trust_env=False, verify=_tls(), timeout=timeout_seconds) as client,
            client.stream(
                method,
                url.geturl(),
                headers=httpx.Headers(headers, encoding="utf-8"),
                content=None if body is None else json.dumps(body).encode(),
            ) as response,
        ):
            yield response
    except httpx.TimeoutException:
        raise RequestFailed("timed out", is_timeout=True) from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # Unicode: key or host name
        raise RequestFailed(_reason(error)) from None


def read_body(response: httpx.Response, max_bytes: int) -> bytes:
    """The body as it was sent. If it is longer than `max_bytes`, it is cut somewhere after that."""
    body = bytearray()
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > max_bytes:
            break
    return bytes(body)


def read_lines(response: httpx.Response) -> Iterator[bytes]:
    """The lines of the body as they arrive.

    Not `Response.iter_lines`: it also splits at U+2028 and its like, which JSON may contain.
    """
    pending: list[bytes] = []  # joined once per line, however many pieces it arrives in
    for chunk in response.iter_raw():
        first, *others = chunk.split(b"\n")
        pending.append(first)
        for other in others:
            yield b"".join(pending)
            pending = [other]
    if rest := b"".join(pending):
        yield rest


@cache
def _tls() -> ssl.SSLContext:
    """The system's certificates; httpx alone would take certifi's."""
    return ssl.create_default_context()


def _reason(error: BaseException) -> str:
    """The operating system's words for it if there are any, else the type of the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__
