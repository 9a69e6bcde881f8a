"""One look after the other at a server elsewhere: what `penstock top` shows.

The numbers come from its /metrics. Who is in it just now only a `penstock serve` tells, and where
that has a key, only to who has it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import SplitResult

from penstock.clock import Clock, SystemClock
from penstock.watch.history import History
from penstock.watch.remote_server import RemoteServer
from penstock.watch.scrape import BadStatus, NoMetrics, read_json
from penstock.watch.view import View, make_view

NEEDS_KEY = "sessions need the server's key: give --api-key, or set PENSTOCK_API_KEY"
WRONG_KEY = "sessions need the server's key, and the one given is not it"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a `penstock serve` tells beside its metrics."""

    version: str | None = None
    phase: str = "serving"
    models: tuple[str, ...] = ()
    sessions: tuple[dict[str, Any], ...] | None = None  # None: they are not told
    num_sessions: int = 0
    note: str = ""  # what is not told, and how to come by it


@dataclass(frozen=True, slots=True)
class Snapshot:
    url: str
    kind: str  # "penstock" or "vllm"
    facts: Facts
    view: View
    unix_seconds: float
    seen_at: float  # when it answered, on the onlooker's clock
    watched_since: float
    error: str = ""  # why it did not answer this time: all the rest is as it was

    def as_data(self) -> dict[str, Any]:
        """In the shape of /v1/penstock/state."""
        data: dict[str, Any] = {"url": self.url, "host": self.kind, "version": self.facts.version}
        data |= {"models": list(self.facts.models), "unix_seconds": round(self.unix_seconds, 3)}
        if self.error:
            return data | {"phase": "unreachable", "error": self.error}
        sessions = self.facts.sessions
        return data | {
            "phase": self.facts.phase,
            "view": self.view.as_data(),
            "sessions": None if sessions is None else list(sessions),
            "num_sessions": self.facts.num_sessions,
            "note": self.facts.note or None,
        }


class ServerWatch:
    def __init__(
        self, metrics: SplitResult, api_key: str | None = None, clock: Clock | None = None
    ) -> None:
        self._server = RemoteServer(metrics)
        self._api_key = api_key
        self._clock = clock or SystemClock()
        self._history = History()
        self._last: Snapshot | None = None
        self._asks_state = True

    def snapshot(self, *, since_start: bool = False) -> Snapshot:
        """Raises NoMetrics where the server has not answered even once."""
        try:
            samples = self._server.read()
        except NoMetrics as error:
            self._asks_state = True  # it may come back as another
            if self._last is None:
                raise
            self._last = replace(self._last, error=str(error), unix_seconds=time.time())
            return self._last
        now = self._clock.now()
        self._history.add(now, samples)
        self._last = Snapshot(
            self._server.url,
            self._server.kind,
            self._read_facts(),
            make_view(self._history, since_start=since_start),
            time.time(),
            now,
            now if self._last is None else self._last.watched_since,
        )
        return self._last

    def _read_facts(self) -> Facts:
        models = tuple(self._server.models)
        if self._server.kind == "vllm":
            return Facts(models=models)
        before = Facts(models=models) if self._last is None else self._last.facts
        if not self._asks_state:
            return replace(before, phase=self._phase(before.phase))
        try:
            return _facts_of(read_json(self._server.metrics, "/v1/penstock/state", self._api_key))
        except BadStatus as error:
            if error.status not in (401, 404):
                return before  # it is busy or loads, and tells next time
            self._asks_state = False
            note = ""
            if error.status == 401:
                note = NEEDS_KEY if self._api_key is None else WRONG_KEY
            return Facts(models=models, phase=self._phase(before.phase), note=note)
        except NoMetrics:
            return before

    def _phase(self, before: str) -> str:
        """What a `penstock serve` tells everybody."""
        try:
            told = read_json(self._server.metrics, "/health")
        except BadStatus as error:
            return "failed" if error.status == 503 else before
        except NoMetrics:
            return before
        phase = told.get("phase") if isinstance(told, dict) else None
        return phase if isinstance(phase, str) else before


def _facts_of(data: Any) -> Facts:
    """Whatever lies there: it may be another's server."""
    if not isinstance(data, dict):
        return Facts()
    version, phase = data.get("version"), data.get("phase")
    models, sessions, num = data.get("models"), data.get("sessions"), data.get("num_sessions")
    seen = None
    if isinstance(sessions, list):
        seen = tuple(session for session in sessions if isinstance(session, dict))
    return Facts(
        version if isinstance(version, str) else None,
        phase if isinstance(phase, str) else "serving",
        tuple(str(name) for name in models) if isinstance(models, list) else (),
        seen,
        num if isinstance(num, int) else len(seen or ()),
    )
