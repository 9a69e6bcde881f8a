"""The life of a server process: listen, load the model, serve, drain, close.

The port is opened before the weights are read, so that a port in use is reported at once; from
then on /health and /ready answer. On stop, running requests may finish while new ones are refused;
then pending saves are written, the tiers closed, and finally the port.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.server.app import AppSettings, make_app
from penstock.server.backend import Backend, Serving
from penstock.server.dashboard import watch_backend
from penstock.server.hosts import Hosts, listens_on_loopback
from penstock.server.listening import Listener, Stop, first
from penstock.server.throughput import ThroughputLog


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    app: AppSettings = field(default_factory=AppSettings)
    grace_seconds: float = 30.0


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
        """`load` runs on its own thread; `run` raises what it raises.

        Raises ConfigError for an invalid allowed host.
        """
        beyond_loopback = not listens_on_loopback(listener)
        self._hosts = Hosts(settings.app.allowed_hosts, beyond_loopback=beyond_loopback)
        self._listener = listener
        self._backend = backend
        self._load = load
        self._settings = settings
        self._on_ready = on_ready
        self._stop = Stop()

    def stop(self) -> None:
        """Finish running requests, then end."""
        self._stop.ask()

    async def run(self) -> bool:
        """Serve until stopped. False if that happened before the model was loaded."""
        stopping = self._stop.wait()
        watch = watch_backend(self._backend)
        watch.start()
        pace = ThroughputLog(self._backend)
        pace.start()
        app = make_app(self._backend, self._settings.app, watch, self._hosts)
        server = Listener(app, self._listener)
        loading = self._start_loading()
        try:
            await first(loading, stopping, server.task)
            if not loading.done():
                return False
            await self._serve(loading.result(), stopping, server.task)
            return True
        finally:
            stopping.cancel()
            await watch.close()
            await pace.close()
            await server.finish()

    async def _serve(
        self, serving: Serving, stopping: asyncio.Future[Any], listening: asyncio.Future[Any]
    ) -> None:
        try:
            self._backend.serve(serving)
            self._on_ready(serving)
            # An engine that cannot recover ends the process, for its supervisor to restart it.
            await first(stopping, listening, asyncio.wrap_future(serving.service.ended))
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
            except RuntimeError:  # the loop is closed: the server stopped in the meantime
                if serving is not None:
                    asyncio.run(serving.service.close(0))

        # A daemon: loading cannot be interrupted, and must not delay the end of the process.
        threading.Thread(target=load, name="penstock-load", daemon=True).start()
        return loaded
