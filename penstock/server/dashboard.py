"""The dashboard: a static page, and the data that it draws.

The page contains no data and is open to everyone. The data is under /v1 and requires the API key,
if one is set.
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

# Nothing is loaded from other sites, and no text of a model can become part of the page.
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
    """A watch over the server in this process."""

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
    """The same as reading our own /metrics, without writing and parsing the text."""
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
            raise ApiError(404, "the dashboard has no such file; open / instead.")
        return answer(name)

    return router


def data_routes(watch: Watch, dependencies: Sequence[Any] = ()) -> APIRouter:
    router = APIRouter(prefix="/v1/penstock", tags=["Penstock"], dependencies=list(dependencies))

    @router.get("/state")
    async def state() -> Response:
        """The data of the dashboard: where KV is, transfers, time saved, and problems."""
        return JSONResponse(await watch.state(), headers={"Cache-Control": "no-store"})

    @router.get("/live", response_class=Response)
    async def live() -> Response:
        """The same data as server-sent events, once per second."""
        if watch.is_full:
            raise ApiError(
                503,
                f"{MAX_VIEWERS} dashboards are already open; close one, or retry later.",
                code="too_many_viewers",
                retry_after_seconds=5.0,
            )
        return ByteStream(watch.events())

    @router.get("/requests/{request_id}")
    async def story(request_id: str) -> Response:
        """The timeline of a recent request, and where its KV came from."""
        found = watch.story(request_id)
        if not found:
            raise ApiError(
                404,
                f"there is no recent request {request_id[:200]!r}: expected the X-Request-Id of "
                "a request that ended recently.",
                code="request_not_found",
            )
        return JSONResponse({"sequences": found}, headers={"Cache-Control": "no-store"})

    return router
