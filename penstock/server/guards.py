"""What every app of ours shares: checks of the Host header and the API key, and error responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.install import VERSION
from penstock.server.errors import ApiError
from penstock.server.hosts import HostCheck, Hosts, has_key
from penstock.server.middleware import OuterMiddleware


def guarded_app(description: str, hosts: Hosts, api_key: str | None) -> FastAPI:
    """An app without endpoints, whose errors are all in OpenAI's envelope."""
    app = FastAPI(
        title="Penstock",
        version=VERSION,
        description=description,
        docs_url=None,  # its page loads scripts from other sites
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(HostCheck, hosts=hosts, api_key=api_key)
    app.add_middleware(OuterMiddleware)  # the middleware added last is the outermost
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    return app


def key_check(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """A dependency that answers 401 unless the request has the key, if one is set."""

    async def check(request: Request) -> None:
        if api_key is not None and not has_key(request.headers, api_key):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check


def _answer_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _answer_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors: an unknown path, or a method it does not have."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"[:200]
    message = f"{what}: {str(error.detail).lower()}; see /openapi.json for the endpoints."
    headers = dict(error.headers or {})
    return ApiError(error.status_code, message, headers=headers).response()
