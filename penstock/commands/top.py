"""`penstock top`: a running server in the terminal, live."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.commands import print_json, stdout_console
from penstock.commands.until_stopped import check_key
from penstock.config import ENV_API_KEY
from penstock.watch.scrape import NoMetrics, metrics_url

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.watch.server_watch import ServerWatch, Snapshot

EXAMPLE = (
    "Example: penstock top http://127.0.0.1:8000\n\n"
    "Example: penstock top http://127.0.0.1:8000 --once\n\n"
    "Example: penstock top http://127.0.0.1:8000 --json --interval 10 >> numbers.jsonl"
)
_REDRAWS_PER_SECOND = 2.0  # also while a server does not answer, and when the window changes

Wait = Callable[[float], bool]
"""Wait for this many seconds. Returns True if the user wants to quit."""


def top(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="The URL of a `penstock serve`, or of a vLLM that runs Penstock."
        ),
    ],
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="S", help="Seconds between updates.")
    ] = 1.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Read twice, one interval apart, print the result and exit. The default unless "
            "the output is a terminal.",
        ),
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=ENV_API_KEY,
            metavar="KEY",
            help="The server's API key, needed to list sessions.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print JSON: one document with --once, else one line per interval."
        ),
    ] = False,
) -> None:
    """Watch a running server: tiers, transfers, first tokens, sessions and problems.

    It reads the server's /metrics and changes nothing. Quit with q or Ctrl-C. If the server stops
    answering, it is asked again until it does; if it never answered, that is an error.
    """
    from penstock.watch.server_watch import ServerWatch

    check_key(api_key)
    watch = ServerWatch(metrics_url(url), api_key)
    console = stdout_console()
    if once or not (as_json or (console.is_terminal and not console.is_dumb_terminal)):
        _print_once(watch, interval, console, as_json=as_json)
        return
    first = watch.snapshot()  # a wrong URL is an error before anything is drawn
    with _quitting_cleanly():
        if as_json:
            _write_lines(watch, interval)
        else:
            _draw_live(watch, interval, console, first)


def _print_once(watch: ServerWatch, interval: float, console: Console, *, as_json: bool) -> None:
    from penstock.commands.top_screen import Screen

    watch.snapshot()
    time.sleep(interval)
    snapshot = watch.snapshot(since_start=True)
    if snapshot.error:
        raise NoMetrics(snapshot.error)
    if as_json:
        print_json(snapshot.as_data())
    else:
        console.print(Screen(snapshot, time.monotonic()))


def _write_lines(watch: ServerWatch, interval: float) -> None:
    for snapshot in _snapshots(watch, interval, _sleep):
        sys.stdout.write(json.dumps(snapshot.as_data(), allow_nan=False) + "\n")
        sys.stdout.flush()


def _draw_live(watch: ServerWatch, interval: float, console: Console, latest: Snapshot) -> None:
    from rich.live import Live

    from penstock.commands.top_screen import Screen

    patience_seconds = max(3.0, 2 * interval)

    def draw() -> Screen:
        return Screen(latest, time.monotonic(), patience_seconds)

    with (
        _keys() as wait,
        Live(
            get_renderable=draw,
            console=console,
            screen=True,
            refresh_per_second=_REDRAWS_PER_SECOND,
        ) as live,
    ):
        for latest in _snapshots(watch, interval, wait):  # noqa: B007, draw shows it
            live.refresh()


def _snapshots(watch: ServerWatch, interval: float, wait: Wait) -> Iterator[Snapshot]:
    """One snapshot per interval, however long the server takes; the first after one interval."""
    spent = 0.0
    while not wait(max(0.05, interval - spent)):
        began = time.monotonic()
        yield watch.snapshot()
        spent = time.monotonic() - began


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextmanager
def _quitting_cleanly() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the command normally, after the terminal is restored."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _keys() -> Iterator[Wait]:
    """A wait that the key q ends. Typed keys are not echoed into the drawing."""
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (OSError, ValueError, termios.error):  # stdin is not a terminal
        yield _sleep
        return

    def wait(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([fd], [], [], left)[0]:
                typed = os.read(fd, 64)
                if not typed:  # end of input
                    return _sleep(left)
                if b"q" in typed.lower():
                    return True
        return False

    tty.setcbreak(fd)
    try:
        yield wait
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
