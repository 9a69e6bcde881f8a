"""The groups of a model's layers, as rows of tables and of JSON."""

from __future__ import annotations

from typing import Any

from penstock.groups.kinds import Kind
from penstock.shapes.layer_groups import LayerGroup
from penstock.shapes.shape import ModelShape
from penstock.units import counted, format_bytes


def group_rows(shape: ModelShape, num_tokens: int) -> list[dict[str, Any]]:
    """For JSON: what each group keeps of a sequence of `num_tokens`. All bytes are exact."""
    return [
        {
            "kind": group.kind,
            "label": group.label,
            "num_layers": group.num_layers,
            "layers": list(group.layers) or None,
            "span_tokens": group.span or None,
            "bytes_per_token": group.token_bytes(shape.bits),
            "state_bytes": group.state_bytes * group.num_layers,
            "checkpoint_bytes": checkpoint_bytes(shape, group),
            "bytes_per_sequence": group.held_bytes(num_tokens, shape.bits),
        }
        for group in shape.groups
    ]


def checkpoint_bytes(shape: ModelShape, group: LayerGroup) -> int:
    """Of a long sequence. A chunk is counted when it is full."""
    if group.kind is Kind.FULL:
        return 0
    return group.held_bytes(group.span or 1, shape.bits)


def describe_group(shape: ModelShape, group: LayerGroup) -> str:
    """One sentence part: how many layers, and what they keep."""
    layers = counted(group.num_layers, "layer")
    if group.kind is Kind.STATE:
        size = format_bytes(group.state_bytes * group.num_layers)
        return f"{group.label} in {layers}: {size}, however long the sequence"
    size = f"{format_bytes(group.token_bytes(shape.bits))} per token"
    if group.kind is Kind.FULL:
        return f"{group.label} in {layers}: {size}, for every token"
    reach = f"the last {group.span:,} tokens"
    if group.kind is Kind.CHUNK:
        reach = f"tokens since the last border of {group.span:,}"
    return f"{group.label} in {layers}: {size}, for {reach}"
