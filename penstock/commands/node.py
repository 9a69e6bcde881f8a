"""`penstock node`: one cache for all engines of a machine, as a process of its own."""

from __future__ import annotations

import grp
import json
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.commands import progress_bar
from penstock.commands.config import (
    OPTIONS_TYPED,
    ConfigFile,
    Settings,
    options_as_typed,
    parse_settings,
)
from penstock.commands.engine_arguments import cli_option
from penstock.commands.until_stopped import LogLevel, set_logging, stop_on_signals, tell
from penstock.config import Config
from penstock.config.options import OPTIONS, EngineOptions, load_tiers
from penstock.config.urls import without_password
from penstock.errors import ConfigError
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.metrics.endpoint import MetricsEndpoint
    from penstock.metrics.node import NodeMetrics
    from penstock.node.service import NodeService

EXAMPLE = (
    "Example: penstock node --kv-offloading-size 64 --disk-path /var/cache/penstock --disk-size "
    "500\n\n"
    "Example: penstock node --socket /run/penstock/node.sock --group inference --metrics-port 9600"
)

_DEFAULT = "node.sock"
_ROOT_FOLDER = Path("/run/penstock")

Socket = Annotated[
    str | None,
    typer.Option(
        "--socket",
        metavar="PATH",
        help="The node's Unix socket. Defaults to the setting node.url, then to "
        "$XDG_RUNTIME_DIR/penstock/node.sock, or /run/penstock/node.sock as root.",
        show_default=False,
    ),
]


def node(
    socket: Socket = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Group whose users may use the node. Without it, only this user may.",
            show_default=False,
        ),
    ] = None,
    kv_offloading_size: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="GiB",
            help="DRAM for KV, shared by all engines. Defaults to the setting host.size (see "
            "`penstock config`).",
            show_default=False,
        ),
    ] = None,
    disk_path: Annotated[str | None, cli_option(EngineOptions, "disk_path")] = None,
    disk_size: Annotated[float | None, cli_option(EngineOptions, "disk_size")] = None,
    remote: Annotated[str | None, cli_option(EngineOptions, "remote")] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="Serve /metrics and /health on this port. 0 picks a free port. Default: off.",
            show_default=False,
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(metavar="HOST", help="Address for --metrics-port.")
    ] = "127.0.0.1",
    grace_seconds: Annotated[
        float,
        typer.Option(
            min=0, max=86400, metavar="S", help="Time to finish writes when the node stops."
        ),
    ] = 30.0,
    log_level: Annotated[
        LogLevel, typer.Option(help="info: clients that come and go; debug: more.")
    ] = LogLevel.INFO,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one line of JSON on stdout when the node is ready."),
    ] = False,
) -> None:
    """Run one KV cache for all engines of this machine.

    The node holds DRAM, disk and remote tiers. Engines attach with --node unix://PATH: those with
    the same model share every block, and different models share the DRAM. Stop the node with Ctrl-C
    or SIGTERM: pending KV is written to disk, and engines go on without it until it is back. A
    second signal stops it at once.
    """
    with options_as_typed(OPTIONS.values()):
        options = EngineOptions(
            kv_offloading_size=kv_offloading_size,
            disk_path=disk_path,
            disk_size=disk_size,
            remote=remote,
        )
        tiers = load_tiers(
            options, config, parse_settings(settings or ()), OPTIONS_TYPED, is_node=True
        )
    path = find_socket(socket, tiers)
    tiers = replace(tiers, node=replace(tiers.node, url=None))  # this is the node itself
    group_id = None if group is None else _group_id(group)

    from penstock.metrics.node import NodeMetrics
    from penstock.node.service import NodeService
    from penstock.node.socket_file import check_socket
    from penstock.stores.preflight import check_tiers, warnings

    check_tiers(tiers)
    check_socket(path)
    set_logging(log_level)
    started = time.monotonic()
    metrics = NodeMetrics()
    service = NodeService(
        tiers,
        path,
        group=group_id,
        observers=[] if metrics_port is None else [metrics],
        prepare=True,
    )
    endpoint = None
    try:
        if metrics_port is not None:
            endpoint = _serve_metrics(metrics_host, metrics_port, metrics, service)
        for sentence in warnings(tiers):
            tell(f"warning: {sentence}")
        with stop_on_signals(
            service.stop,
            first="stopping: finishing writes; signal again to stop at once",
            second="stopped at once; KV that was not written yet is lost",
        ):
            _announce(tiers, path, endpoint, time.monotonic() - started, as_json=as_json)
            _serve(service)
            is_finished = service.close(grace_seconds)
    except BaseException:
        service.close(1.0)
        raise
    finally:
        if endpoint is not None:
            endpoint.close()
    if not is_finished:
        tell(f"warning: writes did not end within {grace_seconds:g} s; their KV is lost")
    tell("stopped")
    # A store that hangs could keep its threads, and with them this process.
    sys.stdout.flush()
    logging.shutdown()
    os._exit(0)


