"""Access log: one line per request with its path, status, token counts and duration.

Prompts, answers and query strings are never logged. Requests that programs repeat all the time
(probes, Prometheus, open dashboards) are logged at debug level.
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
_ROUTINE_PATHS = ("/health", "/ready", "/ping", "/metrics", "/")
_DASHBOARD_PATHS = ("/dashboard/", "/v1/penstock/")


class Access:
    """The log line of one request, being filled in. It is in `request.state.access`."""

    def __init__(self, scope: Scope, request_id: str) -> None:
        self._began = time.monotonic()
        self._method = str(scope.get("method", ""))
        self._path = str(scope.get("path", ""))
        self._request_id = request_id
        self.usage: Callable[[], Usage] | None = None  # set if the request generates tokens
        self.status: int | None = None
        self.is_gone = False  # the client hung up before the end

    def write(self) -> None:
        level = logging.DEBUG if self._is_routine else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "%s", self.line(time.monotonic() - self._began))

    def line(self, seconds: float) -> str:
        # Escaped: a path may contain line breaks, to forge lines of the log.
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
        if self._path in _ROUTINE_PATHS:
            return True
        return self._method in ("GET", "HEAD") and self._path.startswith(_DASHBOARD_PATHS)


def access_of(scope: Scope) -> Access | None:
    """None if the app has no `OuterMiddleware`."""
    state: dict[str, Any] = scope.get("state", {})
    found = state.get("access")
    return found if isinstance(found, Access) else None
