"""`penstock advise`: what to change on a running server, by its own metrics."""

from __future__ import annotations

import time
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Annotated
from urllib.parse import SplitResult, urlsplit

import typer

from penstock.commands import JsonFlag, new_table, print_json, progress_bar, stdout_console
from penstock.errors import ConfigError, PenstockError
from penstock.plan.advice import Advice, Urgency, block_bytes, hit_rate
from penstock.plan.adviser import advise
from penstock.plan.samples import Samples, read_samples

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLE = (
    "Example: penstock advise http://127.0.0.1:8000\n\n"
    "Example: penstock advise http://127.0.0.1:8000 --seconds 60 --json"
)
_TIMEOUT_SECONDS = 10.0
_MAX_BYTES = 64 << 20
_STYLES = {Urgency.ACT: "bold red", Urgency.CONSIDER: "yellow", Urgency.WELL: "green"}


class NoMetrics(PenstockError):
    """The server could not be asked, or is not Penstock's."""


def advise_server(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="A `penstock serve`, or a vLLM that Penstock is part of."
        ),
    ],
    seconds: Annotated[
        float,
        typer.Option(
            min=0, max=86400, metavar="S", help="Watch so long; 0: judge by all since the start."
        ),
    ] = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Read a running server's metrics, and say what to change, with the numbers.

    Nothing on the server changes. Its counters run since its start; what was true in the morning
    may no longer be: watch for a while with --seconds.
    """
    parts = _parse(url)
    seen = _read(parts)
    if seconds:
        before = seen
        _wait(seconds)
        seen = _read(parts).since(before)
    found = advise(seen)
    if as_json:
        print_json(_as_data(parts, seconds, seen, found))
    else:
        _draw(parts, seconds, found)


def _read(parts: SplitResult) -> Samples:
    shown = parts.geturl()
    text = _fetch(parts)
    try:
        seen = read_samples(text)
    except ConfigError as error:
        raise NoMetrics(f"{shown} has no metrics: {error}; check the URL") from None
    if not seen:
        is_vllm = "\nvllm:" in f"\n{text}"
        advice = (
            "this is vLLM without Penstock; start it with the --kv-transfer-config that "
            "`penstock vllm-config` prints"
            if is_vllm
            else "expected a `penstock serve`, or a vLLM that Penstock is part of; check the URL"
        )
        raise NoMetrics(f"{shown} has no metrics of Penstock: {advice}")
    return seen


def _fetch(parts: SplitResult) -> str:
    shown = parts.geturl()
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_SECONDS)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("GET", path, headers={"Accept": "text/plain", "Connection": "close"})
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
        raise NoMetrics(
            f"{shown} answers with {response.status}: expected its metrics; give the URL of the "
            "server, or that of its /metrics"
        )
    if len(body) > _MAX_BYTES:
        raise NoMetrics(f"{shown} answers with more than 64 MiB: expected metrics; check the URL")
    return body.decode("utf-8", errors="replace")


def _parse(url: str) -> SplitResult:
    whole = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parts = urlsplit(whole)
        is_right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or not whole.isprintable() or " " in whole:
        raise ConfigError(
            f"the URL is {url[:200]!r}: expected one such as http://127.0.0.1:8000; correct it"
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    if not path.endswith("/metrics"):
        path = f"{path}/metrics"
    host = parts.netloc.rpartition("@")[2]  # nobody's password is shown
    return parts._replace(path=path, netloc=host, fragment="")


def _wait(seconds: float) -> None:
    end = time.monotonic() + seconds
    with progress_bar() as tick:
        while (left := end - time.monotonic()) > 0:
            tick("watching", 1 - left / seconds)
            time.sleep(min(left, 0.2))


def _as_data(
    parts: SplitResult, seconds: float, seen: Samples, found: list[Advice]
) -> dict[str, object]:
    return {
        "url": parts.geturl(),
        "watched_seconds": seconds or None,
        "hit_rate": hit_rate(seen),
        "block_bytes": block_bytes(seen),
        "advice": [
            {
                "urgency": advice.urgency,
                "topic": advice.topic,
                "finding": advice.finding,
                "change": advice.change,
                "numbers": dict(advice.numbers),
            }
            for advice in found
        ],
    }


def _draw(parts: SplitResult, seconds: float, found: list[Advice]) -> None:
    console = stdout_console()
    span = f"in the last {seconds:g} s" if seconds else "since its start"
    console.print(_table(f"{parts.geturl()}, {span}", found))
    if all(advice.urgency is Urgency.WELL for advice in found):
        console.print("Nothing to change.")


def _table(title: str, found: list[Advice]) -> Table:
    from rich.text import Text

    table = new_table("", "about", "what is seen", "what to do", title=title)
    for column in table.columns:
        column.justify = "left"
        column.overflow = "fold"
    for advice in found:
        urgency = Text(advice.urgency, style=_STYLES[advice.urgency])
        table.add_row(urgency, advice.topic, advice.finding, advice.change or "–")
    return table
