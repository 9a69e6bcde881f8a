"""Penstock inside vLLM.

    vllm serve MODEL --kv-transfer-config "$(penstock vllm-config --kv-offloading-size 32)"

The scheduler's process keeps the books, DRAM and the lower tiers. Each worker copies its part of
the blocks between its device and that DRAM. They exchange `orders` and `reports`, which are plain
data.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the connector when vLLM asks for it: its settings can be used without vLLM."""
    if name == "PenstockConnector":
        from penstock.connectors.vllm.connector import PenstockConnector

        return PenstockConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
