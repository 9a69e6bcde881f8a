"""Reads a server's metrics once per second, and shares them with all open dashboards.

One task reads for all viewers. A slow viewer misses an update and never delays others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from penstock.errors import PenstockError
from penstock.server.stories import Stories
from penstock.watch.history import RECENT_SECONDS, History
from penstock.watch.samples import Samples
from penstock.watch.view import View, make_view

log = logging.getLogger("penstock.server")

TICK_SECONDS = 1.0
MAX_VIEWERS = 64
_MAX_SENT_STORIES = 50
_MAX_SESSIONS = 100
_SESSIONS_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Watched:
    """The source of a watch's data. `describe` returns what seldom changes."""

    read: Callable[[], Awaitable[Samples]]
    describe: Callable[[], dict[str, Any]] = dict
    phase: Callable[[], str] = lambda: "serving"
    sessions: Callable[[], Awaitable[list[dict[str, Any]]]] | None = None
    stories: Stories | None = None


@dataclass(frozen=True)
class _State:
    """The latest reading."""

    number: int = 0
    data: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def event(self) -> bytes:
        """Encoded once for all viewers."""
        return event("state", self.data)


class Watch:
    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._history = History()
        self._points: deque[dict[str, Any]] = deque(maxlen=int(RECENT_SECONDS / TICK_SECONDS))
        self._state = _State()
        self._updated = asyncio.Condition()
        self._num_viewers = 0
        self._seen: dict[str, Any] = {"sessions": [], "num_sessions": 0}
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_full(self) -> bool:
        return self._num_viewers >= MAX_VIEWERS

    def start(self) -> None:
        """Start reading, in a running loop. Does nothing if it runs already."""
        if self._task is None and not self._is_closed:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop reading, and end all streams."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        async with self._updated:
            self._updated.notify_all()

    async def state(self) -> dict[str, Any]:
        """The latest reading, together with what seldom changes."""
        self.start()
        await self._after(0)
        sessions = await self._sessions()
        state = {**self._watched.describe(), **self._state.data, **sessions}
        if "error" not in state:
            state["phase"] = self._watched.phase()  # the current one, not that of a second ago
        return state

    def story(self, request_id: str) -> list[dict[str, Any]]:
        return [] if self._watched.stories is None else self._watched.stories.find(request_id)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: `hello` at first, `state` every second, `stories` as requests end."""
        self.start()
        self._num_viewers += 1
        try:
            number = num_told = 0
            described: dict[str, Any] | None = None
            while not self._is_closed:
                number = await self._after(number)
                if self._is_closed:
                    return
                if (now := self._watched.describe()) != described:
                    described = now
                    yield event("hello", {**now, "points": list(self._points)})
                yield self._state.event
                if self._watched.stories is not None:
                    told = self._watched.stories.since(num_told, _MAX_SENT_STORIES)
                    if told:
                        num_told = told[-1]["number"]
                        yield event("stories", told)
        finally:
            self._num_viewers -= 1

    async def _after(self, number: int) -> int:
        """Wait for a later reading; returns its number."""
        async with self._updated:
            await self._updated.wait_for(lambda: self._is_closed or self._state.number > number)
        return self._state.number

    async def _run(self) -> None:
        while not self._is_closed:
            began = time.monotonic()
            try:
                data = await self._read()
            except Exception:
                # One failed reading must not end the watch.
                log.exception("the dashboard could not read the server's metrics")
                data = {"phase": "unknown", "error": "the server's metrics could not be read"}
            self._state = _State(self._state.number + 1, data)
            async with self._updated:
                self._updated.notify_all()
            await asyncio.sleep(max(0.05, TICK_SECONDS - (time.monotonic() - began)))

    async def _read(self) -> dict[str, Any]:
        data: dict[str, Any] = {"unix_seconds": round(time.time(), 3)}
        try:
            samples = await self._watched.read()
        except PenstockError as error:
            return {**data, "phase": "unreachable", "error": str(error)}
        self._history.add(time.monotonic(), samples)
        view = make_view(self._history)
        point = _point(data["unix_seconds"], view)
        self._points.append(point)
        data |= {"phase": self._watched.phase(), "view": view.as_data(), "point": point}
        if self._num_viewers:
            data |= await self._sessions()
        return data

    async def _sessions(self) -> dict[str, Any]:
        """The current sessions, or the last known ones if the engine is busy with a long step."""
        if self._watched.sessions is None:
            return {}
        with suppress(TimeoutError, PenstockError):
            # Not `wait_for`: in Python 3.11 it can swallow a cancellation.
            async with asyncio.timeout(_SESSIONS_SECONDS):
                sessions = await self._watched.sessions()
            self._seen = {"sessions": sessions[:_MAX_SESSIONS], "num_sessions": len(sessions)}
        return self._seen


def _point(at: float, view: View) -> dict[str, Any]:
    """What the charts keep of one reading."""
    rates = {"load": 0.0, "save": 0.0}
    for flow in view.flows:
        rates[flow.direction] += flow.bytes_per_second
    first = {kind: spread.p50 for kind, spread in view.first_token_seconds.items()}
    return {
        "at": at,
        "hit_rate": view.hit_rate,
        "reused_share": view.reused_share,
        "load": rates["load"],
        "save": rates["save"],
        "tokens_per_second": view.tokens_per_second,
        "first_token_seconds": first,
        "cold_reads_per_token": view.cold_reads_per_token,
    }


def event(name: str, data: object) -> bytes:
    """One server-sent event. Its data is one line: JSON has no bare newline."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
