"""`penstock dashboard`: the dashboard of another server, such as a vLLM that runs Penstock."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Annotated

import typer

from penstock.commands.until_stopped import (
    AllowedHosts,
    check_key,
    names_of,
    stop_on_signals,
    tell,
)
from penstock.config import ENV_API_KEY
from penstock.install import SERVER, require
from penstock.watch.scrape import metrics_url

EXAMPLE = (
    "Example: penstock dashboard --metrics http://127.0.0.1:8000\n\n"
    "Example: penstock dashboard --metrics http://gpu7:8000/metrics --port 8101 --json"
)


def dashboard(
    metrics: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="The URL of the server to show: a vLLM that runs Penstock, or a `penstock serve`.",
        ),
    ],
    host: Annotated[
        str, typer.Option(metavar="HOST", help="The address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, metavar="PORT", help="The port to listen on; 0 takes a free one."
        ),
    ] = 8100,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=ENV_API_KEY,
            metavar="KEY",
            help="Required to see the data. Prefer the environment variable: other users can see "
            "command-line arguments.",
            show_default=False,
        ),
    ] = None,
    allowed_host: AllowedHosts = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON on stdout when ready.")
    ] = False,
) -> None:
    """Serve the dashboard of another server, from its /metrics.

    Mostly for a vLLM that runs Penstock: `penstock serve` has the same page at /. If the server
    does not answer, the page says so, and continues once it does. Stop it with Ctrl-C or SIGTERM.
    """
    require("server", SERVER)
    parts = metrics_url(metrics)
    check_key(api_key)

    from penstock.server.hosts import listens_on_loopback
    from penstock.server.listening import bind, url_of
    from penstock.server.remote_dashboard import RemoteDashboard
    from penstock.watch.remote_server import RemoteServer

    server = RemoteServer(parts)
    names = names_of(host, allowed_host)
    listener = bind(host, port)
    url = url_of(listener)
    if api_key is None and not listens_on_loopback(listener):
        tell(
            f"warning: anyone who can reach {url} sees this data; set an --api-key, or listen on "
            "127.0.0.1"
        )

    def announce() -> None:
        tell(f"the dashboard of {server.url} is at {url}")
        if as_json:
            facts = {"url": url, "metrics_url": server.metrics_url, "pid": os.getpid()}
            typer.echo(json.dumps(facts))
            sys.stdout.flush()

    process = RemoteDashboard(listener, server, api_key, announce, names)
    with stop_on_signals(process.stop, first="stopping", second="stopped immediately"):
        asyncio.run(process.run())
    tell("stopped")
