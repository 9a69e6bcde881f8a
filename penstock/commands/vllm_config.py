"""`penstock vllm-config`: print the `--kv-transfer-config` that makes vLLM use Penstock."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.commands import print_json
from penstock.commands.config import (
    OPTIONS_TYPED,
    ConfigFile,
    Settings,
    options_as_typed,
    parse_settings,
)
from penstock.commands.engine_arguments import cli_option
from penstock.config import Config, describe
from penstock.config.options import OPTIONS
from penstock.config.urls import may_hold_secret
from penstock.connectors.vllm.settings import VllmSettings, transfer_config
from penstock.errors import PenstockError

EXAMPLE = (
    'Example: vllm serve MODEL --kv-transfer-config "$(penstock vllm-config '
    '--kv-offloading-size 32)"\n\n'
    "Example: penstock vllm-config --kv-offloading-size 32 --disk-path /var/cache/penstock "
    "--disk-size 500\n\n"
    "Example: penstock vllm-config --node unix:///run/penstock/node.sock"
)


def _option(name: str) -> Any:
    """Return an option without bounds: `VllmSettings` checks the values, here and in vLLM."""
    return cli_option(VllmSettings, name, is_bounded=False)


KvOffloadingSize = Annotated[float | None, _option("kv_offloading_size")]
DiskPath = Annotated[str | None, _option("disk_path")]
DiskSize = Annotated[float | None, _option("disk_size")]
Remote = Annotated[str | None, _option("remote")]
Node = Annotated[str | None, _option("node")]


def vllm_config(
    kv_offloading_size: KvOffloadingSize = None,
    disk_path: DiskPath = None,
    disk_size: DiskSize = None,
    remote: Remote = None,
    node: Node = None,
    config: ConfigFile = None,
    settings: Settings = None,
    always_load: Annotated[bool, _option("always_load")] = False,
    audit_share: Annotated[float, _option("audit_share")] = 0.0,
    allow_untested_vllm: Annotated[bool, _option("allow_untested_vllm")] = False,
    no_check: Annotated[
        bool,
        typer.Option(
            "--no-check",
            help="Do not warn if the settings do not fit this machine. For use on another one.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Also print the settings in effect and the full vllm command."),
    ] = False,
) -> None:
    """Print the value for vLLM's --kv-transfer-config, on one line.

    The settings file and environment variables (PENSTOCK_HOST_SIZE=8GiB) are not copied: vLLM
    reads them where it runs. Relative paths become absolute. If the settings do not fit this
    machine, the command prints a warning, because vLLM may run on another one.
    """
    chosen = read_settings(
        kv_offloading_size,
        disk_path,
        disk_size,
        remote,
        config,
        settings or (),
        node=node,
        always_load=always_load,
        audit_share=audit_share,
        allow_untested_vllm=allow_untested_vllm,
    )
    # Imported here because `penstock doctor` must work if its dependencies are missing.
    from penstock.stores.preflight import check_anywhere, check_delegated

    transfer, tiers = transfer_config(chosen, OPTIONS_TYPED), chosen.tiers(OPTIONS_TYPED)
    check_anywhere(tiers)
    check_delegated(tiers)
    if not no_check:
        warn(tiers, remote)
    line = json.dumps(transfer, allow_nan=False)
    if not as_json:
        sys.stdout.write(f"{line}\n")
        return
    command = ["vllm", "serve", "MODEL", "--kv-transfer-config", line]
    print_json(
        {
            "kv_transfer_config": transfer,
            "tiers": describe(tiers),
            "command": shlex.join(command),
        }
    )


def warn(tiers: Config, remote: str | None, engine: str = "vLLM") -> None:
    """Print what does not fit this machine: the engine may run on another one."""
    from penstock.stores.preflight import check_here, warnings

    if tiers.node.url is not None:
        return  # the node has checked its own settings
    sentences = warnings(tiers)
    try:
        check_here(tiers)
    except PenstockError as error:
        text = str(error).rstrip(".")
        sentences.insert(0, f"{text}. {engine} will not start on this machine with these settings")
    if remote is not None and may_hold_secret(remote):
        sentences.append(
            "the output contains --remote, which may hold a secret (a login or an option); leave "
            f"it out, and set PENSTOCK_REMOTE_URL where {engine} runs instead"
        )
    for sentence in sentences:
        typer.echo(f"penstock: warning: {' '.join(sentence.split())}", err=True)


def read_settings(
    kv_offloading_size: float | None,
    disk_path: str | None,
    disk_size: float | None,
    remote: str | None,
    config: Path | None,
    settings: Iterable[str],
    *,
    node: str | None = None,
    always_load: bool = False,
    audit_share: float = 0.0,
    allow_untested_vllm: bool = False,
) -> VllmSettings:
    """Return the settings from the options above, with absolute paths. Raises ConfigError."""
    overrides = parse_settings(settings)
    folder = overrides.get("disk.path")
    if isinstance(folder, str) and folder.strip().lower() != "none":
        overrides["disk.path"] = absolute(folder)
    with options_as_typed(OPTIONS.values()):
        return VllmSettings(
            kv_offloading_size=plain_size(kv_offloading_size),
            disk_path=None if disk_path is None else absolute(disk_path),
            disk_size=plain_size(disk_size),
            remote=remote,
            node=node,
            config=None if config is None else absolute(str(config)),
            set=overrides or None,
            always_load=always_load,
            audit_share=audit_share,
            allow_untested_vllm=allow_untested_vllm,
        )


def absolute(path: str) -> str:
    # An empty path would become the working folder. Keep it, so that it is rejected later.
    return os.path.abspath(os.path.expanduser(path)) if path.strip() else path


def plain_size(size: float | None) -> float | None:
    """Return 32 instead of 32.0."""
    return int(size) if size is not None and size.is_integer() else size
