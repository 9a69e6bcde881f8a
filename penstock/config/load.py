"""Load the settings. Later sources win:

    defaults < TOML file ([host] size = "8GiB") < PENSTOCK_HOST_SIZE=8GiB < --set host.size=8GiB

An unknown name is an error: otherwise a misspelt limit would be silently ignored.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config.settings import (
    ENV_FILE,
    ENV_NAMES,
    ENV_OTHERS,
    ENV_PREFIX,
    SECTIONS,
    SETTINGS,
    Config,
    DiskConfig,
    HostConfig,
    NodeConfig,
    RemoteConfig,
    SettingKind,
    TransferConfig,
    file_key,
    holds,
    wrong,
)
from penstock.config.urls import shown_value, without_password
from penstock.errors import ConfigError, PenstockError


class _Given(NamedTuple):
    """A setting from one source."""

    dotted: str
    value: object
    origin: str
    is_text: bool  # from a source that has only text, so "4" may be a number
    typed: str | None = None  # the option or variable the user typed, if not the name


def load_config(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    options: Mapping[str, str] | None = None,
) -> Config:
    """Read the file, the environment (`os.environ` by default) and the overrides, in this order.

    The file is `path`, or the one named by PENSTOCK_CONFIG, or none. Overrides use dotted names:
    {"host.size": "8GiB"}. If an override came from a command-line option, `options` has the
    option's name. Raises ConfigError. Does not check the settings against the machine.
    """
    env = os.environ if env is None else env
    given: list[_Given] = []
    if path is not None:
        given += _from_file(path, str(path))
    elif env.get(ENV_FILE):
        given += _from_file(Path(env[ENV_FILE]), f"{env[ENV_FILE]} (named by {ENV_FILE})")
    given += _from_env(env)
    options = options or {}
    given += _from_overrides(overrides or {}, options)

    typed: dict[str, str] = {}
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for item in given:
        section, setting = SETTINGS[item.dotted]
        values[section][setting.name] = _read(item, setting.metadata["kind"])
        typed.pop(item.dotted, None)
        if item.typed is not None:
            typed[item.dotted] = item.typed
    return Config(
        host=HostConfig(**values["host"]),
        disk=DiskConfig(**values["disk"]),
        remote=RemoteConfig(**values["remote"]),
        transfer=TransferConfig(**values["transfer"]),
        node=NodeConfig(**values["node"]),
        typed=typed,
    )


@contextmanager
def as_typed(config: Config) -> Iterator[None]:
    """Make errors use the names the user typed: --disk-path, PENSTOCK_HOST_SIZE."""
    try:
        yield
    except PenstockError as error:
        text = str(error)
        if config.typed:
            names = "|".join(re.escape(name) for name in config.typed)
            text = re.sub(rf"(?<![\w./-])({names})(?![\w/-])", _typed_name(config.typed), text)
        if text == str(error):
            raise
        raise type(error)(text) from None


def _typed_name(typed: Mapping[str, str]) -> Callable[[re.Match[str]], str]:
    return lambda match: typed[match[1]]


def describe(config: Config) -> dict[str, dict[str, Any]]:
    """Return the configuration as plain data, with the names used in files and sizes in bytes.

    It is safe to show: a password in a URL is removed.
    """
    shown = {
        section: {
            file_key(setting): getattr(getattr(config, section), setting.name)
            for setting in fields(cls)
        }
        for section, cls in SECTIONS.items()
    }
    if config.remote.url is not None:
        shown["remote"]["url"] = without_password(config.remote.url)
    return shown


def _from_file(path: Path, origin: str) -> Iterator[_Given]:
    advice = "expected a TOML file with settings; correct the path, or leave it out"
    try:
        text = path.read_bytes().decode()
        tables = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {origin}: {advice}") from None
    except IsADirectoryError:
        raise ConfigError(f"{origin} is a folder: {advice}") from None
    except OSError as error:
        raise ConfigError(f"{origin} cannot be read ({error.strerror}): {advice}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{origin} is not UTF-8 text (line {line}): {advice}") from None
    except (ValueError, RecursionError) as error:
        # tomllib reports the line, except at the end of the file.
        end = f"at line {text.rstrip().count(chr(10)) + 1}, the end"
        problem = str(error)[:200].replace("at end of document", end)
        raise ConfigError(
            f"{origin} is not valid TOML: {problem}; expected lines such as "
            'size = "8GiB" below [host]; correct that line'
        ) from None
    for section, table in tables.items():
        if section in SECTIONS and not isinstance(table, dict):
            raise ConfigError(
                f"{section} in {origin} is {shown_value(table)}: expected a section; "
                f"write [{section}] on its own line, and the settings below it"
            )
        if section not in SECTIONS:
            kind = "section" if isinstance(table, dict) else "setting"
            known = SECTIONS if isinstance(table, dict) else SETTINGS
            raise _unknown(kind, section, f"in {origin}", known)
        for key, value in table.items():
            _check_known(f"{section}.{key}", f"in {origin}")
            yield _Given(f"{section}.{key}", value, f"in {origin}", is_text=False)


def _from_env(env: Mapping[str, str]) -> Iterator[_Given]:
    for name, value in env.items():
        if not name.startswith(ENV_PREFIX) or name in ENV_OTHERS:
            continue
        if name not in ENV_NAMES:
            raise _unknown("setting", name, "in the environment", [*ENV_NAMES, *ENV_OTHERS])
        origin = f"in the environment as {name}"
        yield _Given(ENV_NAMES[name], value, origin, is_text=True, typed=name)


def _from_overrides(
    overrides: Mapping[str, object], options: Mapping[str, str]
) -> Iterator[_Given]:
    for dotted, value in overrides.items():
        _check_known(dotted, "in --set")
        option = options.get(dotted)
        yield _Given(dotted, value, "in --set", isinstance(value, str), option)


def _check_known(dotted: str, where: str) -> None:
    if dotted not in SETTINGS:
        raise _unknown("setting", dotted, where, SETTINGS)


def _unknown(what: str, name: str, where: str, known: Iterable[str]) -> ConfigError:
    names = list(known)
    section = name.partition(".")[0] + "."
    own = [other for other in names if other.startswith(section)]
    # A common prefix makes all names look similar, so compare only what follows it.
    shared = section if own else ENV_PREFIX
    candidates = {other.removeprefix(shared): other for other in names}
    if own:
        candidates = {other.partition(".")[2]: other for other in [*reversed(names), *own]}
    if close := difflib.get_close_matches(name.removeprefix(shared), candidates, n=1):
        advice = f"did you mean {candidates[close[0]]}?"
    else:
        advice = f"expected one of {', '.join(own or names)}; correct or remove it"
    return ConfigError(f"unknown {what} {shown_value(name)} {where}: {advice}")


def _read(item: _Given, kind: SettingKind) -> object:
    value = item.value
    name, origin = item.dotted, item.origin
    if origin == "in --set" and item.typed is not None:
        name, origin = item.typed, ""  # the option's name says where it came from
    if kind.optional and item.is_text and str(value).strip().lower() in ("", "none"):
        return None
    try:
        if item.is_text:
            value = kind.from_text(str(value))
        elif value is not None:
            value = kind.from_file(value)
    except ConfigError as error:  # explains the problem itself
        if shown_value(item.value) == repr(item.value):
            raise ConfigError(f"{name} {origin}: {error}".replace(" :", ":")) from None
        raise wrong(name, item.value, origin, kind) from None
    except ValueError:
        raise wrong(name, item.value, origin, kind) from None
    if not holds(kind, value):
        raise wrong(name, item.value, origin, kind)
    return value
