"""Penstock: tiered KV-cache offloading for LLM inference."""

__version__ = "0.1.0"
