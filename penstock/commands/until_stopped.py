"""Shared by the commands that run a server until they are stopped."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from types import FrameType
from typing import Annotated

import typer

from penstock.errors import ConfigError

AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        metavar="NAME",
        help="A host name that clients may use in addition to localhost (and, if --host is not "
        "loopback, IP addresses and this machine's name). .example.com allows all its subdomains, "
        "* any name. May be repeated.",
        show_default=False,
    ),
]


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def set_logging(level: LogLevel) -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("penstock").setLevel(level.value.upper())
    # It logs every connection.
    quiet = logging.INFO if level is LogLevel.DEBUG else logging.WARNING
    logging.getLogger("uvicorn").setLevel(quiet)


def names_of(host: str, allowed: list[str] | None) -> tuple[str, ...]:
    """Return the host names that clients may use: the allowed ones, and the one we listen on.

    Raises ConfigError if one is not a valid name.
    """
    from penstock.server.hosts import check_name  # needs an extra

    is_name = any(character.isalpha() for character in host) and ":" not in host
    return tuple(check_name(name) for name in (*(allowed or ()), *([host] if is_name else [])))


def tell(text: str) -> None:
    typer.echo(f"penstock: {text}", err=True)


def check_key(api_key: str | None) -> None:
    if api_key is not None and (not api_key.strip() or not api_key.isprintable()):
        raise ConfigError(
            "the API key is empty or has characters that an HTTP header cannot contain: expected "
            "printable characters; choose another key."
        )


@contextmanager
def stop_on_signals(stop: Callable[[], None], *, first: str, second: str) -> Iterator[None]:
    """Call `stop` on Ctrl-C or SIGTERM. A second signal ends the process at once."""
    num_asked = 0

    def say(text: str) -> None:
        # Not `sys.stderr`: the signal may have interrupted a write to it.
        os.write(2, f"penstock: {text}\n".encode())

    def ask(number: int, _: FrameType | None) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            say(second)
            os._exit(128 + number)
        say(first)
        stop()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)
