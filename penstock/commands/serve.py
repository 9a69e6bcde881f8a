"""`penstock serve`: an OpenAI-compatible server for the embedded engine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.commands.engine_arguments import EngineArguments, ModelArgument, with_engine
from penstock.commands.until_stopped import (
    AllowedHosts,
    LogLevel,
    check_key,
    names_of,
    set_logging,
    stop_on_signals,
    tell,
)
from penstock.config import ENV_API_KEY, Config
from penstock.config.options import EMBEDDED
from penstock.engine.params import MENDING_MODES
from penstock.errors import ConfigError, NotInstalled
from penstock.install import ENGINE, SERVER, how_to_install, require
from penstock.server.tools.formats import FORMATS, find_format

if TYPE_CHECKING:
    from penstock.server.backend import Serving
    from penstock.server.tracing import Tracer

EXAMPLE = (
    "Example: penstock serve --kv-offloading-size 8 --disk-path /var/cache/penstock --disk-size 64"
)


EXIT_LOST = 70  # the engine failed and could not recover: a supervisor should restart the server


class TenantFrom(StrEnum):
    HEADER = "header"
    USER = "user"


class Role(StrEnum):
    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@with_engine
def serve(
    model: ModelArgument = EMBEDDED,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, metavar="PORT", help="Port to listen on. 0 picks a free port."
        ),
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=ENV_API_KEY,
            metavar="KEY",
            help="Required for requests to /v1. Prefer the environment variable: other users can "
            "see command-line arguments.",
            show_default=False,
        ),
    ] = None,
    allowed_host: AllowedHosts = None,
    tenant_from: Annotated[
        TenantFrom,
        typer.Option(
            help="Where a request names its tenant. Tenants never share KV. header: the header "
            "X-Penstock-Tenant; user: that header or, without it, the request field `user`."
        ),
    ] = TenantFrom.HEADER,
    role: Annotated[
        Role,
        typer.Option(
            help="What this server does if a router divides requests between two servers (see "
            "docs/disaggregation.md). prefill: computes prompts. decode: takes the KV of prompts "
            "from the shared tiers, and generates. both: either, as each request says."
        ),
    ] = Role.BOTH,
    kv_mending: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="How segments that are reused anywhere are mended, unless a request says so: "
            f"{', '.join(MENDING_MODES)} (see docs/anywhere.md).",
        ),
    ] = MENDING_MODES[0],
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Model name in the API. Defaults to the model's own name. May be repeated.",
            show_default=False,
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Jinja chat template: a file, or the template itself. Defaults to the model's.",
            show_default=False,
        ),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"How the model writes tool calls: {', '.join(FORMATS)}. By default it "
            "is chosen from the chat template.",
            show_default=False,
        ),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(min=1024, metavar="BYTES", help="Maximum size of a request body.")
    ] = 32 << 20,
    grace_seconds: Annotated[
        float,
        typer.Option(
            min=0,
            max=86400,
            metavar="S",
            help="Time for running requests to finish when the server stops.",
        ),
    ] = 30.0,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write one line per request to this file, without text or tokens, for `penstock "
            "sim`.",
            show_default=False,
        ),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send traces to this OpenTelemetry collector over HTTP: its base URL, or its "
            "/v1/traces endpoint. Defaults to OTEL_EXPORTER_OTLP_ENDPOINT.",
            show_default=False,
        ),
    ] = None,
    log_level: Annotated[
        LogLevel,
        typer.Option(
            help="info: one line per request, and the throughput; debug: also health checks, and "
            "the steps of each request."
        ),
    ] = LogLevel.INFO,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one line of JSON on stdout when the server is ready."),
    ] = False,
    *,
    engine: EngineArguments,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API, with KV offloading.

    /health responds immediately, /ready once the model is loaded. Stop the server with Ctrl-C or
    SIGTERM: running requests finish, and pending KV is written to disk. A second signal stops it at
    once. If the engine fails and cannot recover, the exit code is 70: restart the server.
    """
    require("server", SERVER)
    require("engine", ENGINE)
    tiers = engine.tiers(model)
    check_key(api_key)
    names = tuple(served_model_name or ())
    if not all(name.strip() for name in names):
        raise ConfigError(
            "--served-model-name is empty: expected a name; give one, or leave it out."
        )
    mending = {"mode": kv_mending}
    if kv_mending not in MENDING_MODES:
        raise ConfigError(
            f"--kv-mending is {kv_mending!r}: expected one of {', '.join(MENDING_MODES)}; correct "
            "it, or leave it out."
        )
    if tool_call_parser is not None:
        find_format(tool_call_parser)
    hosts = names_of(host, allowed_host)
    template = None if chat_template is None else _read_template(chat_template)
    set_logging(log_level)

    from penstock.metrics import Metrics
    from penstock.server.app import AppSettings
    from penstock.server.backend import Backend, BackendPhase
    from penstock.server.handed_over import ServerRole
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
            f"warning: anyone who can reach {url} can use it; set --api-key, or listen on 127.0.0.1"
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
            mending=mending,
            tool_call_parser=tool_call_parser,
        )

    def announce(serving: Serving) -> None:
        seconds = time.monotonic() - started
        if as_json:
            facts = {"url": url, "models": serving.names, "pid": os.getpid(), "seconds": seconds}
            typer.echo(json.dumps(facts))
        else:
            typer.echo(_ready_text(url, serving.names[0], seconds, has_key=api_key is not None))
        sys.stdout.flush()

    if role is not Role.BOTH:
        _check_shares(role, tiers)
    app = AppSettings(
        api_key,
        max_body_bytes,
        hosts,
        TenantSource(tenant_from.value),
        ServerRole(role.value),
    )
    settings = ProcessSettings(app, grace_seconds)
    process = Process(listener, backend, load, settings, announce)
    with stop_on_signals(
        process.stop,
        first="stopping: waiting for running requests; signal again to stop at once",
        second="stopped at once; running requests were aborted",
    ):
        was_loaded = asyncio.run(process.run())
    if not was_loaded:
        # The loader cannot be interrupted. It has written nothing that exiting could damage.
        sys.stdout.flush()
        os._exit(0)
    if recorder is not None:
        recorder.close()
    if tracer is not None:
        tracer.close()
    if backend.phase is BackendPhase.FAILED:
        tell("the engine failed and could not recover; restart the server")
        sys.stdout.flush()
        os._exit(EXIT_LOST)  # a lost device could block a clean exit forever
    tell("stopped")


