"""What the commands share that listen until they are stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from penstock.errors import ConfigError

AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        metavar="NAME",
        help="A name under which clients may ask, beside localhost and, beyond loopback, addresses "
        "and this machine's own name; .example.com for all names below it, * for any. May be "
        "repeated.",
        show_default=False,
    ),
]


def names_of(host: str, allowed: list[str] | None) -> tuple[str, ...]:
    """The names to be asked under: those allowed, and the one that is listened on.

    Raises ConfigError for what can be no name.
    """
    from penstock.server.hosts import check_name  # an extra

    is_name = any(character.isalpha() for character in host) and ":" not in host
    return tuple(check_name(name) for name in (*(allowed or ()), *([host] if is_name else [])))


def tell(text: str) -> None:
    typer.echo(f"penstock: {text}", err=True)


def check_key(api_key: str | None) -> None:
    if api_key is not None and (not api_key.strip() or not api_key.isprintable()):
        raise ConfigError(
            "the API key is empty or has characters that no header can carry; choose another."
        )


@contextmanager
def stop_on_signals(stop: Callable[[], None], *, first: str, second: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM call `stop`; a second one ends the process. Each says its sentence."""
    num_asked = 0

    def say(text: str) -> None:
        # Not through `sys.stderr`: the signal may have come while that was being written to.
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
