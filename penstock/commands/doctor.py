"""`penstock doctor`: check whether an inference engine can use Penstock here."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.commands import (
    JsonFlag,
    Tick,
    new_table,
    print_json,
    progress_bar,
    stdout_console,
)
from penstock.commands.config import OPTIONS_TYPED, ConfigFile, Settings
from penstock.commands.vllm_config import (
    DiskPath,
    DiskSize,
    KvOffloadingSize,
    Node,
    Remote,
    read_settings,
)
from penstock.config import Config
from penstock.config.options import OPTIONS
from penstock.errors import ConfigError, PenstockError
from penstock.units import counted

if TYPE_CHECKING:
    from penstock.commands.settings_checks import Examined
    from penstock.commands.vllm_checks import Check

EXAMPLE = (
    "Example: penstock doctor vllm --kv-offloading-size 32 --disk-path /var/cache/penstock\n\n"
    "Example: penstock doctor vllm --model openai/gpt-oss-120b\n\n"
    'Example: penstock doctor vllm --kv-transfer-config "$(cat kv-transfer-config.json)"'
)
SGLANG_EXAMPLE = (
    "Example: penstock doctor sglang --disk-path /var/cache/penstock --disk-size 500\n\n"
    "Example: penstock doctor sglang --node unix:///run/penstock/node.sock"
)
_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}

app = typer.Typer()


@app.callback(invoke_without_command=True)
def _doctor(context: typer.Context) -> None:
    """Check an installation, and explain how to fix problems."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("vllm", epilog=EXAMPLE)
