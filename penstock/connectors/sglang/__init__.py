"""Penstock below SGLang's hierarchical cache, as the store behind its host memory.

    sglang serve MODEL $(penstock sglang-config --disk-path /var/cache/penstock)

SGLang keeps KV on the GPU and in host memory of its own. Pages pass from there through DRAM of
ours to disk and remote stores, and back. One `PenstockStorage` runs in each rank's process.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the storage when SGLang asks for it: its settings can be used without SGLang."""
    if name == "PenstockStorage":
        from penstock.connectors.sglang.storage import PenstockStorage

        return PenstockStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
