"""The dashboard of another server, usually a vLLM that runs Penstock.

It reads that server's /metrics once per second and serves the page and its data. If the server does
not answer, the page says so, and it is asked again.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Depends, FastAPI

from penstock.install import VERSION
from penstock.server.dashboard import data_routes, page_routes
from penstock.server.guards import guarded_app, key_check
from penstock.server.hosts import Hosts, listens_on_loopback
from penstock.server.listening import Listener, Stop, first
from penstock.server.watching import Watch, Watched
from penstock.watch.remote_server import RemoteServer
from penstock.watch.samples import Samples

_Result = TypeVar("_Result")


class RemoteDashboard:
    """`run` it once; `stop` it from a signal or any thread."""

    def __init__(
        self,
        bound: socket.socket,
        server: RemoteServer,
        api_key: str | None = None,
        on_ready: Callable[[], None] = lambda: None,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        """Raises ConfigError for an invalid allowed host."""
        self._bound = bound
        self._server = server
        self._api_key = api_key
        self._on_ready = on_ready
        self._hosts = Hosts(allowed_hosts, beyond_loopback=not listens_on_loopback(bound))
        self._stop = Stop()

    def stop(self) -> None:
        self._stop.ask()

    async def run(self) -> None:
        """Serve until stopped."""
        stopping = self._stop.wait()
        watch = watch_remote(self._server)
        watch.start()
        listener = Listener(make_dashboard(watch, self._api_key, self._hosts), self._bound)
        try:
            self._on_ready()
            await first(stopping, listener.task)
        finally:
            stopping.cancel()
            await watch.close()
            await listener.finish()


def make_dashboard(watch: Watch, api_key: str | None, hosts: Hosts) -> FastAPI:
    app = guarded_app("The dashboard of another server.", hosts, api_key)
    app.include_router(page_routes())
    app.include_router(data_routes(watch, [Depends(key_check(api_key))]))
    return app


def watch_remote(server: RemoteServer) -> Watch:
    async def read() -> Samples:
        return await _off_the_loop(server.read)

    def describe() -> dict[str, Any]:
        return {
            "version": VERSION,
            "host": server.kind,
            "has": [],
            "models": list(server.models),
            "settings": {},
            "metrics_url": server.metrics_url,
        }

    return Watch(Watched(read, describe))


async def _off_the_loop(work: Callable[[], _Result]) -> _Result:
    """Run `work` on a new daemon thread.

    Not `asyncio.to_thread`, whose threads are not daemons: a server that hangs must not keep this
    process from ending.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def settle(result: _Result | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        with suppress(RuntimeError):  # the loop is closed: the result is no longer needed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="penstock-scrape", daemon=True).start()
    return await done
