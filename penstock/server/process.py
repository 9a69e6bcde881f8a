"""The life of a server process: listen, load behind that, serve, finish, close.

The port is taken before the weights are read, so that a taken one costs nobody a wait; from then
on /health and /ready answer. When it is asked to stop, running requests may finish while new ones
are refused; then the saves are drained and the tiers closed, and only then the port is let go.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from penstock.errors import ConfigError
from penstock.server.app import AppSettings, make_app
from penstock.server.backend import Backend, Serving

_BACKLOG = 1024
_LAST_BYTES_SECONDS = 3  # for answers that are written but not yet taken


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    app: AppSettings = field(default_factory=AppSettings)
    grace_seconds: float = 30.0
    access_log: bool = False


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises ConfigError if it cannot be had. Port 0 takes a free one."""
    advice = "choose another with --host and --port"
    if not 0 <= port <= 65535:  # else its last 16 bits would be taken
        raise ConfigError(f"port {port} is none: expected 0 to 65535; {advice}")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)  # until somebody listens, two may bind to one port
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
        raise ConfigError(f"port {port} of {host} cannot be had: {reason}, {advice}.") from None
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Listener(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # whoever runs the process decides what a signal means


class Process:
    """`run` it once; `stop` it from a signal or any thread."""

    def __init__(
        self,
        listener: socket.socket,
        backend: Backend,
        load: Callable[[], Serving],
        settings: ProcessSettings,
        on_ready: Callable[[Serving], None] = lambda _: None,
    ) -> None:
        """`load` runs on a thread of its own, and what it raises ends `run`."""
        self._listener = listener
        self._backend = backend
        self._load = load
        self._settings = settings
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._asked_to_stop = False

    def stop(self) -> None:
        """Finish what runs, then end."""
        self._asked_to_stop = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: it has stopped already
                self._loop.call_soon_threadsafe(self._stop.set)

    async def run(self) -> bool:
        """Serve until stopped. False if that happened before the model was loaded."""
        self._loop = asyncio.get_running_loop()
        if self._asked_to_stop:
            self._stop.set()
        config = uvicorn.Config(
            make_app(self._backend, self._settings.app),
            log_config=None,
            access_log=self._settings.access_log,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
        )
        server = _Listener(config)
        listening = asyncio.create_task(server.serve(sockets=[self._listener]))
        stopping = asyncio.create_task(self._stop.wait())
        loading = self._start_loading()
        try:
            await _first(loading, stopping, listening)
            if not loading.done():
                return False
            await self._serve(loading.result(), stopping, listening)
            return True
        finally:
            stopping.cancel()
            server.should_exit = True
            await listening

    async def _serve(
        self, serving: Serving, stopping: asyncio.Future[Any], listening: asyncio.Future[Any]
    ) -> None:
        try:
            self._backend.serve(serving)
            self._on_ready(serving)
            await _first(stopping, listening)
        finally:
            self._backend.stop()
            await serving.service.close(self._settings.grace_seconds)
            serving.prompts.close()

    def _start_loading(self) -> asyncio.Future[Serving]:
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Serving] = loop.create_future()

        def settle(serving: Serving | None, error: BaseException | None) -> None:
            if serving is not None:
                loaded.set_result(serving)
            elif error is not None:
                loaded.set_exception(error)

        def load() -> None:
            serving, error = None, None
            try:
                serving = self._load()
            except BaseException as caught:
                error = caught
            try:
                loop.call_soon_threadsafe(settle, serving, error)
            except RuntimeError:  # the loop is closed: the process has stopped meanwhile
                if serving is not None:
                    asyncio.run(serving.service.close(0))

        # A daemon: nothing can interrupt it, and a process that stops does not wait for it.
        threading.Thread(target=load, name="penstock-load", daemon=True).start()
        return loaded


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
