"""`penstock vllm-config`: the `--kv-transfer-config` with which vLLM uses Penstock."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from penstock.commands import print_json
from penstock.commands.config import parse_settings
from penstock.config import describe
from penstock.connectors.vllm.settings import VllmSettings, transfer_config
from penstock.machine import check_machine

EXAMPLE = (
    'Example: vllm serve MODEL --kv-transfer-config "$(penstock vllm-config '
    '--kv-offloading-size 32)"\n\n'
    "Example: penstock vllm-config --kv-offloading-size 32 --disk-path /var/cache/penstock "
    "--disk-size 500"
)

# Without bounds: the settings judge their numbers, in vLLM as here.
KvOffloadingSize = Annotated[
    float | None,
    typer.Option(
        metavar="GiB",
        help="DRAM for KV, for all workers together. By default host.size of the settings.",
    ),
]
DiskPath = Annotated[
    str | None, typer.Option(metavar="DIR", help="A folder for KV that survives a restart.")
]
DiskSize = Annotated[float | None, typer.Option(metavar="GiB", help="The most that folder takes.")]
Remote = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="A store that instances share: redis://host, s3://bucket/prefix, mooncake://host. "
        "A password is better kept out of it: set PENSTOCK_REMOTE_URL where vLLM runs.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A TOML file of settings; else the one PENSTOCK_CONFIG names.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A setting that overrules all others; may be repeated."
    ),
]


def vllm_config(
    kv_offloading_size: KvOffloadingSize = None,
    disk_path: DiskPath = None,
    disk_size: DiskSize = None,
    remote: Remote = None,
    config: ConfigFile = None,
    settings: Settings = None,
    always_load: Annotated[
        bool, typer.Option("--always-load", help="Load also what would be computed sooner.")
    ] = False,
    allow_untested_vllm: Annotated[
        bool,
        typer.Option(
            "--allow-untested-vllm", help="Start in a vLLM that Penstock was never tested with."
        ),
    ] = False,
    no_check: Annotated[
        bool,
        typer.Option(
            "--no-check", help="For another machine: do not ask whether this one can hold it."
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Also the settings in force and the whole command, indented."),
    ] = False,
) -> None:
    """Print what vLLM wants as --kv-transfer-config, on one line.

    FILE and the environment (PENSTOCK_HOST_SIZE=8GiB) are not copied into it: vLLM reads them
    where it runs. Paths become absolute, since that may be in another folder.
    """
    chosen = read_settings(
        kv_offloading_size,
        disk_path,
        disk_size,
        remote,
        config,
        settings or (),
        always_load=always_load,
        allow_untested_vllm=allow_untested_vllm,
    )
    transfer, tiers = transfer_config(chosen), chosen.tiers()
    if not no_check:
        check_machine(tiers)
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


def read_settings(
    kv_offloading_size: float | None,
    disk_path: str | None,
    disk_size: float | None,
    remote: str | None,
    config: Path | None,
    settings: Iterable[str],
    *,
    always_load: bool = False,
    allow_untested_vllm: bool = False,
) -> VllmSettings:
    """As the options above give them, with absolute paths. Raises ConfigError."""
    overrides = parse_settings(settings)
    folder = overrides.get("disk.path")
    if isinstance(folder, str) and folder.strip().lower() != "none":
        overrides["disk.path"] = _absolute(folder)
    return VllmSettings(
        kv_offloading_size=_plain(kv_offloading_size),
        disk_path=None if disk_path is None else _absolute(disk_path),
        disk_size=_plain(disk_size),
        remote=remote,
        config=None if config is None else _absolute(str(config)),
        set=overrides or None,
        always_load=always_load,
        allow_untested_vllm=allow_untested_vllm,
    )


def _absolute(path: str) -> str:
    # An empty path would become the working folder; whoever reads it shall refuse it.
    return os.path.abspath(os.path.expanduser(path)) if path.strip() else path


def _plain(size: float | None) -> float | None:
    """32, not 32.0, as a person would write it."""
    return int(size) if size is not None and size.is_integer() else size
