"""What the embedded engine keeps of a model: every layer's keys and values of all tokens. Pure."""

from __future__ import annotations

from penstock.groups.kinds import Kind
from penstock.shapes.shape import ModelShape

EVERY_TOKEN = "every layer keeps all tokens, also beyond its window"
EXPANDED = "keys and values of every head, not the latent (MLA)"


def embedded_bytes_per_token(shape: ModelShape) -> int | None:
    """KV of one token in all layers. None if the engine refuses the model.

    MLA is kept as keys and values of every head, both as wide as the keys: in all known models,
    values are not wider.
    """
    if any(group.kind not in (Kind.FULL, Kind.WINDOW) for group in shape.groups):
        return None  # states and chunks
    if any(group.fixed_bytes for group in shape.groups):
        return None  # keys of an indexer
    if len({(group.num_heads, group.elements) for group in shape.groups}) > 1:
        return None  # heads that differ between layers
    if not shape.is_mla:
        return shape.bytes_per_token
    if shape.num_heads is None:
        return None
    return shape.num_layers * 2 * shape.num_heads * shape.head_dim * shape.bits // 8


def embedded_words(shape: ModelShape) -> str:
    """How that differs from what vLLM keeps; empty if it does not."""
    if shape.is_plain or embedded_bytes_per_token(shape) is None:
        return ""
    return EXPANDED if shape.is_mla else EVERY_TOKEN
