"""`penstock serve`: OpenAI's API over the embedded engine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.commands.engine_arguments import (
    EngineArguments,
    with_engine,
)
from penstock.commands.until_stopped import (
    AllowedHosts,
    check_key,
    names_of,
    stop_on_signals,
    tell,
)
from penstock.config import ENV_API_KEY
from penstock.config.options import EMBEDDED
from penstock.errors import ConfigError, NotInstalled
from penstock.install import ENGINE, SERVER, how_to_install, require

if TYPE_CHECKING:
    from penstock.server.backend import Serving
    from penstock.server.tracing import Tracer

EXAMPLE = (
    "Example: penstock serve --kv-offloading-size 8 --disk-path /var/cache/penstock --disk-size 64"
)


EXIT_LOST = 70  # the engine failed and could not recover: whoever supervises starts another


class TenantFrom(StrEnum):
    HEADER = "header"
    USER = "user"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@with_engine
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a .gguf file, a name on the Hugging Face hub, or smollm2-135m.",
        ),
    ] = EMBEDDED,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="The address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="0 takes a free one.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=ENV_API_KEY,
            metavar="KEY",
            help="Wanted of every request to /v1. Safer in the environment: others see options.",
            show_default=False,
        ),
    ] = None,
    allowed_host: AllowedHosts = None,
    tenant_from: Annotated[
        TenantFrom,
        typer.Option(
            help="What names the tenant, whose KV no other finds: the header X-Penstock-Tenant, or "
            "else (user) OpenAI's field user."
        ),
    ] = TenantFrom.HEADER,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="What clients call the model; may be repeated.", show_default=False
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A Jinja template for chats, or the template itself; by default the model's own.",
            show_default=False,
        ),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(min=1024, metavar="BYTES", help="Larger requests are refused.")
    ] = 32 << 20,
    grace_seconds: Annotated[
        float,
        typer.Option(
            min=0, max=86400, metavar="S", help="How long running requests may finish at the end."
        ),
    ] = 30.0,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a line for each request, for `penstock sim`; no text, no token.",
            show_default=False,
        ),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send each request's spans to this OpenTelemetry collector, over HTTP: its "
            "/v1/traces, or what that lies below. By default as OTEL_EXPORTER_OTLP_ENDPOINT says.",
            show_default=False,
        ),
    ] = None,
    log_level: Annotated[
        LogLevel,
        typer.Option(
            help="info: a line for each request, and the throughput; debug: also probes, and each "
            "request's story."
        ),
    ] = LogLevel.INFO,
    as_json: Annotated[
        bool, typer.Option("--json", help="When ready, print one line of JSON on stdout.")
    ] = False,
    *,
    engine: EngineArguments,
) -> None:
    """Serve a model over HTTP in OpenAI's format, with KV in tiers.

    /health answers from the start, /ready once the model is loaded. Stop it with Ctrl-C or
    SIGTERM: running requests finish, KV on disk is complete; a second time it stops at once.
    An engine that fails and cannot recover ends it with 70: have it started again.
    """
    require("server", SERVER)
    require("engine", ENGINE)
    tiers = engine.tiers(model)
    check_key(api_key)
    names = tuple(served_model_name or ())
    if not all(name.strip() for name in names):
        raise ConfigError("a --served-model-name is empty; clients need something to call it.")
    hosts = names_of(host, allowed_host)
    template = None if chat_template is None else _read_template(chat_template)
    _set_logging(log_level)

    from penstock.metrics import Metrics
    from penstock.server.app import AppSettings
    from penstock.server.backend import Backend, BackendPhase
    from penstock.server.hosts import listens_on_loopback
    from penstock.server.listening import bind, url_of
    from penstock.server.load import load_serving
    from penstock.server.process import Process, ProcessSettings
    from penstock.server.record import Recorder
    from penstock.server.tenants import TenantSource

    tracer = _open_tracer(otlp_traces_endpoint)
    recorder = None if record is None else Recorder(record)
    listener = bind(host, port)
    started, url = time.monotonic(), url_of(listener)
    tell(f"listening on {url}")
    if api_key is None and not listens_on_loopback(listener):
        tell(
            f"warning: everybody who reaches {url} may use it; give an --api-key, or listen on "
            "127.0.0.1"
        )
    backend = Backend(Metrics())

    def load() -> Serving:
        return load_serving(
            engine.options(model),
            tiers,
            observers=backend.observers,
            names=names,
            tell=tell,
            recorder=recorder,
            tracer=tracer,
            chat_template=template,
        )

    def announce(serving: Serving) -> None:
        seconds = time.monotonic() - started
        if as_json:
            facts = {"url": url, "models": serving.names, "pid": os.getpid(), "seconds": seconds}
            typer.echo(json.dumps(facts))
        else:
            typer.echo(_ready_text(url, serving.names[0], seconds, has_key=api_key is not None))
        sys.stdout.flush()

    app = AppSettings(api_key, max_body_bytes, hosts, TenantSource(tenant_from.value))
    settings = ProcessSettings(app, grace_seconds)
    process = Process(listener, backend, load, settings, announce)
    with stop_on_signals(
        process.stop,
        first="stopping: running requests may finish; ask again to stop at once",
        second="stopped at once; requests that were running are cut off",
    ):
        was_loaded = asyncio.run(process.run())
    if not was_loaded:
        # The loader cannot be interrupted, and has written nothing that a crash could spoil.
        sys.stdout.flush()
        os._exit(0)
    if recorder is not None:
        recorder.close()
    if tracer is not None:
        tracer.close()
    if backend.phase is BackendPhase.FAILED:
        tell("the engine failed and could not recover; start the server again")
        sys.stdout.flush()
        os._exit(EXIT_LOST)  # at once: a device that is gone may hold up an orderly end for ever
    tell("stopped")


def _read_template(given: str) -> str:
    """A file's content, or what is given if that can be no file's name, as vLLM tells them apart.

    Raises ConfigError for a file that cannot be read.
    """
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and any(mark in given for mark in "{}\n"):
            return given
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--chat-template {given[:200]!r} cannot be read ({reason}): expected a Jinja template "
            "in a file, in UTF-8; name one."
        ) from None


def _open_tracer(option: str | None) -> Tracer | None:
    """None if nobody wants spans. Raises ConfigError if they are wanted and cannot be sent."""
    from penstock.server.collector import ENV_DISABLED, find_collector, is_disabled

    if option is not None and is_disabled(os.environ):
        tell(f"{ENV_DISABLED} is true: no spans are sent")
    collector = find_collector(option, os.environ)
    if collector is None:
        return None
    try:
        from penstock.server.tracing import Tracer
    except ModuleNotFoundError as error:
        raise NotInstalled(
            f"{collector.source} asks for spans, and {error.name} is not installed; "
            f"{how_to_install('otel')}, or set {ENV_DISABLED}=true."
        ) from None
    tracer = Tracer(collector.url)
    tell(f"spans of requests go to {collector.url}")
    return tracer


def _ready_text(url: str, model: str, seconds: float, *, has_key: bool) -> str:
    key = f'-H "Authorization: Bearer ${ENV_API_KEY}" ' if has_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return (
        f"Penstock serves {model} on {url}/v1, ready after {seconds:.1f} s. Try it:\n"
        f"  curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'"
    )


def _set_logging(level: LogLevel) -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("penstock").setLevel(level.value.upper())
    # It tells of every connection that comes and goes.
    quiet = logging.INFO if level is LogLevel.DEBUG else logging.WARNING
    logging.getLogger("uvicorn").setLevel(quiet)
