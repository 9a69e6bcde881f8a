"""All settings, as frozen dataclasses, and the one loader that fills them.

A setting is named `section.key`. Later sources win:

    defaults < TOML file ([host] size = "8GiB") < PENSTOCK_HOST_SIZE=8GiB < --set host.size=8GiB

A name nobody knows is an error: a misspelt limit must not silently become no limit.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ConfigError, PenstockError
from penstock.units import GiB, MiB, parse_bytes
from penstock.urls import HIDDEN, shown_value, without_password

POLICIES = ("reuse", "prefix-lru", "lru", "s3fifo", "arc", "lfu")
ADMISSIONS = ("always", "second-use")
ENV_PREFIX = "PENSTOCK_"
ENV_FILE = "PENSTOCK_CONFIG"
# Read where they are needed: a secret is no setting.
ENV_API_KEY = "PENSTOCK_API_KEY"
ENV_REMOTE_SECRET = "PENSTOCK_REMOTE_SECRET"

_ENV_OTHERS = (ENV_FILE, ENV_API_KEY, ENV_REMOTE_SECRET)
_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a setting may be, and how it is read."""

    expected: str
    accepts: Callable[[Any], bool]  # judges the value as the dataclass holds it
    from_text: Callable[[str], object]  # ValueError where the text is no such thing
    from_file: Callable[[Any], object] = lambda value: value
    optional: bool = False
    may_be_secret: bool = False


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _whole(low: int, high: int, *, optional: bool = False) -> _Kind:
    return _Kind(
        f"a whole number from {low} to {high}",
        accepts=lambda value: _is_whole(value, low, high),
        from_text=int,
        optional=optional,
    )


def _bool_from_text(text: str) -> bool:
    word = text.strip().lower()
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ValueError(text)


_SIZE = _Kind(
    'a size above 0 and below 8EiB such as "32GiB"',
    accepts=lambda value: _is_whole(value, 1, (1 << 63) - 1),
    from_text=parse_bytes,
    from_file=parse_bytes,
)
_OPTIONAL_SIZE = replace(_SIZE, optional=True)
_FLAG = _Kind(
    "true or false", accepts=lambda value: isinstance(value, bool), from_text=_bool_from_text
)


def _seconds(most: int, *, optional: bool = False) -> _Kind:
    return _Kind(
        f"a number of seconds above 0 and up to {most}",
        accepts=lambda value: (
            isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most
        ),
        from_text=float,
        # Whole seconds in a file are seconds all the same.
        from_file=lambda value: float(value) if _is_whole(value, 0, most) else value,
        optional=optional,
    )


def _one_of(words: tuple[str, ...]) -> _Kind:
    return _Kind(
        " or ".join(f'"{word}"' for word in words),
        accepts=lambda value: value in words,
        from_text=str.strip,
    )


_SECONDS = _seconds(_SECONDS_PER_DAY)
_POLICY = _one_of(POLICIES)
_ADMISSION = _one_of(ADMISSIONS)
_FOLDER = _Kind(
    "the path of a folder",
    accepts=lambda value: isinstance(value, str) and value.strip() != "" and "\0" not in value,
    from_text=os.path.expanduser,
    # A "~" in a file is expanded by no shell, and a folder named "~" is wanted by nobody.
    from_file=lambda value: os.path.expanduser(value) if isinstance(value, str) else value,
    optional=True,
)
_URL = _Kind(
    'a URL such as "redis://host:6379/0"',
    accepts=lambda value: isinstance(value, str) and "://" in value and value.isprintable(),
    from_text=str.strip,
    optional=True,
    may_be_secret=True,
)
_RETAIN_SHARE = _Kind(
    "a share from 0 to 0.5",
    accepts=lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 0.5
    ),
    from_text=float,
    from_file=lambda value: float(value) if _is_whole(value, 0, 0) else value,
)
_THREADS = _whole(1, 256)
_COUNT = _whole(1, 1 << 20)


