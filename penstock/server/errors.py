"""Error responses: always in OpenAI's envelope.

    {"error": {"message": "…", "type": "…", "param": "temperature", "code": "…"}}

Nothing here imports torch: the server answers while the engine is still loading.
"""

from __future__ import annotations

import json
import math

from starlette.responses import Response

from penstock.engine.admission import Busy, TooLong
from penstock.engine.faults import EngineFault, GrammarFault
from penstock.errors import ConfigError, NotInstalled, PenstockError

_SERVER_ERROR = 500


class ApiError(Exception):
    """Ends a request with this status and this envelope."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_seconds is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_seconds)))

    @property
    def kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= _SERVER_ERROR else "invalid_request_error"

    def envelope(self) -> str:
        fields = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        # In ASCII, so that no character from the client can break the response.
        return json.dumps({"error": fields})

    def response(self) -> Response:
        return Response(
            self.envelope(), self.status, headers=self.headers, media_type="application/json"
        )


def from_engine(error: PenstockError) -> ApiError:
    """The response for an error that the engine raised."""
    if isinstance(error, TooLong):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, Busy):
        return ApiError(
            429,
            str(error),
            code="rate_limit_exceeded",
            retry_after_seconds=error.retry_after_seconds,
        )
    if isinstance(error, ConfigError):
        return ApiError(400, str(error))
    if isinstance(error, NotInstalled):
        return ApiError(400, f"the server cannot do this: {error}.", code="not_installed")
    if isinstance(error, GrammarFault):
        return ApiError(400, str(error), code="structure_too_complex")
    if isinstance(error, EngineFault):
        return ApiError(500, str(error), code="engine_fault")
    # Otherwise the engine is stopping or has failed.
    return ApiError(503, str(error), code="stopped", retry_after_seconds=5)


def stopped() -> ApiError:
    return ApiError(
        503, "the server stopped before it had read the request; send it again.", code="stopped"
    )


def internal() -> ApiError:
    return ApiError(
        500, "the server failed on this request; retry, or see the server's log.", code="internal"
    )