def find_socket(given: str | None, config: Config) -> Path:
    """The socket that an option, the settings, or the default names. Raises ConfigError."""
    from penstock.node.connection import SCHEME, socket_path

    url = given if given is not None and given.startswith(SCHEME) else None
    if url is None and given is None:
        url = config.node.url
    if url is not None:
        return socket_path(url)
    if given is not None:
        if not given.strip():
            raise ConfigError(
                "--socket is empty: expected a path; give one, or leave it out for the default."
            )
        return Path(given).expanduser().absolute()
    if os.geteuid() == 0:
        return _ROOT_FOLDER / _DEFAULT
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    if not folder.startswith("/"):
        raise ConfigError(
            "there is no default socket, because XDG_RUNTIME_DIR is not set: expected it or "
            "--socket; add --socket PATH."
        )
    return Path(folder) / "penstock" / _DEFAULT


def _group_id(name: str) -> int:
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):
        raise ConfigError(
            f"--group is {name!r}, which this machine does not have: expected the name or the "
            "number of a group; create it, or choose one that `getent group` lists."
        ) from None


def _serve_metrics(
    host: str, port: int, metrics: NodeMetrics, service: NodeService
) -> MetricsEndpoint:
    from penstock.metrics.endpoint import MetricsEndpoint

    endpoint = MetricsEndpoint(host, port, metrics.expose, metrics.content_type, service.problem)
    if not endpoint.is_local:
        tell(f"warning: anyone who can reach {endpoint.url} sees the metrics, with model names")
    return endpoint


def _announce(
    tiers: Config, path: Path, endpoint: MetricsEndpoint | None, seconds: float, *, as_json: bool
) -> None:
    url = f"unix://{path}"
    if as_json:
        facts = {
            "url": url,
            "socket": str(path),
            "dram_bytes": tiers.host.size_bytes,
            "metrics_url": None if endpoint is None else f"{endpoint.url}/metrics",
            "pid": os.getpid(),
            "seconds": seconds,
        }
        typer.echo(json.dumps(facts))
    else:
        where = f"{format_bytes(tiers.host.size_bytes)} of DRAM"
        if tiers.disk.path is not None:
            where += f", {format_bytes(tiers.disk.size_bytes)} in {tiers.disk.path}"
        if tiers.remote.url is not None:
            where += f", shared store {without_password(tiers.remote.url)}"
        if endpoint is not None:
            where += f"; metrics at {endpoint.url}/metrics"
        typer.echo(f"Penstock node ready at {url}: {where}")
    sys.stdout.flush()


def _serve(service: NodeService) -> None:
    """Until it is stopped. A terminal shows how much of DRAM is allocated, until all of it is."""
    with progress_bar() as tick:

        def is_prepared() -> bool:
            tick("allocating DRAM; engines can attach", service.prepared_share)
            return not service.is_preparing

        service.serve(is_prepared)
    service.serve()
