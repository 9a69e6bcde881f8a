"""The endpoints. If an API key is set, /v1 and the tokenizer require it; operators' endpoints are
open."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from penstock.install import VERSION
from penstock.server.access import access_of
from penstock.server.answers import (
    ChatCompletion,
    Completion,
    Detokenized,
    ErrorEnvelope,
    HintAnswer,
    Model,
    ModelList,
    Tokenized,
)
from penstock.server.backend import Backend, BackendPhase, Serving
from penstock.server.body import read_body
from penstock.server.chat import ChatAnswer
from penstock.server.completions import Completions
from penstock.server.dashboard import data_routes, page_routes, watch_backend
from penstock.server.guards import guarded_app, key_check
from penstock.server.handed_over import HandedOver, ServerRole
from penstock.server.hints import follow_hint
from penstock.server.hosts import Hosts
from penstock.server.origins import origin_of
from penstock.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    HintRequest,
    TokenizeRequest,
)
from penstock.server.sse import ClientGone, unless_gone
from penstock.server.tenants import TenantSource, tenant_of
from penstock.server.tokens import detokenize, tokenize
from penstock.server.unknown_fields import UnknownFields
from penstock.server.watching import Watch
from penstock.units import MiB

log = logging.getLogger("penstock.server")


@dataclass(frozen=True, slots=True)
class AppSettings:
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 32 * MiB
    allowed_hosts: tuple[str, ...] = ()  # besides this machine's own names: see hosts.py
    tenant_from: TenantSource = TenantSource.HEADER
    role: ServerRole = ServerRole.BOTH


def make_app(
    backend: Backend,
    settings: AppSettings,
    watch: Watch | None = None,
    hosts: Hosts | None = None,
) -> FastAPI:
    """Without `hosts`, only loopback names are accepted."""
    watch = watch or watch_backend(backend)
    hosts = hosts or Hosts(settings.allowed_hosts)
    app = guarded_app("OpenAI's chat and text completions over tiered KV.", hosts, settings.api_key)
    wants_key = Depends(key_check(settings.api_key))
    app.include_router(page_routes())
    app.include_router(_operator_routes(backend))
    app.include_router(data_routes(watch, [wants_key]))
    app.include_router(_openai_routes(backend, settings, wants_key))
    app.include_router(_tokenizer_routes(backend, settings, wants_key))
    _describe_bodies(app)
    return app


def _operator_routes(backend: Backend) -> APIRouter:
    router = APIRouter(tags=["operation"])
    unavailable: dict[int | str, dict[str, Any]] = {503: {"model": ErrorEnvelope}}

    @router.get("/health", responses=unavailable)
    async def health() -> Response:
        """200 unless the engine has failed; also while the model loads."""
        if backend.phase is BackendPhase.FAILED:
            backend.require()
        return JSONResponse({"status": "ok", "phase": backend.phase})

    @router.get("/ready", responses=unavailable)
    async def ready() -> Response:
        """200 while requests are served; 503 while the model loads or the server stops."""
        backend.require()
        return JSONResponse({"status": "ready"})

    @router.get("/version")
    async def version() -> Response:
        """Penstock's version."""
        return JSONResponse({"version": VERSION})

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(backend.metrics.expose(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    for path, endpoint in (("/health", health), ("/ready", ready)):  # some load balancers send HEAD
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
    # Some platforms, and deployments that come from vLLM, use this name for /health.
    router.add_api_route("/ping", health, methods=["GET", "POST"], include_in_schema=False)
    return router


def _errors() -> dict[int | str, dict[str, Any]]:
    refusals = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
    return {status: {"model": ErrorEnvelope} for status in refusals}


def _tokenizer_routes(backend: Backend, settings: AppSettings, wants_key: Any) -> APIRouter:
    router = APIRouter(tags=["vLLM"], dependencies=[wants_key], responses=_errors())

    @router.post("/tokenize", response_model=Tokenized)
    async def to_tokens(request: Request) -> Tokenized:
        """The token ids of a text, or of a conversation rendered with the chat template."""
        serving = backend.require()
        body = await read_body(request, TokenizeRequest, settings.max_body_bytes)
        return await tokenize(body, serving)

    @router.post("/detokenize", response_model=Detokenized)
    async def to_text(request: Request) -> Detokenized:
        """The text of token ids."""
        serving = backend.require()
        body = await read_body(request, DetokenizeRequest, settings.max_body_bytes)
        return await detokenize(body, serving)

    return router


def _openai_routes(backend: Backend, settings: AppSettings, wants_key: Any) -> APIRouter:
    router = APIRouter(
        prefix="/v1",
        tags=["OpenAI"],
        dependencies=[wants_key],
        responses=_errors(),
    )
    unknown = UnknownFields()
    handed_over = HandedOver(settings.role)

    async def answer(
        request: Request, body: GenerationRequest, work: ChatAnswer | Completions
    ) -> Any:
        unknown.note(body)
        access = access_of(request.scope)

        async def run() -> Response:
            origin = origin_of(request, work.OPERATION)
            tenant = tenant_of(request, body, settings.tenant_from)
            generation = await work.start(tenant, origin)
            if access is not None:
                access.usage = generation.usage
            names = ", ".join(generation.request_ids)
            log.debug("request %s has the engine's ids %s", request.state.request_id, names)
            if body.stream:
                return work.stream(generation)
            if handed_over.is_asked(body):
                handed_over.compute(generation)
                return work.handed_over(generation, handed_over.params)
            try:
                return await work.whole(generation)
            finally:
                generation.close()

        try:
            return await unless_gone(request.receive, run())
        except ClientGone:
            if access is not None:
                access.is_gone = True
            log.debug("request %s: the client hung up", request.state.request_id)
            return Response(status_code=408)  # not received: the client hung up

    @router.post("/chat/completions", response_model=ChatCompletion)
    async def chat_completions(request: Request) -> Any:
        serving = backend.require()
        body = await read_body(request, ChatRequest, settings.max_body_bytes)
        return await answer(request, body, ChatAnswer(body, serving))

    @router.post("/completions", response_model=Completion)
    async def completions(request: Request) -> Any:
        serving = backend.require()
        body = await read_body(request, CompletionRequest, settings.max_body_bytes)
        return await answer(request, body, Completions(body, serving))

    @router.post("/penstock/hints", response_model=HintAnswer, tags=["Penstock"])
    async def hints(request: Request) -> HintAnswer:
        """A hint about the KV of a session or a prefix, sent between requests."""
        serving = backend.require()
        body = await read_body(request, HintRequest, settings.max_body_bytes)
        tenant = tenant_of(request, body, settings.tenant_from)
        return await follow_hint(body, serving, tenant)

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
        max_model_len=serving.max_tokens,
    )


def _describe_bodies(app: FastAPI) -> None:
    """Add the request bodies to /openapi.json: the endpoints read them, not FastAPI."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = plain()
            for path, model in (
                ("/v1/chat/completions", ChatRequest),
                ("/v1/completions", CompletionRequest),
                ("/v1/penstock/hints", HintRequest),
                ("/tokenize", TokenizeRequest),
                ("/detokenize", DetokenizeRequest),
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
