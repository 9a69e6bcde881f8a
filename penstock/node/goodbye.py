"""Goodbyes: sessions that this process has ended, but whose node could not be told.

A node that hangs takes no goodbye. It keeps what such a session had until all of its processes have
ended, and this one may live on. So the next client here that attaches to the node tells it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from select import POLLOUT, poll

from penstock.node.wire import Channel

_MAX_TOKENS = 64  # for each node; the oldest are of nodes that have ended

_untold: dict[Path, tuple[str, ...]] = {}


def say_goodbye(channel: Channel, timeout_seconds: float) -> bool:
    """Nothing of the session is running. False if the node has not taken that in time."""
    channel.send("bye", {})
    channel.flush()
    deadline = time.monotonic() + timeout_seconds
    waiter = poll()
    waiter.register(channel.fileno(), POLLOUT)
    while channel.has_unsent and not channel.is_closed:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        waiter.poll(max(1, int(left * 1000)))
        channel.flush()
    return not channel.has_unsent and not channel.is_deaf


def keep_for_later(path: Path, tokens: Sequence[str]) -> None:
    """Sessions at the node at `path` of which nothing is running."""
    _untold[path] = (*_untold.get(path, ()), *tokens)[-_MAX_TOKENS:]


def to_tell(path: Path) -> tuple[str, ...]:
    return _untold.get(path, ())


def told(path: Path, tokens: Sequence[str]) -> None:
    """The node at `path` knows of these now."""
    _untold[path] = tuple(token for token in _untold.get(path, ()) if token not in tokens)
