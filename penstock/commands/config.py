"""`penstock config`: print the settings in effect, checked on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.commands import JsonFlag, new_table, print_json, stdout_console
from penstock.config import Config, describe, load_config
from penstock.config.options import OPTIONS
from penstock.config.urls import shown_value
from penstock.errors import ConfigError, PenstockError
from penstock.units import format_bytes

# Settings that also have a command-line option in other commands, with that option.
OPTIONS_TYPED = {setting: f"--{option.replace('_', '-')}" for setting, option in OPTIONS.items()}
EXAMPLE = "Example: penstock config --config penstock.toml --set host.size=8GiB"


def file_option(panel: str | None = None) -> Any:
    return typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file with settings. Defaults to the file named by PENSTOCK_CONFIG.",
        rich_help_panel=panel,
    )


def set_option(panel: str | None = None) -> Any:
    return typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting, such as host.size=8GiB. Overrides all other sources. May be repeated.",
        rich_help_panel=panel,
    )


ConfigFile = Annotated[Path | None, file_option()]
Settings = Annotated[list[str] | None, set_option()]


def config(
    file: ConfigFile = None,
    settings: Settings = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the settings in effect, and check that they work on this machine.

    Fails if a server could not start with them, for example if there is not enough memory, another
    process writes to the disk folder, or a URL is invalid. Writes nothing and connects to no store.

    Later sources win: defaults, the TOML file, the environment (PENSTOCK_HOST_SIZE=8GiB), --set.
    """
    loaded = load_config(file, overrides=parse_settings(settings or ()))
    from penstock.stores.preflight import check_tiers, warnings

    check_tiers(loaded)
    for sentence in warnings(loaded):
        typer.echo(f"penstock: warning: {sentence}", err=True)
    sections = describe(loaded)
    if as_json:
        print_json(sections)
        return
    table = new_table("setting", "value", "default")
    defaults = describe(Config())
    for section, values in sections.items():
        for key, value in values.items():
            default = defaults[section][key]
            changed = value != default
            table.add_row(
                f"{section}.{key}",
                _show(key, value),
                _show(key, default) if changed else "",
                style="bold" if changed else "",
            )
        table.add_section()
    stdout_console().print(table)


def parse_settings(settings: Iterable[str]) -> dict[str, object]:
    """Parse settings such as "host.size=8GiB". If a name repeats, the last one wins."""
    parsed: dict[str, object] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (equals and name.strip()):
            raise ConfigError(
                f"--set {shown_value(setting)} is not a setting: expected NAME=VALUE, such as "
                "--set host.size=8GiB"
            )
        parsed[name.strip()] = value
    return parsed


@contextmanager
def options_as_typed(names: Iterable[str]) -> Iterator[None]:
    """Make errors name options as they are typed: --disk-path instead of disk_path."""
    # Names of one word are not replaced: they may be ordinary words.
    options = "|".join(name for name in names if "_" in name)
    try:
        yield
    except PenstockError as error:
        pattern = rf"(?<![\w./-])({options})(?![\w/.-]*[\w/-])"
        text = re.sub(pattern, lambda match: f"--{match[1].replace('_', '-')}", str(error))
        if text == str(error):
            raise
        raise type(error)(text) from None


def _show(key: str, value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    is_size = key == "size" or key.endswith("_bytes")
    return format_bytes(value) if is_size and isinstance(value, int) else str(value)
