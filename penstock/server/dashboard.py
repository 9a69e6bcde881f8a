"""The dashboard: a page that is files and nothing else, and the numbers it draws, as they change.

The page holds nothing about anybody and is open. The numbers lie under /v1, and want the key where
there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from penstock.install import VERSION
from penstock.server.backend import Backend
from penstock.server.errors import ApiError
from penstock.server.sse import ByteStream
from penstock.server.watching import MAX_VIEWERS, Watch, Watched
from penstock.watch.samples import Key, Samples

# Everything comes from here, and nothing of what a model says can become part of the page.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"


def watch_backend(backend: Backend) -> Watch:
    """A watch over this process's own server."""

    async def read() -> Samples:
        return samples_of(backend)

    async def sessions() -> list[dict[str, Any]]:
        if backend.serving is None:
            return []
        return backend.stories.sightings(await backend.serving.service.census())

    def describe() -> dict[str, Any]:
        facts: dict[str, Any] = {
            "version": VERSION,
            "host": "penstock",
            "has": ["sessions", "stories", "chat"],
            "models": [],
            "settings": {},
        }
        if backend.serving is not None:
            facts |= {"models": list(backend.serving.names), "settings": backend.serving.settings}
        return facts

    return Watch(Watched(read, describe, lambda: backend.phase, sessions, backend.stories))


def samples_of(backend: Backend) -> Samples:
    """What /metrics would say of ours, without writing it out and reading it again."""
    values: dict[Key, float] = {}
    for family in backend.metrics.registry.collect():
        for sample in family.samples:
            values[sample.name, frozenset(sample.labels.items())] = sample.value
    return Samples(values)


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    folder = resources.files("penstock.server") / "page"
    pages = {
        file.name: (file.read_bytes(), kind)
        for file in folder.iterdir()
        if (kind := _KINDS.get(file.name[file.name.rfind(".") :])) is not None
    }

    def answer(name: str) -> Response:
        content, kind = pages[name]
        headers = {"Cache-Control": "no-cache", "Content-Security-Policy": _POLICY}
        return Response(content, media_type=kind, headers=headers)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index() -> Response:
        return answer(_INDEX)

    @router.api_route("/dashboard/{name}", methods=["GET", "HEAD"])
    async def part(name: str) -> Response:
        if name not in pages or name == _INDEX:
            raise ApiError(404, "the dashboard has no such file; it is at /.")
        return answer(name)

    return router


def data_routes(watch: Watch, dependencies: Sequence[Any] = ()) -> APIRouter:
    router = APIRouter(prefix="/v1/penstock", tags=["Penstock"], dependencies=list(dependencies))

    @router.get("/state")
    async def state() -> Response:
        """Where KV is, what moves, what it saves and what hurts, as the dashboard shows it."""
        return JSONResponse(await watch.state(), headers={"Cache-Control": "no-store"})

    @router.get("/live", response_class=Response)
    async def live() -> Response:
        """The same as server-sent events, once a second."""
        if watch.is_full:
            raise ApiError(
                503,
                f"{MAX_VIEWERS} dashboards are open already; close one, or ask again later.",
                code="too_many_viewers",
                retry_after_seconds=5.0,
            )
        return ByteStream(watch.events())

    @router.get("/requests/{request_id}")
    async def story(request_id: str) -> Response:
        """What one of the latest requests did when, and where its KV came from."""
        found = watch.story(request_id)
        if not found:
            raise ApiError(
                404,
                f"nothing is known of a request {request_id[:200]!r}: expected the X-Request-Id of "
                "one of the latest that have ended.",
                code="request_not_found",
            )
        return JSONResponse({"sequences": found}, headers={"Cache-Control": "no-store"})

    return router
