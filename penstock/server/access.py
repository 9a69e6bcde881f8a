"""A line in the log for each request: what was asked, how it ended, how many tokens, how long.

Never a prompt, never an answer, never a query string. What programs ask all the time, such as
probes, Prometheus and open dashboards, is told at debug level only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.types import Scope

from penstock.server.answers import Usage

log = logging.getLogger("penstock.server")

_MAX_PATH_CHARS = 200
_ASKED_ALL_THE_TIME = ("/health", "/ready", "/ping", "/metrics", "/")
_WATCHED = ("/dashboard/", "/v1/penstock/")


class Access:
    """One request's line, in the making. The endpoints find it in `request.state.access`."""

    def __init__(self, scope: Scope, request_id: str) -> None:
        self._began = time.monotonic()
        self._method = str(scope.get("method", ""))
        self._path = str(scope.get("path", ""))
        self._request_id = request_id
        self.usage: Callable[[], Usage] | None = None  # of a request that made tokens
        self.status: int | None = None
        self.is_gone = False  # the client has left before the end

    def write(self) -> None:
        level = logging.DEBUG if self._is_routine else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "%s", self.line(time.monotonic() - self._began))

    def line(self, seconds: float) -> str:
        # As Python writes it: a path may hold line breaks, to look like lines of the log.
        path = ascii(self._path[:_MAX_PATH_CHARS])[1:-1]
        end = "no answer" if self.status is None else str(self.status)
        parts = [f"{ascii(self._method[:20])[1:-1]} {path} {end}"]
        if self.is_gone:
            parts.append("the client left")
        if self.usage is not None:
            usage = self.usage()
            cached = usage.prompt_tokens_details.cached_tokens
            parts.append(f"{usage.prompt_tokens} tokens in ({cached} cached)")
            parts.append(f"{usage.completion_tokens} out")
        parts.append(f"{seconds:.3f} s")
        return ", ".join(parts) + f" [{self._request_id}]"

    @property
    def _is_routine(self) -> bool:
        if self._path in _ASKED_ALL_THE_TIME:
            return True
        return self._method in ("GET", "HEAD") and self._path.startswith(_WATCHED)


def access_of(scope: Scope) -> Access | None:
    """None where no `Front` stands before the endpoint."""
    state: dict[str, Any] = scope.get("state", {})
    found = state.get("access")
    return found if isinstance(found, Access) else None