def _setting(kind: _Kind, key: str = "") -> dict[str, Any]:
    """Field metadata; `key` where the file's name for it differs from the attribute's."""
    return {"kind": kind, "key": key}


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Pinned DRAM."""

    size_bytes: int = field(default=4 * GiB, metadata=_setting(_SIZE, "size"))
    numa_node: int | None = field(default=None, metadata=_setting(_whole(0, 1023, optional=True)))
    huge_pages: bool = field(default=True, metadata=_setting(_FLAG))
    verify: bool = field(default=False, metadata=_setting(_FLAG))  # checksums on DRAM loads too
    policy: str = field(default="reuse", metadata=_setting(_POLICY))
    # Of it, what hints may keep from being evicted for a time.
    retain_share: float = field(default=0.25, metadata=_setting(_RETAIN_SHARE))

    def __post_init__(self) -> None:
        _check_section("host", self)


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """A folder on a local disk; without a path there is no disk tier."""

    path: str | None = field(default=None, metadata=_setting(_FOLDER))
    size_bytes: int = field(default=32 * GiB, metadata=_setting(_SIZE, "size"))
    read_only: bool = field(default=False, metadata=_setting(_FLAG))
    direct: bool = field(default=True, metadata=_setting(_FLAG))  # O_DIRECT: past the page cache
    policy: str = field(default="reuse", metadata=_setting(_POLICY))
    threads: int = field(default=4, metadata=_setting(_THREADS))
    admit: str = field(default="always", metadata=_setting(_ADMISSION))
    # The most that is written in 24 hours, so that flash lasts; counted from the start.
    write_per_day_bytes: int | None = field(
        default=None, metadata=_setting(_OPTIONAL_SIZE, "write_per_day")
    )

    def __post_init__(self) -> None:
        _check_section("disk", self)


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """A store that instances share; without a URL there is none.

    The fleet's secret is in PENSTOCK_REMOTE_SECRET, not here.
    """

    url: str | None = field(default=None, repr=False, metadata=_setting(_URL))
    read_only: bool = field(default=False, metadata=_setting(_FLAG))
    encrypt: bool = field(default=False, metadata=_setting(_FLAG))  # AES-256-GCM, by tenant
    admit: str = field(default="always", metadata=_setting(_ADMISSION))
    ttl_seconds: float | None = field(
        default=None, metadata=_setting(_seconds(366 * _SECONDS_PER_DAY, optional=True))
    )
    timeout_seconds: float = field(default=5.0, metadata=_setting(_SECONDS))  # of one operation
    lookup_deadline_seconds: float = field(default=0.25, metadata=_setting(_SECONDS))
    # That put and get; by default up to 4, and no more than there are cores.
    threads: int | None = field(default=None, metadata=_setting(replace(_THREADS, optional=True)))
    # Blocks that are remembered to lie there, about 200 bytes each.
    max_known_blocks: int = field(default=1 << 18, metadata=_setting(_whole(1, 1 << 26)))
    write_per_day_bytes: int | None = field(
        default=None, metadata=_setting(_OPTIONAL_SIZE, "write_per_day")
    )
    # The most that this instance keeps there for one tenant, within the TTL.
    tenant_size_bytes: int | None = field(
        default=None, metadata=_setting(_OPTIONAL_SIZE, "tenant_size")
    )

    def __post_init__(self) -> None:
        _check_section("remote", self)
        if self.tenant_size_bytes is not None and self.ttl_seconds is None:
            raise ConfigError(
                "remote.tenant_size is set without remote.ttl_seconds: what never expires can "
                "never be written anew; set both"
            )


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Queues and their limits."""

    copy_threads: int = field(default=2, metadata=_setting(_THREADS))
    queue_transfers: int = field(default=256, metadata=_setting(_COUNT))  # bound of each queue
    batch_bytes: int = field(default=32 * MiB, metadata=_setting(_SIZE))  # most of one transfer
    load_deadline_seconds: float = field(default=10.0, metadata=_setting(_SECONDS))
    max_pending_loads: int = field(default=1024, metadata=_setting(_COUNT))  # tickets
    max_pending_save_bytes: int = field(default=4 * GiB, metadata=_setting(_SIZE))

    def __post_init__(self) -> None:
        _check_section("transfer", self)


