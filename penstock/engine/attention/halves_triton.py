"""Merges attention to a sequence's history with attention to its new tokens, on a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_TOKENS = 16


@triton.jit(do_not_specialize=["num_tokens"])
def _merge(
    past,  # [heads, tokens, DIM]
    past_sums,  # [heads, tokens], contiguous: the logs of the sums of weights
    own,
    own_sums,
    merged,  # [tokens, heads, DIM], contiguous
    num_tokens,
    past_head,  # strides
    past_token,
    own_head,
    own_token,
    DIM: tl.constexpr,  # noqa: N803
    DIM_PAD: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
):
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    dims = tl.arange(0, DIM_PAD)
    is_token = tokens < num_tokens
    mask = is_token[:, None] & (dims < DIM)[None, :]
    at = head * num_tokens + tokens
    gap = tl.load(own_sums + at, mask=is_token, other=0.0)
    gap -= tl.load(past_sums + at, mask=is_token, other=0.0)
    # Of the smaller sum to the larger, so that nothing overflows.
    smaller = tl.exp(-tl.abs(gap))
    larger_share = 1.0 / (1.0 + smaller)
    smaller_share = smaller / (1.0 + smaller)
    past_share = tl.where(gap > 0, smaller_share, larger_share)[:, None]
    own_share = tl.where(gap > 0, larger_share, smaller_share)[:, None]
    there = past + head * past_head + tokens[:, None] * past_token + dims[None, :]
    here = own + head * own_head + tokens[:, None] * own_token + dims[None, :]
    value = tl.load(there, mask=mask, other=0.0).to(tl.float32) * past_share
    value += tl.load(here, mask=mask, other=0.0).to(tl.float32) * own_share
    target = merged + (tokens[:, None] * num_heads + head) * DIM + dims[None, :]
    tl.store(target, value.to(merged.dtype.element_ty), mask=mask)


def merge(past: Any, past_sums: Any, own: Any, own_sums: Any) -> Any:
    """Both halves [heads, tokens, dim], and the logs of their sums of weights [heads, tokens].

    The result is [tokens, heads, dim].
    """
    num_heads, num_tokens, dim = past.shape
    if past.stride(2) != 1 or own.stride(2) != 1:
        past, own = past.contiguous(), own.contiguous()
    merged = past.new_empty((num_tokens, num_heads, dim))
    _merge[(triton.cdiv(num_tokens, _TOKENS), num_heads)](
        past,
        past_sums.contiguous(),
        own,
        own_sums.contiguous(),
        merged,
        num_tokens,
        past.stride(0),
        past.stride(1),
        own.stride(0),
        own.stride(1),
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        TOKENS=_TOKENS,
        num_warps=4,
    )
    return merged
