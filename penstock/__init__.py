"""Penstock: tiered KV-cache offloading for LLM inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.install import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from penstock.engine.llm import LLM
    from penstock.engine.params import SamplingParams
    from penstock.engine.structure import StructuredOutputsParams

__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the engine on first use: most commands do not need torch."""
    if name == "LLM":
        from penstock.install import ENGINE, require

        require("engine", ENGINE, "penstock.LLM")
        from penstock.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from penstock.engine.params import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from penstock.engine.structure import StructuredOutputsParams

        return StructuredOutputsParams
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
