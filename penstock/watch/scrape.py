"""Reads a running server's metrics, or its JSON, over HTTP."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import SplitResult

from penstock.errors import ConfigError, PenstockError
from penstock.watch.http import RequestFailed, parse_url, read_body, request
from penstock.watch.samples import PREFIX, Samples, read_samples

_TIMEOUT_SECONDS = 10.0
_MAX_BYTES = 64 << 20


class NoMetrics(PenstockError):
    """The server did not answer, or has no metrics of Penstock."""


class BadStatus(NoMetrics):
    """The server answered with a status other than 200."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def read_metrics(parts: SplitResult, prefixes: tuple[str, ...] = (PREFIX,)) -> Samples:
    """Raises NoMetrics if there are no metrics, or none of Penstock's."""
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


def fetch(parts: SplitResult, api_key: str | None = None) -> str:
    """The text at a URL. Raises NoMetrics, or BadStatus for a status other than 200."""
    shown = shown_url(parts)
    try:
        with request("GET", parts, timeout_seconds=_TIMEOUT_SECONDS, api_key=api_key) as response:
            status, body = response.status_code, read_body(response, _MAX_BYTES)
    except RequestFailed as error:
        if error.is_timeout:
            raise NoMetrics(
                f"{shown} did not answer within {_TIMEOUT_SECONDS:.0f} s: check the URL, and "
                "whether the server is overloaded"
            ) from None
        raise NoMetrics(
            f"{shown} does not answer ({error}): expected a running server; check the URL, and "
            "that the server is running"
        ) from None
    if status != 200:
        raise BadStatus(
            f"{shown} answers with {status}: expected its metrics; give the URL of the server, or "
            "of its /metrics",
            status,
        )
    if len(body) > _MAX_BYTES:
        raise NoMetrics(f"{shown} answers with more than 64 MiB: expected metrics; check the URL")
    return body.decode("utf-8", errors="replace")


def metrics_url(url: str) -> SplitResult:
    """The URL of a server's metrics, from the server's URL or that of any of its paths."""
    parts = parse_url(url.strip() if "://" in url else f"http://{url.strip()}")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return parts._replace(path=path if path.endswith("/metrics") else f"{path}/metrics")


def shown_url(parts: SplitResult) -> str:
    """The URL without its query, which may hold a secret."""
    return parts._replace(query="").geturl()


def read_json(parts: SplitResult, path: str, api_key: str | None = None) -> Any:
    """The JSON at another path of the server whose metrics are at `parts`."""
    base = parts.path.removesuffix("/metrics")
    where = parts._replace(path=f"{base}{path}", query="")
    try:
        return json.loads(fetch(where, api_key))
    except ValueError:
        raise NoMetrics(f"{shown_url(where)} is not JSON: expected a `penstock serve`") from None