@dataclass(frozen=True, slots=True)
class Config:
    host: HostConfig = field(default_factory=HostConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    # What the user typed for a setting, where that is not its name: an option, or a variable.
    typed: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


_Section = HostConfig | DiskConfig | RemoteConfig | TransferConfig

_SECTIONS: dict[str, type[_Section]] = {
    "host": HostConfig,
    "disk": DiskConfig,
    "remote": RemoteConfig,
    "transfer": TransferConfig,
}


def _key(setting: Field[Any]) -> str:
    return setting.metadata["key"] or setting.name


_SETTINGS = {
    f"{section}.{_key(setting)}": (section, setting)
    for section, cls in _SECTIONS.items()
    for setting in fields(cls)
}
_ENV_NAMES = {ENV_PREFIX + dotted.replace(".", "_").upper(): dotted for dotted in _SETTINGS}


class _Given(NamedTuple):
    """One setting as a source gave it."""

    dotted: str
    value: object
    origin: str
    is_text: bool  # from a place that knows only text, so that "4" may be a number
    typed: str | None = None  # what the user typed for it, if not its name


def load_config(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    options: Mapping[str, str] | None = None,
) -> Config:
    """Read the file, the environment (`os.environ` by default) and the overrides, in this order.

    The file is `path`, or else the one PENSTOCK_CONFIG names, or none. Overrides are dotted:
    {"host.size": "8GiB"}; those that were given as an option have its name in `options`. Raises
    ConfigError; looks at nothing of the machine but the file.
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
    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for item in given:
        section, setting = _SETTINGS[item.dotted]
        values[section][setting.name] = _read(item, setting.metadata["kind"])
        typed.pop(item.dotted, None)
        if item.typed is not None:
            typed[item.dotted] = item.typed
    return Config(
        host=HostConfig(**values["host"]),
        disk=DiskConfig(**values["disk"]),
        remote=RemoteConfig(**values["remote"]),
        transfer=TransferConfig(**values["transfer"]),
        typed=typed,
    )


@contextmanager
def as_typed(config: Config) -> Iterator[None]:
    """Errors from within name settings as the user gave them: --disk-path, PENSTOCK_HOST_SIZE."""
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
    """The configuration as plain data under the names the file uses; sizes in bytes.

    For people to see: a password in a URL is left out.
    """
    shown = {
        section: {
            _key(setting): getattr(getattr(config, section), setting.name)
            for setting in fields(cls)
        }
        for section, cls in _SECTIONS.items()
    }
    if config.remote.url is not None:
        shown["remote"]["url"] = without_password(config.remote.url)
    return shown


def _from_file(path: Path, origin: str) -> Iterator[_Given]:
    advice = "expected a TOML file of settings; correct the path or leave it out"
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
        raise ConfigError(
            f"{origin} is not text (a byte that is not UTF-8 at line {line}): {advice}"
        ) from None
    except (ValueError, RecursionError) as error:
        # tomllib names the line, except at the end.
        end = f"at line {text.rstrip().count(chr(10)) + 1}, the end"
        problem = str(error)[:200].replace("at end of document", end)
        raise ConfigError(
            f"{origin} is not valid TOML: {problem}; expected lines such as "
            'size = "8GiB" below [host], correct that line'
        ) from None
    for section, table in tables.items():
        if section in _SECTIONS and not isinstance(table, dict):
            raise ConfigError(
                f"{section} in {origin} is {shown_value(table)}: expected a section; "
                f"write [{section}] and its settings below"
            )
        if section not in _SECTIONS:
            kind = "section" if isinstance(table, dict) else "setting"
            known = _SECTIONS if isinstance(table, dict) else _SETTINGS
            raise _unknown(kind, section, f"in {origin}", known)
        for key, value in table.items():
            _check_known(f"{section}.{key}", f"in {origin}")
            yield _Given(f"{section}.{key}", value, f"in {origin}", is_text=False)


def _from_env(env: Mapping[str, str]) -> Iterator[_Given]:
    for name, value in env.items():
        if not name.startswith(ENV_PREFIX) or name in _ENV_OTHERS:
            continue
        if name not in _ENV_NAMES:
            raise _unknown("setting", name, "in the environment", [*_ENV_NAMES, *_ENV_OTHERS])
        origin = f"in the environment as {name}"
        yield _Given(_ENV_NAMES[name], value, origin, is_text=True, typed=name)


def _from_overrides(
    overrides: Mapping[str, object], options: Mapping[str, str]
) -> Iterator[_Given]:
    for dotted, value in overrides.items():
        _check_known(dotted, "in --set")
        option = options.get(dotted)
        yield _Given(dotted, value, "in --set", isinstance(value, str), option)


def _check_known(dotted: str, where: str) -> None:
    if dotted not in _SETTINGS:
        raise _unknown("setting", dotted, where, _SETTINGS)


def _unknown(what: str, name: str, where: str, known: Iterable[str]) -> ConfigError:
    names = list(known)
    section = name.partition(".")[0] + "."
    own = [other for other in names if other.startswith(section)]
    # What many names share makes them look alike, so only the rest is compared.
    shared = section if own else ENV_PREFIX
    candidates = {other.removeprefix(shared): other for other in names}
    if own:
        candidates = {other.partition(".")[2]: other for other in [*reversed(names), *own]}
    if close := difflib.get_close_matches(name.removeprefix(shared), candidates, n=1):
        advice = f"did you mean {candidates[close[0]]}?"
    else:
        advice = f"expected one of {', '.join(own or names)}; correct or remove it"
    return ConfigError(f"unknown {what} {shown_value(name)} {where}: {advice}")


def _read(item: _Given, kind: _Kind) -> object:
    value = item.value
    name, origin = item.dotted, item.origin
    if origin == "in --set" and item.typed is not None:
        name, origin = item.typed, ""  # an option stands for itself
    if kind.optional and item.is_text and str(value).strip().lower() in ("", "none"):
        return None
    try:
        if item.is_text:
            value = kind.from_text(str(value))
        elif value is not None:
            value = kind.from_file(value)
    except ConfigError as error:  # has its own words on what is wrong
        if shown_value(item.value) == repr(item.value):
            raise ConfigError(f"{name} {origin}: {error}".replace(" :", ":")) from None
        raise _wrong(name, item.value, origin, kind) from None
    except ValueError:
        raise _wrong(name, item.value, origin, kind) from None
    if not _holds(kind, value):
        raise _wrong(name, item.value, origin, kind)
    return value


def _check_section(section: str, values: _Section) -> None:
    for setting in fields(values):
        value, kind = getattr(values, setting.name), setting.metadata["kind"]
        if not _holds(kind, value):
            raise _wrong(f"{section}.{_key(setting)}", value, "", kind)


def _holds(kind: _Kind, value: object) -> bool:
    return kind.optional if value is None else kind.accepts(value)


def _wrong(dotted: str, value: object, origin: str, kind: _Kind) -> ConfigError:
    where = f" {origin}" if origin else ""
    is_hidden = kind.may_be_secret and not (isinstance(value, str) and "://" in value)
    found = HIDDEN if is_hidden else shown_value(value)
    return ConfigError(
        f"{dotted} is {found}{where}: expected {kind.expected}; "
        "correct it, or leave it out for the default"
    )