def check_vllm_installation(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Also check this model, and show what will be kept of it: a known model (see "
            "`penstock plan --list`), a config.json, or its folder.",
        ),
    ] = None,
    kv_offloading_size: KvOffloadingSize = None,
    disk_path: DiskPath = None,
    disk_size: DiskSize = None,
    remote: Remote = None,
    node: Node = None,
    config: ConfigFile = None,
    settings: Settings = None,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Check this value of vLLM's --kv-transfer-config instead of the options above.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check that vLLM can use Penstock with this Python, on this machine.

    The exit code is 0 if all checks passed, 1 if one failed. The command imports vLLM, which takes
    a while, but starts no engine and leaves no files behind.
    """
    from penstock.commands.settings_checks import examine_options, examine_transfer_config
    from penstock.commands.vllm_checks import Status

    names = OPTIONS_TYPED if kv_transfer_config is None else OPTIONS
    options = (kv_offloading_size, disk_path, disk_size, remote, node, config, settings or None)
    if kv_transfer_config is None:
        examined = examine_options(
            lambda: read_settings(
                kv_offloading_size,
                disk_path,
                disk_size,
                remote,
                config,
                settings or (),
                node=node,
            )
        )
    elif any(option is not None for option in options):
        raise ConfigError(
            "both --kv-transfer-config and single settings are given: expected only one of them; "
            "leave out the other"
        )
    else:
        examined = examine_transfer_config(kv_transfer_config)
    with progress_bar() as tick:
        checks = _check_all(examined, names, tick)
    facts = None
    if model is not None:
        from penstock.commands.model_checks import examine_model

        more, facts = examine_model(model, _tiers(examined, names))
        checks += more
    num_failed = sum(check.status is Status.FAILED for check in checks)
    if as_json:
        data = {
            "ok": num_failed == 0,
            "python": sys.executable,
            "checks": [check._asdict() for check in checks],
        }
        print_json(data if facts is None else data | {"model": facts})
    else:
        _draw(checks, num_failed)
    if num_failed:
        raise typer.Exit(1)


def _tiers(examined: Examined, names: Mapping[str, str]) -> Config | None:
    """The settings of the tiers; None if a check has found them invalid."""
    if examined.settings is None:
        return None
    try:
        return examined.settings.tiers(names)
    except PenstockError:
        return None


def _check_all(examined: Examined, names: Mapping[str, str], tick: Tick) -> list[Check]:
    """Run all checks, except those that depend on one that failed."""
    from penstock.commands import node_checks, settings_checks, vllm_checks
    from penstock.commands.vllm_checks import Status

    settings = examined.settings
    tick("looking for vLLM", 0.0)
    allow_untested = settings is not None and settings.allow_untested_vllm
    checks = [vllm_checks.check_vllm(allow_untested=allow_untested)]
    tick("importing the connector", 0.1)
    checks.append(vllm_checks.check_connector())
    tick("checking shared memory", 0.8)
    hashes = vllm_checks.check_hashes()
    checks += [hashes, vllm_checks.check_shared_memory(), *examined.checks]
    if settings is None:
        return checks
    tick("checking memory and disk", 0.9)
    check, tiers = settings_checks.check_tiers(settings, names)
    checks.append(check)
    if tiers is None:
        return checks
    if tiers.node.url is not None:
        is_readable = hashes.status is Status.OK
        return checks + (node_checks.check_node(tiers) if is_readable else [])
    room = settings_checks.check_room(tiers)
    checks += [room, vllm_checks.check_locked_memory(tiers.host.size_bytes)]
    if hashes.status is Status.OK:  # needed to read a store
        refusal = settings_checks.check_anywhere(tiers)
        store = settings_checks.check_disk(tiers.disk, has_room=room.status is Status.OK)
        remote = settings_checks.check_remote(tiers.remote)
        checks += [check for check in (refusal, store, remote) if check is not None]
    return checks


@app.command("sglang", epilog=SGLANG_EXAMPLE)
def check_sglang_installation(
    kv_offloading_size: KvOffloadingSize = None,
    disk_path: DiskPath = None,
    disk_size: DiskSize = None,
    remote: Remote = None,
    node: Node = None,
    config: ConfigFile = None,
    settings: Settings = None,
    allow_untested_sglang: Annotated[
        bool, typer.Option(help="Allow SGLang versions that Penstock has not been tested with.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check that SGLang can use Penstock with this Python, on this machine.

    The exit code is 0 if all checks passed, 1 if one failed. The command imports SGLang, which
    takes a while, but starts no engine and leaves no files behind.
    """
    from penstock.commands import node_checks, settings_checks, sglang_checks, vllm_checks
    from penstock.commands.sglang_config import read_settings as read_sglang_settings
    from penstock.commands.vllm_checks import Check, Status

    with progress_bar() as tick:
        tick("looking for SGLang", 0.0)
        checks = [sglang_checks.check_sglang(allow_untested=allow_untested_sglang)]
        tick("importing the storage", 0.1)
        checks.append(sglang_checks.check_storage())
        tick("checking memory and disk", 0.9)
        hashes = vllm_checks.check_hashes()
        checks.append(hashes)
        try:
            chosen = read_sglang_settings(
                kv_offloading_size,
                disk_path,
                disk_size,
                remote,
                config,
                settings or (),
                node=node,
            )
        except PenstockError as error:
            checks.append(Check("settings", Status.FAILED, str(error)))
        else:
            check, tiers = settings_checks.check_tiers(chosen, OPTIONS_TYPED)
            checks.append(check)
            if tiers is not None and tiers.node.url is not None:
                checks += node_checks.check_node(tiers) if hashes.status is Status.OK else []
            elif tiers is not None:
                room = settings_checks.check_room(tiers)
                checks.append(room)
                if hashes.status is Status.OK:  # needed to read a store
                    has_room = room.status is Status.OK
                    found = (
                        settings_checks.check_anywhere(tiers, is_delegated=False),
                        settings_checks.check_disk(tiers.disk, has_room=has_room),
                        settings_checks.check_remote(tiers.remote),
                    )
                    checks += [each for each in found if each is not None]
    num_failed = sum(check.status is Status.FAILED for check in checks)
    if as_json:
        print_json(
            {
                "ok": num_failed == 0,
                "python": sys.executable,
                "checks": [check._asdict() for check in checks],
            }
        )
    else:
        _draw(checks, num_failed, "SGLang")
    if num_failed:
        raise typer.Exit(1)


def _draw(checks: Sequence[Check], num_failed: int, engine: str = "vLLM") -> None:
    from rich.text import Text

    table = new_table("check", "", "found", title=f"{engine} with Penstock in {sys.executable}")
    for column in table.columns:
        column.justify = "left"
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for check in checks:
        status = Text(check.status, style=_STYLES[check.status])
        table.add_row(check.name, status, check.message)
    console = stdout_console()
    console.print(table)
    if num_failed:
        total = counted(len(checks), "check")
        console.print(f"{num_failed} of {total} failed: {engine} cannot use Penstock yet.")
    else:
        console.print(f"No check failed: {engine} can use Penstock.")
