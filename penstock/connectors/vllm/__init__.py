"""Penstock inside vLLM.

    vllm serve MODEL --kv-transfer-config "$(penstock vllm-config --kv-offloading-size 32)"

The scheduler's process keeps the books, DRAM and all tiers below; each worker copies its part of
the blocks between its device and that DRAM. Between them travel `orders` and `reports`, plain data.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """vLLM finds the connector here; whoever wants only its settings need not have vLLM."""
    if name == "PenstockConnector":
        from penstock.connectors.vllm.connector import PenstockConnector

        return PenstockConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
