"""The settings of the tiers, as frozen dataclasses that check their values.

A setting is named `section.key`, for example `host.size`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from penstock.codecs.names import AUTO, CODECS
from penstock.config.urls import HIDDEN, shown_value
from penstock.errors import ConfigError
from penstock.units import GiB, MiB, parse_bytes

POLICIES = ("reuse", "prefix-lru", "lru", "s3fifo", "arc", "lfu")
ADMISSIONS = ("always", "second-use")
ENV_PREFIX = "PENSTOCK_"
ENV_FILE = "PENSTOCK_CONFIG"
# Secrets are not settings: they are read where they are used.
ENV_API_KEY = "PENSTOCK_API_KEY"
ENV_REMOTE_SECRET = "PENSTOCK_REMOTE_SECRET"

ENV_OTHERS = (ENV_FILE, ENV_API_KEY, ENV_REMOTE_SECRET)
_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class SettingKind:
    """The values a setting accepts, and how to parse them."""

    expected: str
    accepts: Callable[[Any], bool]  # checks the parsed value
    from_text: Callable[[str], object]  # raises ValueError if it cannot be parsed
    from_file: Callable[[Any], object] = lambda value: value
    optional: bool = False
    may_be_secret: bool = False


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _whole(low: int, high: int, *, optional: bool = False) -> SettingKind:
    return SettingKind(
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


_SIZE = SettingKind(
    'a size above 0 and below 8EiB such as "32GiB"',
    accepts=lambda value: _is_whole(value, 1, (1 << 63) - 1),
    from_text=parse_bytes,
    from_file=parse_bytes,
)
_OPTIONAL_SIZE = replace(_SIZE, optional=True)
_FLAG = SettingKind(
    "true or false", accepts=lambda value: isinstance(value, bool), from_text=_bool_from_text
)


def _seconds(most: int, *, optional: bool = False) -> SettingKind:
    return SettingKind(
        f"a number of seconds above 0 and up to {most}",
        accepts=lambda value: (
            isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most
        ),
        from_text=float,
        # In a file, whole seconds are an int.
        from_file=lambda value: float(value) if _is_whole(value, 0, most) else value,
        optional=optional,
    )


def _one_of(words: tuple[str, ...]) -> SettingKind:
    return SettingKind(
        "one of " + ", ".join(f'"{word}"' for word in words),
        accepts=lambda value: value in words,
        from_text=str.strip,
    )


_SECONDS = _seconds(_SECONDS_PER_DAY)
_POLICY = _one_of(POLICIES)
_CODEC = _one_of((AUTO, *CODECS))
_ADMISSION = _one_of(ADMISSIONS)
_FOLDER = SettingKind(
    "the path of a folder",
    accepts=lambda value: isinstance(value, str) and value.strip() != "" and "\0" not in value,
    from_text=os.path.expanduser,
    # No shell expands "~" in a file.
    from_file=lambda value: os.path.expanduser(value) if isinstance(value, str) else value,
    optional=True,
)
_URL = SettingKind(
    'a URL such as "redis://host:6379/0"',
    accepts=lambda value: isinstance(value, str) and "://" in value and value.isprintable(),
    from_text=str.strip,
    optional=True,
    may_be_secret=True,
)
_RETAIN_SHARE = SettingKind(
    "a share from 0 to 0.5",
    accepts=lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 0.5
    ),
    from_text=float,
    from_file=lambda value: float(value) if _is_whole(value, 0, 0) else value,
)
_SHARE = SettingKind(
    "a share from 0 to 1",
    accepts=lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    ),
    from_text=float,
    from_file=lambda value: float(value) if _is_whole(value, 0, 1) else value,
)
_NODE_URL = SettingKind(
    'a URL such as "unix:///run/penstock/node.sock"',
    accepts=lambda value: (
        isinstance(value, str) and value.startswith("unix:///") and value.isprintable()
    ),
    from_text=str.strip,
    optional=True,
)
_THREADS = _whole(1, 256)
_COUNT = _whole(1, 1 << 20)


def _setting(kind: SettingKind, key: str = "") -> dict[str, Any]:
    """Return field metadata; `key` is the name in the file if it differs from the attribute."""
    return {"kind": kind, "key": key}


@dataclass(frozen=True, slots=True)
class HostConfig:
    """The DRAM tier."""

    size_bytes: int = field(default=4 * GiB, metadata=_setting(_SIZE, "size"))
    numa_node: int | None = field(default=None, metadata=_setting(_whole(0, 1023, optional=True)))
    huge_pages: bool = field(default=True, metadata=_setting(_FLAG))
    verify: bool = field(default=False, metadata=_setting(_FLAG))  # verify checksums on load
    policy: str = field(default="reuse", metadata=_setting(_POLICY))
    codec: str = field(default=AUTO, metadata=_setting(_CODEC))  # how blocks are packed
    # Share of DRAM that hints may protect from eviction.
    retain_share: float = field(default=0.25, metadata=_setting(_RETAIN_SHARE))

    def __post_init__(self) -> None:
        _check_section("host", self)


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """The disk tier: a folder on a local disk. Disabled if `path` is None."""

    path: str | None = field(default=None, metadata=_setting(_FOLDER))
    size_bytes: int = field(default=32 * GiB, metadata=_setting(_SIZE, "size"))
    read_only: bool = field(default=False, metadata=_setting(_FLAG))
    direct: bool = field(default=True, metadata=_setting(_FLAG))  # O_DIRECT: bypass the page cache
    policy: str = field(default="reuse", metadata=_setting(_POLICY))
    codec: str = field(default=AUTO, metadata=_setting(_CODEC))
    threads: int = field(default=4, metadata=_setting(_THREADS))
    admit: str = field(default="always", metadata=_setting(_ADMISSION))
    # Maximum bytes written in any 24 hours, to limit flash wear. A restart resets the count.
    write_per_day_bytes: int | None = field(
        default=None, metadata=_setting(_OPTIONAL_SIZE, "write_per_day")
    )

    def __post_init__(self) -> None:
        _check_section("disk", self)


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """The remote tier: a store that instances share. Disabled if `url` is None.

    The shared secret is not a setting: it is read from PENSTOCK_REMOTE_SECRET.
    """

    url: str | None = field(default=None, repr=False, metadata=_setting(_URL))
    read_only: bool = field(default=False, metadata=_setting(_FLAG))
    encrypt: bool = field(default=False, metadata=_setting(_FLAG))  # AES-256-GCM, keyed by tenant
    codec: str = field(default=AUTO, metadata=_setting(_CODEC))
    admit: str = field(default="always", metadata=_setting(_ADMISSION))
    ttl_seconds: float | None = field(
        default=None, metadata=_setting(_seconds(366 * _SECONDS_PER_DAY, optional=True))
    )
    timeout_seconds: float = field(default=5.0, metadata=_setting(_SECONDS))  # of each operation
    lookup_deadline_seconds: float = field(default=0.25, metadata=_setting(_SECONDS))
    # Threads for put and get. Default: 4, or the number of cores if that is lower.
    threads: int | None = field(default=None, metadata=_setting(replace(_THREADS, optional=True)))
    # Blocks in the local index of the store, about 200 bytes each.
    max_known_blocks: int = field(default=1 << 18, metadata=_setting(_whole(1, 1 << 26)))
    write_per_day_bytes: int | None = field(
        default=None, metadata=_setting(_OPTIONAL_SIZE, "write_per_day")
    )
    # Maximum bytes that this instance stores for one tenant within the TTL.
    tenant_size_bytes: int | None = field(
        default=None, metadata=_setting(_OPTIONAL_SIZE, "tenant_size")
    )

    def __post_init__(self) -> None:
        _check_section("remote", self)
        if self.tenant_size_bytes is not None and self.ttl_seconds is None:
            raise ConfigError(
                "remote.tenant_size is set without remote.ttl_seconds: a tenant regains space only "
                "when its blocks expire; set both"
            )


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Transfer queues and their limits."""

    copy_threads: int = field(default=2, metadata=_setting(_THREADS))
    queue_transfers: int = field(default=256, metadata=_setting(_COUNT))  # limit of each queue
    batch_bytes: int = field(default=32 * MiB, metadata=_setting(_SIZE))  # maximum per transfer
    load_deadline_seconds: float = field(default=10.0, metadata=_setting(_SECONDS))
    max_pending_loads: int = field(default=1024, metadata=_setting(_COUNT))  # tickets
    max_pending_save_bytes: int = field(default=4 * GiB, metadata=_setting(_SIZE))

    def __post_init__(self) -> None:
        _check_section("transfer", self)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """A node: one cache for all engines of a machine. `url` is for engines, the rest for nodes."""

    url: str | None = field(default=None, metadata=_setting(_NODE_URL))
    wait_seconds: float = field(default=30.0, metadata=_setting(_SECONDS))  # for it to be there
    # Share of DRAM that a model keeps, once it has it, if other models need more.
    model_floor: float = field(default=0.1, metadata=_setting(_SHARE))
    # Largest share of DRAM for one model.
    model_cap: float = field(default=1.0, metadata=_setting(_SHARE))
    # Share of its model's DRAM that one engine may pin, to read it in place.
    pin_share: float = field(default=0.5, metadata=_setting(_SHARE))
    max_models: int = field(default=8, metadata=_setting(_whole(1, 1024)))
    # How many models use the disk at once, each an equal part of it. Others have DRAM only.
    disk_models: int = field(default=1, metadata=_setting(_whole(1, 1024)))

    def __post_init__(self) -> None:
        _check_section("node", self)
        if self.model_floor > self.model_cap:
            raise ConfigError(
                f"node.model_floor is {self.model_floor}, above node.model_cap, which is "
                f"{self.model_cap}: expected a floor below the cap; correct one of them"
            )


