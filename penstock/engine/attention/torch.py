"""Paged attention with torch's own kernels, behind transformers' AttentionInterface.

The tokens of all sequences of a step are packed into one row. Each layer first writes their keys
and values into the pool, then attends: chunks of prompts one by one, sequences that add one token
together where there is a kernel for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "penstock"
_LONG_PAST = 1024  # tokens: from here on two passes beat one with a mask


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's share of a packed row."""

    begin: int  # in the row
    num_new: int
    num_past: int  # tokens before them, whose KV is there
    blocks: Tensor  # the sequence's blocks in the pool, in order
    cold: Cold | None = None


@dataclass(frozen=True, slots=True)
class Cold:
    """Blocks of a sequence that lie in HOST."""

    resident: Tensor  # which of the sequence's blocks are in the pool
    indices: Tensor  # which are not
    slots: Tensor  # and where in HOST those are


class DecodeKernel(Protocol):
    def attend(self, query: Tensor, layer: int, scale: float) -> Tensor:
        """[sequences, heads, head_dim] in and out."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward pass needs to know."""

    pool: Tensor  # [num_blocks, num_layers, 2, block_tokens, kv_heads, head_dim]
    host: Tensor | None  # the same of HOST's slots
    write_blocks: Tensor  # for each token of the row that is written: its block …
    write_offsets: Tensor  # … and its place in it
    spans: Sequence[Span]  # but for those below
    decode: DecodeKernel | None = None  # sequences of one new token, at the row's beginning
    num_decode: int = 0
    write_rows: Tensor | None = None  # which tokens are written, where not all are


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    penstock: Step,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, row, head_dim]; key and value [1, kv_heads, row, head_dim]."""
    layer = penstock.pool[:, module.layer_idx]
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if penstock.write_rows is not None:
        keys, values = keys[penstock.write_rows], values[penstock.write_rows]
    layer[penstock.write_blocks, 0, penstock.write_offsets] = keys
    layer[penstock.write_blocks, 1, penstock.write_offsets] = values
    out = torch.empty_like(query.transpose(1, 2))
    if penstock.decode is not None:
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        rows = query[0, :, : penstock.num_decode].transpose(0, 1)
        out[0, : penstock.num_decode] = penstock.decode.attend(rows, module.layer_idx, scale)
    for span in penstock.spans:
        new = slice(span.begin, span.begin + span.num_new)
        if span.num_past:
            num_tokens = span.num_past + span.num_new
            history = _history(penstock, span, module.layer_idx)
            k = history[:, 0].flatten(0, 1)[:num_tokens].transpose(0, 1)
            v = history[:, 1].flatten(0, 1)[:num_tokens].transpose(0, 1)
        else:
            k, v = key[0, :, new], value[0, :, new]
        attended = _attend(query[:, :, new], k[None], v[None], span, scaling)
        out[:, new] = attended.transpose(1, 2)
    return out, None


def _history(step: Step, span: Span, layer: int) -> Tensor:
    """[blocks, 2, block_tokens, kv_heads, head_dim]: what a sequence has, from where it lies."""
    resident = step.pool[:, layer][span.blocks]
    if span.cold is None:
        return resident
    assert step.host is not None
    num_blocks = len(span.blocks) + len(span.cold.slots)
    history = resident.new_empty((num_blocks, *resident.shape[1:]))
    history[span.cold.resident] = resident
    history[span.cold.indices] = step.host[:, layer][span.cold.slots]
    return history


def _attend(query: Tensor, key: Tensor, value: Tensor, span: Span, scaling: float | None) -> Tensor:
    mask = None
    if span.num_new > 1 and span.num_past >= _LONG_PAST and query.device.type == "cpu":
        return _attend_in_two(query, key, value, span.num_past, scaling)
    if span.num_past and span.num_new > 1:
        positions = torch.arange(span.num_past, span.num_past + span.num_new, device=query.device)
        mask = torch.arange(key.shape[2], device=query.device)[None] <= positions[:, None]
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and span.num_new > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_in_two(
    query: Tensor, key: Tensor, value: Tensor, num_past: int, scaling: float | None
) -> Tensor:
    """History without a mask, the chunk itself causally, then merged: a mask of that width costs
    a tenth of the time."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    past, past_sum = flash(query, key[:, :, :num_past], value[:, :, :num_past], scale=scaling)
    own, own_sum = flash(
        query, key[:, :, num_past:], value[:, :, num_past:], is_causal=True, scale=scaling
    )
    both = torch.logaddexp(past_sum, own_sum)
    past_share = (past_sum - both).exp()[..., None].to(past.dtype)
    own_share = (own_sum - both).exp()[..., None].to(own.dtype)
    merged: Tensor = past * past_share + own * own_share
    return merged


def register() -> None:
    """Make the implementation known to transformers under `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
