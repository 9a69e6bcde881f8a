"""Where a request came from: the client's request id, and W3C's trace context.

An invalid trace context is ignored, as the specification requires: the request is served, and its
spans start a new trace.
"""

from __future__ import annotations

import re

from starlette.requests import Request

from penstock.types import Origin

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_MAX_STATE_CHARS = 512


def origin_of(request: Request, operation: str) -> Origin:
    parent = request.headers.get("traceparent", "").strip()
    if not _TRACEPARENT.fullmatch(parent):
        return Origin(request.state.request_id, operation)
    state = ",".join(request.headers.getlist("tracestate"))
    if len(state) > _MAX_STATE_CHARS or not state.isascii() or not state.isprintable():
        state = ""
    return Origin(request.state.request_id, operation, parent, state)
