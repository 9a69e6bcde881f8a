"""`penstock advise`: what to change on a running server, from its metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated
from urllib.parse import SplitResult

import typer

from penstock.commands import JsonFlag, new_table, print_json, progress_bar, stdout_console
from penstock.watch.advice import Advice, Urgency, block_bytes, hit_rate, reused_share
from penstock.watch.adviser import advise
from penstock.watch.remote_server import RemoteServer
from penstock.watch.samples import Samples
from penstock.watch.scrape import metrics_url, shown_url

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLE = (
    "Example: penstock advise http://127.0.0.1:8000\n\n"
    "Example: penstock advise http://127.0.0.1:8000 --seconds 60 --json"
)
_STYLES = {Urgency.ACT: "bold red", Urgency.CONSIDER: "yellow", Urgency.WELL: "green"}


def advise_server(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="The URL of a `penstock serve`, or of a vLLM that runs Penstock."
        ),
    ],
    seconds: Annotated[
        float,
        typer.Option(
            min=0,
            max=86400,
            metavar="S",
            help="How long to watch the server. 0: use its counters since its start.",
        ),
    ] = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Read a running server's metrics, and suggest what to change, with the numbers.

    Nothing is changed on the server. By default the advice is based on everything since the server
    started; to judge the current load, watch for a while with --seconds.
    """
    parts = metrics_url(url)
    server = RemoteServer(parts)
    seen = server.read()
    if seconds:
        before = seen
        _wait(seconds)
        seen = server.read().since(before)
    found = advise(seen)
    if as_json:
        print_json(_as_data(parts, seconds, seen, found))
    else:
        _draw(parts, seconds, found)


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
        "url": shown_url(parts),
        "watched_seconds": seconds or None,
        "hit_rate": hit_rate(seen),
        "reused_share": reused_share(seen),
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
    console.print(_table(f"{shown_url(parts)}, {span}", found))
    if all(advice.urgency is Urgency.WELL for advice in found):
        console.print("Nothing to change.")


def _table(title: str, found: list[Advice]) -> Table:
    from rich.text import Text

    table = new_table("", "about", "finding", "what to do", title=title)
    for column in table.columns:
        column.justify = "left"
        column.overflow = "fold"
    for advice in found:
        urgency = Text(advice.urgency, style=_STYLES[advice.urgency])
        table.add_row(urgency, advice.topic, advice.finding, advice.change or "–")
    return table
