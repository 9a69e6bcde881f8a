"""Penstock below vLLM's own offloading: vLLM moves KV between GPU and DRAM, we keep it below that.

    "kv_connector": "PenstockTieringConnector",
    "kv_connector_module_path": "penstock.connectors.vllm_tier",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 34359738368,
        "secondary_tiers": [{
            "type": "PenstockTier", "module_path": "penstock.connectors.vllm_tier",
            "disk_path": "/var/cache/penstock", "disk_size": 500}]}

Everything runs in the scheduler's process.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "PenstockTieringConnector": "connector",
    "PenstockTier": "tier",
    "PenstockCachePolicy": "policy",
}


def __getattr__(name: str) -> Any:
    """Import a class when vLLM asks for it."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
