"""A running server, asked over HTTP: its metrics, or what else it tells in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from penstock.config.urls import shown_value
from penstock.errors import ConfigError, PenstockError
from penstock.watch.samples import PREFIX, Samples, read_samples

_TIMEOUT_SECONDS = 10.0
_MAX_BYTES = 64 << 20


class NoMetrics(PenstockError):
    """The server could not be asked, or is not Penstock's."""


class BadStatus(NoMetrics):
    """The server answered with another status than 200."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def read_metrics(parts: SplitResult, prefixes: tuple[str, ...] = (PREFIX,)) -> Samples:
    """Raises NoMetrics where there are none, or none of Penstock's."""
    shown = shown_url(parts)
    text = fetch(parts)
    try:
        seen = read_samples(text, prefixes)
    except ConfigError as error:
        raise NoMetrics(f"{shown} has no metrics: {error}; check the URL") from None
    if not any(name.startswith(PREFIX) for name, _ in seen.values):
        is_vllm = "\nvllm:" in f"\n{text}"
        advice = (
            "this is vLLM without Penstock; start it with the --kv-transfer-config that "
            "`penstock vllm-config` prints"
            if is_vllm
            else "expected a `penstock serve`, or a vLLM that Penstock is part of; check the URL"
        )
        raise NoMetrics(f"{shown} has no metrics of Penstock: {advice}")
    return seen


def fetch(parts: SplitResult, headers: Mapping[str, str] | None = None) -> str:
    """What lies there. Raises NoMetrics, and NoAnswer for a status that says no."""
    shown = shown_url(parts)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_SECONDS)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request(
            "GET", path, headers={"Accept": "*/*", "Connection": "close", **(headers or {})}
        )
        response = connection.getresponse()
        body = response.read(_MAX_BYTES + 1)
    except TimeoutError:
        raise NoMetrics(
            f"{shown} did not answer within {_TIMEOUT_SECONDS:.0f} s: check the URL, and whether "
            "the server is overloaded"
        ) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise NoMetrics(
            f"{shown} does not answer ({reason}): expected a running server; check the URL, and "
            "that it is started"
        ) from None
    finally:
        connection.close()
    if response.status != 200:
        raise BadStatus(
            f"{shown} answers with {response.status}: expected its metrics; give the URL of the "
            "server, or that of its /metrics",
            response.status,
        )
    if len(body) > _MAX_BYTES:
        raise NoMetrics(f"{shown} answers with more than 64 MiB: expected metrics; check the URL")
    return body.decode("utf-8", errors="replace")


def metrics_url(url: str) -> SplitResult:
    """Where a server's metrics are, by its own URL or that of any of its paths."""
    whole = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parts = urlsplit(whole)
        is_right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or not whole.isprintable() or " " in whole:
        raise ConfigError(
            f"the URL is {shown_value(url)}: expected one such as http://127.0.0.1:8000; correct it"
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    if not path.endswith("/metrics"):
        path = f"{path}/metrics"
    host = parts.netloc.rpartition("@")[2]  # nobody's password is shown
    return parts._replace(path=path, netloc=host, fragment="")


def shown_url(parts: SplitResult) -> str:
    """For people to see. A query may hold a secret, and nobody needs it to find the server."""
    return parts._replace(query="").geturl()


def read_json(parts: SplitResult, path: str, api_key: str | None = None) -> Any:
    """What the server tells at another of its paths."""
    base = parts.path.removesuffix("/metrics")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    where = parts._replace(path=f"{base}{path}", query="")
    try:
        return json.loads(fetch(where, headers))
    except ValueError:
        raise NoMetrics(f"{shown_url(where)} is no JSON: expected a `penstock serve`") from None
