"""The settings in `kv_connector_extra_config`, and the `--kv-transfer-config` made from them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.config.options import OPTIONS, load_tiers
from penstock.config.urls import shown_value
from penstock.errors import ConfigError
from penstock.units import GiB

CONNECTOR = "PenstockConnector"
MODULE = "penstock.connectors.vllm"
POLICY = "recompute"


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Named like the options of `penstock serve`. Sizes are in GiB."""

    kv_offloading_size: float | None = None  # DRAM for all workers together
    disk_path: str | None = None
    disk_size: float | None = None
    remote: str | None = field(default=None, repr=False)  # the URL of a store shared by instances
    config: str | None = None  # the path of a TOML file with settings
    # Settings by name; they override all others.
    set: Mapping[str, object] | None = field(default=None, repr=False)
    always_load: bool = False  # even if computing would be faster
    allow_untested_vllm: bool = False

    def __post_init__(self) -> None:
        for name in ("kv_offloading_size", "disk_size"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value <= 1 << 33):
                raise ConfigError(
                    f"{name} is {value!r}: expected more than 0 GiB; correct it or remove it."
                )
        for name, what in (("disk_path", "path"), ("config", "path"), ("remote", "URL")):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value.strip()):
                raise ConfigError(f"{name} is {shown_value(value)}: expected a {what}; correct it.")
        for name in ("always_load", "allow_untested_vllm"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}: expected true or false; correct it."
                )
        if self.set is not None and not isinstance(self.set, Mapping):
            raise ConfigError(
                f"set is {shown_value(self.set)}: expected settings by name, such as "
                '{"disk.threads": 8}.'
            )

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> VllmSettings:
        """Read `kv_connector_extra_config`. Raises ConfigError for an unknown key."""
        names = [field.name for field in fields(cls)]
        for key in extra:
            if key not in names:
                close = difflib.get_close_matches(key, names, n=1)
                advice = (
                    f"did you mean {close[0]}?" if close else f"expected one of {', '.join(names)}."
                )
                raise ConfigError(f"unknown key {key!r} in kv_connector_extra_config: {advice}")
        return cls(**extra)

    def tiers(self, names: Mapping[str, str] = OPTIONS) -> Config:
        """The tiers' settings. Later sources win: file, environment, the fields above, `set`.

        Errors use the option names in `names`.
        """
        overrides: dict[str, object] = {}
        if self.kv_offloading_size is not None:
            overrides["host.size"] = int(self.kv_offloading_size * GiB)
        if self.disk_path is not None:
            overrides["disk.path"] = self.disk_path
        if self.disk_size is not None:
            overrides["disk.size"] = int(self.disk_size * GiB)
        if self.remote is not None:
            overrides["remote.url"] = self.remote
        path = None if self.config is None else Path(self.config)
        return load_tiers(overrides, path, self.set or {}, names)

    def extra(self) -> dict[str, Any]:
        """The settings that differ from their defaults, as `kv_connector_extra_config`."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


def transfer_config(settings: VllmSettings, names: Mapping[str, str] = OPTIONS) -> dict[str, Any]:
    """The value of `--kv-transfer-config`. Raises ConfigError if a setting is wrong."""
    settings.tiers(names)
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": POLICY,
        "kv_connector_extra_config": settings.extra(),
    }
