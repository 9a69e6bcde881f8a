"""The settings in vLLM's `kv_connector_extra_config`, and the whole `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.config.options import OPTIONS, option
from penstock.connectors.settings import TierSettings

CONNECTOR = "PenstockConnector"
MODULE = "penstock.connectors.vllm"
POLICY = "recompute"


@dataclass(frozen=True, slots=True)
class VllmSettings(TierSettings):
    """Settings of the connector, named as the options of `penstock serve`. Sizes are in GiB."""

    found_in: ClassVar[str] = "kv_connector_extra_config"
    flags: ClassVar[tuple[str, ...]] = ("always_load", "allow_untested_vllm")

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
