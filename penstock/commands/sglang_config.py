"""`penstock sglang-config`: print the flags that put Penstock below SGLang's hierarchical cache."""

from __future__ import annotations

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
from penstock.commands.vllm_config import absolute, plain_size, warn
from penstock.config import describe
from penstock.config.options import OPTIONS
from penstock.connectors.sglang.settings import SglangSettings, extra_config, flags

EXAMPLE = (
    "Example: penstock sglang-config --disk-path /var/cache/penstock --disk-size 500\n\n"
    "Example: sglang serve MODEL $(penstock sglang-config --disk-path /var/cache/penstock "
    "--disk-size 500)\n\n"
    "Example: sglang serve MODEL $(penstock sglang-config --node unix:///run/penstock/node.sock)"
)


def _option(name: str) -> Any:
    """Return an option without bounds: `SglangSettings` checks the values, here and in SGLang."""
    return cli_option(SglangSettings, name, is_bounded=False)


KvOffloadingSize = Annotated[float | None, _option("kv_offloading_size")]
DiskPath = Annotated[str | None, _option("disk_path")]
DiskSize = Annotated[float | None, _option("disk_size")]
Remote = Annotated[str | None, _option("remote")]
Node = Annotated[str | None, _option("node")]
MetricsPort = Annotated[int | None, _option("metrics_port")]


def sglang_config(
    kv_offloading_size: KvOffloadingSize = None,
    disk_path: DiskPath = None,
    disk_size: DiskSize = None,
    remote: Remote = None,
    node: Node = None,
    config: ConfigFile = None,
    settings: Settings = None,
    metrics_port: MetricsPort = None,
    weights_stay: Annotated[bool, _option("weights_stay")] = False,
    trust_media_names: Annotated[bool, _option("trust_media_names")] = False,
    allow_untested_sglang: Annotated[bool, _option("allow_untested_sglang")] = False,
    no_check: Annotated[
        bool,
        typer.Option(
            "--no-check",
            help="Do not warn if the settings do not fit this machine. For use on another one.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the flags as a list, and the settings in effect."),
    ] = False,
) -> None:
    """Print SGLang's flags on one line, for an unquoted $(...) of a shell.

    The settings file and environment variables (PENSTOCK_HOST_SIZE=8GiB) are not copied: SGLang
    reads them where it runs. Relative paths become absolute.
    """
    chosen = read_settings(
        kv_offloading_size,
        disk_path,
        disk_size,
        remote,
        config,
        settings or (),
        node=node,
        metrics_port=metrics_port,
        weights_stay=weights_stay,
        trust_media_names=trust_media_names,
        allow_untested_sglang=allow_untested_sglang,
    )
    # Imported here because `penstock doctor` must work if its dependencies are missing.
    from penstock.stores.preflight import check_anywhere

    arguments, tiers = flags(chosen, OPTIONS_TYPED), chosen.tiers(OPTIONS_TYPED)
    check_anywhere(tiers)
    if not no_check:
        warn(tiers, remote, "SGLang")
    if not as_json:
        sys.stdout.write(f"{' '.join(arguments)}\n")
        return
    print_json(
        {
            "flags": arguments,
            "extra_config": extra_config(chosen, OPTIONS_TYPED),
            "tiers": describe(tiers),
            "command": shlex.join(["sglang", "serve", "MODEL", *arguments]),
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
    node: str | None = None,
    metrics_port: int | None = None,
    weights_stay: bool = False,
    trust_media_names: bool = False,
    allow_untested_sglang: bool = False,
) -> SglangSettings:
    """Return the settings from the options above, with absolute paths. Raises ConfigError."""
    overrides = parse_settings(settings)
    folder = overrides.get("disk.path")
    if isinstance(folder, str) and folder.strip().lower() != "none":
        overrides["disk.path"] = absolute(folder)
    with options_as_typed(OPTIONS.values()):
        return SglangSettings(
            kv_offloading_size=plain_size(kv_offloading_size),
            disk_path=None if disk_path is None else absolute(disk_path),
            disk_size=plain_size(disk_size),
            remote=remote,
            node=node,
            config=None if config is None else absolute(str(config)),
            set=overrides or None,
            metrics_port=metrics_port,
            weights_stay=weights_stay,
            trust_media_names=trust_media_names,
            allow_untested_sglang=allow_untested_sglang,
        )