def _check_shares(role: Role, tiers: Config | None) -> None:
    """A role needs tiers that another server sees too."""
    if tiers is None or (tiers.node.url is None and tiers.remote.url is None):
        raise ConfigError(
            f"--role is {role.value}, but no tier is shared with another server: expected --node, "
            "or --remote; add one of them, or leave out --role."
        )


def _read_template(given: str) -> str:
    """Return the content of a file, or the text itself if it looks like a template, as in vLLM.

    Raises ConfigError if the file cannot be read.
    """
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and any(mark in given for mark in "{}\n"):
            return given
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--chat-template {given[:200]!r} cannot be read ({reason}): expected a UTF-8 file "
            "with a Jinja template; correct the path."
        ) from None


def _open_tracer(option: str | None) -> Tracer | None:
    """Return None if tracing is off. Raises ConfigError if traces cannot be sent."""
    from penstock.server.collector import ENV_DISABLED, find_collector, is_disabled

    if option is not None and is_disabled(os.environ):
        tell(f"{ENV_DISABLED} is true: traces are not sent")
    collector = find_collector(option, os.environ)
    if collector is None:
        return None
    try:
        from penstock.server.tracing import Tracer
    except ModuleNotFoundError as error:
        raise NotInstalled(
            f"{collector.source} is set, but tracing needs {error.name}, which is not installed; "
            f"{how_to_install('otel')}, or set {ENV_DISABLED}=true to disable tracing."
        ) from None
    tracer = Tracer(collector.url)
    tell(f"sending traces to {collector.url}")
    return tracer


def _ready_text(url: str, model: str, seconds: float, *, has_key: bool) -> str:
    key = f'-H "Authorization: Bearer ${ENV_API_KEY}" ' if has_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return (
        f"Penstock serves {model} on {url}/v1, ready after {seconds:.1f} s. Try it:\n"
        f"  curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'"
    )
