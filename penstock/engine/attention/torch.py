"""Paged attention with torch's kernels, registered with transformers' AttentionInterface.

The tokens of all sequences of a step are packed into one row. Each layer first writes their keys
and values to the pool, then attends: prompt chunks one by one, and sequences that add one token
together if there is a decode kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from penstock.engine.attention.by_rules import attend_by_rules
from penstock.engine.attention.rules import CAUSAL, LayerRules

log = logging.getLogger(__name__)

NAME = "penstock"
_LONG_PAST = 1024  # tokens from which two passes are faster than one with a mask
# cuDNN takes 60 ms to plan each new shape, so it is used only for large inputs of few lengths.
_CUDNN_TOKENS = 1024
_CUDNN_PAIRS = 1 << 24  # pairs of a new token and a token before it
_without_cudnn: set[torch.device] = set()  # devices where cuDNN's attention failed


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """One sequence's part of a packed row."""

    begin: int  # offset in the row
    num_new: int
    num_past: int  # tokens before its first new one, whose KV is stored
    blocks: Any  # the sequence's blocks in order, in the form that the step's `KvMemory` takes
    positions: Tensor | None = None  # of its new tokens; None if they are consecutive


class DecodeKernel(Protocol):
    def attend(self, query: Tensor, layer: int, scale: float, rules: LayerRules = CAUSAL) -> Tensor:
        """Attend with queries [sequences, heads, head_dim]. The result has the same shape."""
        ...


class KvMemory(Protocol):
    """Stores a step's KV and reads that of earlier steps."""

    rounds: bool  # whether KV is stored with fewer bits than it is computed with
    block_tokens: int

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the step's new keys and values, both [row, kv_heads, head_dim]."""
        ...

    def history(self, layer: int, blocks: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens in these blocks, both [tokens, kv_heads, head_dim].

        They may have the type in which they are stored.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What every layer of one forward pass needs."""

    memory: KvMemory
    spans: Sequence[SequenceSpan]  # all sequences except those of `decode`
    decode: DecodeKernel | None = None  # sequences with one new token, at the row's start
    num_decode: int = 0
    between_layers: Callable[[], None] = lambda: None
    await_layer: Callable[[int], None] = lambda layer: None  # called before a layer reads KV


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    penstock: AttentionStep,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    query [1, heads, row, head_dim]; key and value [1, kv_heads, row, head_dim].
    """
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    value_dim = value.shape[3]
    if value_dim != key.shape[3]:  # zeros change neither scores nor the values that are kept
        width = max(value_dim, key.shape[3])
        query, key, value = (pad(each, (0, width - each.shape[3])) for each in (query, key, value))
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    penstock.memory.write(module.layer_idx, keys, values)
    rules = LayerRules(sliding_window or 0, softcap or 0.0, s_aux)
    queries = query[0].transpose(0, 1)
    out = attend(penstock, module.layer_idx, queries, keys, values, scale, rules)
    return out[None, :, :, :value_dim], None


def attend(
    step: AttentionStep,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    rules: LayerRules = CAUSAL,
) -> Tensor:
    """Attend in one layer. The result has the query's shape.

    query [row, heads, head_dim]; key and value [row, kv_heads, head_dim].
    """
    step.between_layers()
    step.await_layer(layer)
    if step.decode is not None and not step.spans:
        return step.decode.attend(query, layer, scale, rules)
    is_alone = step.decode is None and len(step.spans) == 1
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if step.decode is not None:
        decoded = query[: step.num_decode]
        out[: step.num_decode] = step.decode.attend(decoded, layer, scale, rules)
    for span in step.spans:
        new = slice(span.begin, span.begin + span.num_new)
        num_tokens = span.num_past + span.num_new
        is_causal_alone = rules.changes_no_score and (
            not rules.window or (span.positions is None and num_tokens <= rules.window)
        )
        if span.positions is not None or not is_causal_alone:
            q, k, v = query[new], key[new], value[new]
            out[new] = _attend_by_rules(step.memory, layer, span, q, k, v, scale, rules)
            continue
        # If KV is rounded, a chunk attends to its own keys as they are stored, as later chunks do:
        # otherwise answers would depend on how a prompt is split.
        if span.num_past or step.memory.rounds:
            k, v = step.memory.history(layer, span.blocks)
            k, v = k[:num_tokens].to(query.dtype), v[:num_tokens].to(query.dtype)
        else:
            k, v = key[new], value[new]
        # [1, heads, tokens, head_dim], as torch expects
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query[new], k, v))
        attended = _attend(q, k, v, span, scale)
        if is_alone and span.num_new == len(query):
            return attended
        out[new] = attended
    return out


