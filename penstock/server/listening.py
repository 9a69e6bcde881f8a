"""A port that is listened on, and the way a server that listens there comes to its end."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from penstock.errors import ConfigError

_BACKLOG = 1024
_LAST_BYTES_SECONDS = 3  # for answers that are written but not yet taken


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError if it cannot listen there."""
    advice = "choose another with --host and --port"
    if not 0 <= port <= 65535:  # else the socket would use the last 16 bits
        raise ConfigError(f"port {port} is out of range (0 to 65535); {advice}")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)  # only listening keeps others from the port
        except BaseException:
            listener.close()
            raise
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r} has no address ({error.strerror}); {advice}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "another process listens there; stop it"
            advice = "or " + advice
        raise ConfigError(f"cannot listen on port {port} of {host}: {reason}, {advice}.") from None
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Listener(uvicorn.Server):
    """Serves an app on a socket, in the running event loop, until `finish`."""

    def __init__(self, app: Any, bound: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,  # we have our own: see access.py
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
        )
        super().__init__(config)
        self.task = asyncio.create_task(self.serve(sockets=[bound]))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are handled by the command

    async def finish(self) -> None:
        """Close the port, after clients have had a few seconds to read their responses."""
        self.should_exit = True
        await self.task


class Stop:
    """A request to stop: made from a signal handler or any thread, awaited in the event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = asyncio.Event()
        self._was_asked = False

    def ask(self) -> None:
        self._was_asked = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: it has stopped already
                self._loop.call_soon_threadsafe(self._asked.set)

    def wait(self) -> asyncio.Task[bool]:
        """A task that ends once `ask` was called, even if that was before."""
        self._loop = asyncio.get_running_loop()
        if self._was_asked:
            self._asked.set()
        return asyncio.create_task(self._asked.wait())


async def first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
