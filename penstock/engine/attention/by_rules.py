"""Attention of any tokens that obeys a layer's rules, with torch or, on a GPU, with Triton."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.engine.attention.rules import LayerRules

_MAX_ROWS = 256  # attended at a time: each has a mask over all tokens that any of them reads
_MAX_SCORES = 1 << 24  # in memory at a time


def attend_by_rules(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, rules: LayerRules
) -> Tensor:
    """Each token attends to the tokens up to its own position that the rules let it see.

    query [new, heads, head_dim]; key and value [tokens, kv_heads, head_dim]. `positions` are those
    of the new tokens among the keys, in order. The result has the query's shape.
    """
    if query.is_cuda and _has_triton():
        # Torch's kernels need the whole mask there, or the whole matrix of scores.
        from penstock.engine.attention.scattered_triton import attend_scattered

        key, value = key.to(query.dtype), value.to(query.dtype)
        attended: Tensor = attend_scattered(query, key, value, positions, scale, rules)
        return attended
    heads = query.shape[1]
    num_rows = _MAX_ROWS
    if not rules.changes_no_score:
        num_rows = max(1, min(_MAX_ROWS, _MAX_SCORES // (heads * len(key))))
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for start in range(0, len(positions), num_rows):
        rows = slice(start, start + num_rows)
        at = positions[rows]
        # Not one token more: what was not written may be NaN.
        begin, end = rules.first_token(int(at[0])), int(at[-1]) + 1
        numbers = torch.arange(begin, end, device=query.device)
        mask = numbers[None] <= at[:, None]
        if rules.window:
            mask &= numbers[None] > at[:, None] - rules.window
        q, k, v = (
            each.transpose(0, 1)[None].to(query.dtype)
            for each in (query[rows], key[begin:end], value[begin:end])
        )
        if rules.changes_no_score:
            found = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale, enable_gqa=heads != key.shape[1]
            )
        else:
            found = _attend_with_scores(q, k, v, mask, scale, rules)
        out[rows] = found[0].transpose(0, 1)
    return out


def _attend_with_scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, rules: LayerRules
) -> Tensor:
    """Like torch's attention, for rules that change scores. Computes in float32."""
    (heads, num_rows, dim), (kv_heads, num_tokens) = query.shape[1:], key.shape[1:3]
    # The rows of a group's heads, one after the other.
    q = query.float().reshape(kv_heads, -1, dim)
    scores = (q @ key[0].float().transpose(1, 2) * scale).view(heads, num_rows, num_tokens)
    if rules.cap:
        scores = (scores / rules.cap).tanh_() * rules.cap
    scores = scores.masked_fill_(~mask, float("-inf"))
    if rules.sinks is not None:
        sinks = rules.sinks.float().view(heads, 1, 1).expand(heads, num_rows, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., :num_tokens].reshape(kv_heads, -1, num_tokens)
    out: Tensor = weights @ value[0].float()
    return out.view(1, heads, num_rows, dim).to(query.dtype)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