def _attend_by_rules(
    memory: KvMemory,
    layer: int,
    span: SequenceSpan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    rules: LayerRules,
) -> Tensor:
    """Attend with a span's queries. Blocks before the window are not read."""
    first_block = rules.first_token(span.num_past) // memory.block_tokens
    if span.positions is not None or span.num_past or memory.rounds:
        key, value = memory.history(layer, span.blocks[first_block:])
    num_skipped = first_block * memory.block_tokens
    positions = span.positions
    if positions is None:
        end = span.num_past + span.num_new
        positions = torch.arange(span.num_past, end, device=query.device)
    return attend_by_rules(query, key, value, positions - num_skipped, scale, rules)


def _attend(query: Tensor, key: Tensor, value: Tensor, span: SequenceSpan, scale: float) -> Tensor:
    """The result is [tokens, heads, head_dim]."""
    mask = None
    if span.num_new > 1 and span.num_past and _is_better_in_two(query, span):
        return _attend_in_two(query, key, value, span.num_past, scale)
    if span.num_new > 1 and not span.num_past and _suits_cudnn(query, key):
        return _flash(query, key, value, True, scale)[0][0].transpose(0, 1)
    if span.num_past and span.num_new > 1:
        positions = torch.arange(span.num_past, span.num_past + span.num_new, device=query.device)
        mask = torch.arange(key.shape[2], device=query.device)[None] <= positions[:, None]
    attended = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and span.num_new > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[0].transpose(0, 1)


def _is_better_in_two(query: Tensor, span: SequenceSpan) -> bool:
    if query.device.type == "cpu":
        return span.num_past >= _LONG_PAST
    return query.dtype is not torch.float32  # a GPU's fast kernel does not support masks


def _attend_in_two(
    query: Tensor, key: Tensor, value: Tensor, num_past: int, scale: float
) -> Tensor:
    """Attend to history and chunk separately, then merge: a single pass needs a slow mask."""
    past, past_sum = _flash(query, key[:, :, :num_past], value[:, :, :num_past], False, scale)
    own, own_sum = _flash(query, key[:, :, num_past:], value[:, :, num_past:], True, scale)
    if query.is_cuda:
        from penstock.engine.attention import halves_triton

        merged: Tensor = halves_triton.merge(past[0], past_sum[0], own[0], own_sum[0])
        return merged
    both = torch.logaddexp(past_sum, own_sum)
    past_share = (past_sum - both).exp()[..., None].to(past.dtype)
    own_share = (own_sum - both).exp()[..., None].to(own.dtype)
    return (past * past_share + own * own_share)[0].transpose(0, 1)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The attention output, and the log of the sum of weights."""
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, logsum = kernel(query, key, value, is_causal=is_causal, scale=scale)
    elif _suits_cudnn(query, key):
        kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, logsum = kernel(query, key, value, None, True, 0.0, is_causal, False, scale=scale)[:2]
        logsum = logsum.reshape(query.shape[:3])
    else:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        out, logsum = kernel(query, key, value, is_causal=is_causal, scale=scale)[:2]
    return out, logsum


def _suits_cudnn(query: Tensor, key: Tensor) -> bool:
    """Whether cuDNN's kernel is available and worth using: on an H200 it takes half the time."""
    return (
        query.is_cuda
        and query.dtype is not torch.float32
        and query.shape[3] in (64, 128)
        and not query.shape[2] % _CUDNN_TOKENS
        and not key.shape[2] % _CUDNN_TOKENS
        and query.shape[2] * key.shape[2] >= _CUDNN_PAIRS
        and _has_cudnn(query.device)
    )


def _has_cudnn(device: torch.device) -> bool:
    cuda: Any = torch.backends.cuda  # untyped
    if device in _without_cudnn:
        return False
    return bool(cuda.cudnn_sdp_enabled()) and torch.cuda.get_device_capability(device) >= (9, 0)


def prepare(num_heads: int, num_kv_heads: int, head_dim: int, like: Tensor) -> None:
    """Warm up the kernels for long prompts: the first call of each takes most of a second."""
    tokens = int(_CUDNN_PAIRS**0.5)
    query = like.new_zeros((1, num_heads, tokens, head_dim))
    key = like.new_zeros((1, num_kv_heads, tokens, head_dim))
    if _suits_cudnn(query, key):
        try:
            for is_causal in (True, False):
                _flash(query, key, key, is_causal, 1.0)
        except RuntimeError as error:
            log.info("cuDNN's attention is not available, using torch's own: %s", error)
            _without_cudnn.add(like.device)


def register() -> None:
    """Register this implementation with transformers under `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
