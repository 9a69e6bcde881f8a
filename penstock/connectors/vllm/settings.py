"""The settings in vLLM's `kv_connector_extra_config`, and the whole `--kv-transfer-config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.config.options import OPTIONS, check_numbers, load_tiers, option
from penstock.config.urls import shown_value
from penstock.errors import ConfigError

CONNECTOR = "PenstockConnector"
MODULE = "penstock.connectors.vllm"
POLICY = "recompute"


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings of the connector, named as the options of `penstock serve`. Sizes are in GiB."""

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
        "mooncake://host. If it has a password, set PENSTOCK_REMOTE_URL for vLLM instead.",
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
    always_load: bool = option(False, "Load cached KV even if recomputing it would be faster.")
    audit_share: float = option(
        0.0,
        "Share of requests that are computed although their KV is stored, to verify the stored KV; "
        "0.001 is enough. 0: none.",
        "SHARE",
        low=0,
        high=1,
    )
    allow_untested_vllm: bool = option(
        False, "Allow vLLM versions that Penstock has not been tested with."
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
        for name in ("always_load", "allow_untested_vllm"):
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
        """Load the settings of the tiers. Later sources win: file, environment, options, `set`.

        Errors use the option names in `names`.
        """
        path = None if self.config is None else Path(self.config)
        return load_tiers(self, path, self.set or {}, names)

    def extra(self) -> dict[str, Any]:
        """Return `kv_connector_extra_config`: the values that differ from the defaults."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


def transfer_config(settings: VllmSettings, names: Mapping[str, str] = OPTIONS) -> dict[str, Any]:
    """Return the whole `--kv-transfer-config`. Raises ConfigError if the settings are invalid."""
    settings.tiers(names)
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": POLICY,
        "kv_connector_extra_config": settings.extra(),
    }