@dataclass(frozen=True, slots=True)
class Config:
    host: HostConfig = field(default_factory=HostConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    # The option or environment variable that a setting came from, if any. Errors use this name.
    typed: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


Section = HostConfig | DiskConfig | RemoteConfig | TransferConfig | NodeConfig

SECTIONS: dict[str, type[Section]] = {
    "host": HostConfig,
    "disk": DiskConfig,
    "remote": RemoteConfig,
    "transfer": TransferConfig,
    "node": NodeConfig,
}


def file_key(setting: Field[Any]) -> str:
    return setting.metadata["key"] or setting.name


SETTINGS = {
    f"{section}.{file_key(setting)}": (section, setting)
    for section, cls in SECTIONS.items()
    for setting in fields(cls)
}
ENV_NAMES = {ENV_PREFIX + dotted.replace(".", "_").upper(): dotted for dotted in SETTINGS}


def _check_section(section: str, values: Section) -> None:
    for setting in fields(values):
        value, kind = getattr(values, setting.name), setting.metadata["kind"]
        if not holds(kind, value):
            raise wrong(f"{section}.{file_key(setting)}", value, "", kind)


def holds(kind: SettingKind, value: object) -> bool:
    return kind.optional if value is None else kind.accepts(value)


def wrong(dotted: str, value: object, origin: str, kind: SettingKind) -> ConfigError:
    where = f" {origin}" if origin else ""
    is_hidden = kind.may_be_secret and not (isinstance(value, str) and "://" in value)
    found = HIDDEN if is_hidden else shown_value(value)
    return ConfigError(
        f"{dotted} is {found}{where}: expected {kind.expected}; "
        "correct it, or leave it out for the default"
    )
