"""The endpoints. Those under /v1 want the key, where there is one; the others serve operators."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from penstock.server.answers import (
    ChatCompletion,
    Completion,
    ErrorEnvelope,
    HintAnswer,
    Model,
    ModelList,
)
from penstock.server.backend import Backend, Phase, Serving
from penstock.server.body import read_body
from penstock.server.chat import Chat
from penstock.server.completions import Completions
from penstock.server.dashboard import data_routes, page_routes, watch_backend
from penstock.server.guards import guarded_app, key_check
from penstock.server.hinting import follow_hint
from penstock.server.origins import origin_of
from penstock.server.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    HintRequest,
)
from penstock.server.sse import ClientGone, unless_gone
from penstock.server.tenants import tenant_of
from penstock.server.watching import Watch
from penstock.units import MiB

log = logging.getLogger("penstock.server")


@dataclass(frozen=True, slots=True)
class AppSettings:
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 32 * MiB


def make_app(backend: Backend, settings: AppSettings, watch: Watch | None = None) -> FastAPI:
    watch = watch or watch_backend(backend)
    app = guarded_app("OpenAI's chat and text completions over tiered KV.")
    wants_key = Depends(key_check(settings.api_key))
    app.include_router(page_routes())
    app.include_router(_operator_routes(backend))
    app.include_router(data_routes(watch, [wants_key]))
    app.include_router(_openai_routes(backend, settings, wants_key))
    _describe_bodies(app)
    return app


def _operator_routes(backend: Backend) -> APIRouter:
    router = APIRouter(tags=["operation"])
    unavailable: dict[int | str, dict[str, Any]] = {503: {"model": ErrorEnvelope}}

    @router.get("/health", responses=unavailable)
    async def health() -> Response:
        """200 while the process is alive and the engine has not failed, also while it loads."""
        if backend.phase is Phase.FAILED:
            backend.require()
        return JSONResponse({"status": "ok", "phase": backend.phase})

    @router.get("/ready", responses=unavailable)
    async def ready() -> Response:
        """200 while requests are served; 503 while the model loads and while the server stops."""
        backend.require()
        return JSONResponse({"status": "ready"})

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(backend.metrics.expose(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    for path, endpoint in (("/health", health), ("/ready", ready)):  # some balancers ask so
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
    return router


def _openai_routes(backend: Backend, settings: AppSettings, wants_key: Any) -> APIRouter:
    refusals = (400, 401, 404, 408, 413, 415, 429, 500, 503)
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorEnvelope} for status in refusals
    }
    router = APIRouter(
        prefix="/v1",
        tags=["OpenAI"],
        dependencies=[wants_key],
        responses=errors,
    )

    async def answer(request: Request, body: GenerationRequest, work: Chat | Completions) -> Any:
        async def run() -> Response:
            origin = origin_of(request, work.OPERATION)
            generation = await work.start(tenant_of(request, body), origin)
            names = ", ".join(generation.request_ids)
            log.debug("request %s is %s of the engine", request.state.request_id, names)
            if body.stream:
                return work.stream(generation)
            try:
                return await work.whole(generation)
            finally:
                generation.close()

        try:
            return await unless_gone(request.receive, run())
        except ClientGone:
            log.debug("request %s: the client is gone", request.state.request_id)
            return Response(status_code=408)  # to nobody

    @router.post("/chat/completions", response_model=ChatCompletion)
    async def chat_completions(request: Request) -> Any:
        serving = backend.require()
        body = await read_body(request, ChatRequest, settings.max_body_bytes)
        return await answer(request, body, Chat(body, serving))

    @router.post("/completions", response_model=Completion)
    async def completions(request: Request) -> Any:
        serving = backend.require()
        body = await read_body(request, CompletionRequest, settings.max_body_bytes)
        return await answer(request, body, Completions(body, serving))

    @router.post("/penstock/hints", response_model=HintAnswer, tags=["Penstock"])
    async def hints(request: Request) -> HintAnswer:
        """What a client knows of a session's KV, or of a prefix's, between its requests."""
        serving = backend.require()
        body = await read_body(request, HintRequest, settings.max_body_bytes)
        return await follow_hint(body, serving, tenant_of(request, body))

    @router.get("/models", response_model=ModelList)
    async def models() -> ModelList:
        serving = backend.require()
        data = [_model(serving, name) for name in serving.names]
        return ModelList(object="list", data=data)

    @router.get("/models/{name:path}", response_model=Model)
    async def model(name: str) -> Model:
        serving = backend.require()
        return _model(serving, serving.check_name(name))

    return router


def _model(serving: Serving, name: str) -> Model:
    return Model(
        id=name,
        object="model",
        created=serving.created,
        owned_by="penstock",
        max_model_len=serving.service.engine.loaded.max_tokens,
    )


def _describe_bodies(app: FastAPI) -> None:
    """Put the bodies, which the endpoints read themselves, into /openapi.json."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = plain()
            for path, model in (
                ("/v1/chat/completions", ChatRequest),
                ("/v1/completions", CompletionRequest),
                ("/v1/penstock/hints", HintRequest),
            ):
                body = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schema["components"]["schemas"].update(body.pop("$defs", {}))
                schema["components"]["schemas"][model.__name__] = body
                operation = schema["paths"][path]["post"]
                reference = {"$ref": f"#/components/schemas/{model.__name__}"}
                operation["requestBody"] = {
                    "required": True,
                    "content": {"application/json": {"schema": reference}},
                }
                if issubclass(model, GenerationRequest):
                    events = {"schema": {"description": "Chunks, where `stream` is true."}}
                    operation["responses"]["200"]["content"]["text/event-stream"] = events
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]
