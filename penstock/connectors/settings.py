"""Settings of the tiers that every connector has, as an engine's own configuration passes them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from penstock.config import Config
from penstock.config.options import OPTIONS, check_numbers, load_tiers, option
from penstock.config.urls import shown_value
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Named as the options of `penstock serve`. Sizes are in GiB."""

    found_in: ClassVar[str]  # where the engine's configuration has them
    flags: ClassVar[tuple[str, ...]] = ()  # the names of those that are true or false

    kv_offloading_size: float | None = option(
        None,
        "DRAM for KV, shared by all workers. Defaults to the setting host.size (see `penstock "
        "config`).",
        "GiB",
        low=0,
        is_above=True,
    )
    disk_path: str | None = option(None, "Folder for KV on disk, kept across restarts.", "DIR")
    disk_size: float | None = option(
        None,
        "Maximum size of that folder. Defaults to the setting disk.size.",
        "GiB",
        low=0,
        is_above=True,
    )
    remote: str | None = option(
        None,
        "URL of a KV store shared by several instances: redis://host, s3://bucket/prefix, "
        "mooncake://host. If it has a password, set PENSTOCK_REMOTE_URL for the engine instead.",
        "URL",
        shown=False,
    )
    node: str | None = option(
        None,
        "URL of a node on this machine, such as unix:///run/penstock/node.sock. DRAM, disk and "
        "remote store are then those of the node.",
        "URL",
    )
    config: str | None = option(None, "A TOML file with settings.", "FILE")
    set: Mapping[str, object] | None = option(
        None, "Single settings by name. They override all other sources.", shown=False
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        for name, what in (
            *(("disk_path", "path"), ("config", "path")),
            *(("remote", "URL"), ("node", "URL")),
        ):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value.strip()):
                raise ConfigError(
                    f"{name} is {shown_value(value)}: expected a {what}; correct it, or leave it "
                    "out."
                )
        for name in self.flags:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}: expected true or false; correct it."
                )
        if self.set is not None and not isinstance(self.set, Mapping):
            raise ConfigError(
                f"set is {shown_value(self.set)}: expected settings by name, such as "
                '{"disk.threads": 8}; correct it.'
            )

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Self:
        """Read the engine's configuration. Raises ConfigError for an unknown key."""
        names = [field.name for field in fields(cls)]
        for key in extra:
            if key not in names:
                close = difflib.get_close_matches(key, names, n=1)
                advice = (
                    f"did you mean {close[0]}?" if close else f"expected one of {', '.join(names)}."
                )
                raise ConfigError(f"unknown key {key!r} in {cls.found_in}: {advice}")
        return cls(**extra)

    def tiers(self, names: Mapping[str, str] = OPTIONS) -> Config:
        """Load the settings of the tiers. Later sources win: file, environment, options, `set`.

        Errors use the option names in `names`.
        """
        path = None if self.config is None else Path(self.config)
        return load_tiers(self, path, self.set or {}, names)

    def extra(self) -> dict[str, Any]:
        """The values that differ from the defaults, as `read` takes them."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


@dataclass(frozen=True, slots=True)
class StoreSettings(TierSettings):
    """Settings of a store below an engine that has a first tier of its own."""

    flags: ClassVar[tuple[str, ...]] = ("weights_stay",)

    metrics_port: int | None = option(
        None,
        "Serve Prometheus metrics on this port of 127.0.0.1. If there are several ranks, each has "
        "a port: this one and those after it.",
        "N",
        low=1,
        high=65535,
    )
    weights_stay: bool = option(
        False,
        "Promise that weights are not replaced while the engine runs. Stored KV then stays in use "
        "after the engine has reset its cache.",
    )
