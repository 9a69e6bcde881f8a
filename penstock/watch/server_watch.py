"""Takes snapshots of another server, for `penstock top`.

The numbers come from its /metrics. Only a `penstock serve` lists its sessions, and if it has an API
key, only with that key.
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

NEEDS_KEY = "sessions require the server's key: use --api-key, or set PENSTOCK_API_KEY"
WRONG_KEY = "sessions require the server's key, and the given key is wrong"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a `penstock serve` reports besides its metrics."""

    version: str | None = None
    phase: str = "serving"
    models: tuple[str, ...] = ()
    sessions: tuple[dict[str, Any], ...] | None = None  # None if the server does not list them
    num_sessions: int = 0
    note: str = ""  # what is missing, and how to get it


@dataclass(frozen=True, slots=True)
class Snapshot:
    url: str
    kind: str  # "penstock" or "vllm"
    facts: Facts
    view: View
    unix_seconds: float
    seen_at: float  # when it last answered, by the clock of ServerWatch
    watched_since: float
    error: str = ""  # why it did not answer this time; the rest is from the last answer

    def as_data(self) -> dict[str, Any]:
        """The snapshot in the format of /v1/penstock/state."""
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
        """Read the server. Raises NoMetrics if it has never answered."""
        try:
            samples = self._server.read()
        except NoMetrics as error:
            self._asks_state = True  # after a restart it may have them
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
                return before  # it is busy or loading: try again next time
            self._asks_state = False
            note = ""
            if error.status == 401:
                note = NEEDS_KEY if self._api_key is None else WRONG_KEY
            return Facts(models=models, phase=self._phase(before.phase), note=note)
        except NoMetrics:
            return before

    def _phase(self, before: str) -> str:
        """The phase from /health, which needs no key."""
        try:
            data = read_json(self._server.metrics, "/health")
        except BadStatus as error:
            return "failed" if error.status == 503 else before
        except NoMetrics:
            return before
        phase = data.get("phase") if isinstance(data, dict) else None
        return phase if isinstance(phase, str) else before


def _facts_of(data: Any) -> Facts:
    """Checks every field, because the server may not be ours."""
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
