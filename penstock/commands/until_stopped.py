"""What the commands share that listen until they are stopped."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from penstock.errors import ConfigError


def tell(text: str) -> None:
    typer.echo(f"penstock: {text}", err=True)


def check_key(api_key: str | None) -> None:
    if api_key is not None and (not api_key.strip() or not api_key.isprintable()):
        raise ConfigError(
            "the API key is empty or has characters that no header can carry; choose another."
        )


def is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


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
