"""Attention on a GPU of tokens that are scattered in a sequence, or whose layer has rules.

Each token attends to all tokens up to its own position, or to those in its window. Positions are in
order, so the tokens of a tile read the sequence up to its last one.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.engine.attention.rules import CAUSAL, LayerRules
from penstock.engine.attention.triton import soften

_SHAPE = (64, 64, 3)  # rows, tokens of a tile, stages
# Wide heads would not fit a GPU's shared memory.
_WIDE_SHAPES = {2: (64, 32, 2), 4: (16, 32, 1)}  # by the size of a value in bytes
_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST = tl.constexpr(-1e38)  # less than any score


@triton.jit(do_not_specialize=["num_rows"])
def _attend_scattered(
    query,  # [rows, heads, DIM]
    key,  # [tokens, KV_HEADS, DIM]
    value,
    positions,  # of the rows
    out,  # [rows, heads, DIM]
    sinks,  # [heads]; not read unless HAS_SINKS
    num_rows,
    scale,
    row_stride,
    head_stride,
    KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    DIM_PAD: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
    CAP: tl.constexpr,  # noqa: N803
    HAS_SINKS: tl.constexpr,  # noqa: N803
):
    kind: tl.constexpr = query.dtype.element_ty
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    is_dim = dims < DIM
    mask = (rows < num_rows)[:, None] & is_dim[None, :]
    at = tl.load(positions + rows, mask=rows < num_rows, other=0)
    last = tl.max(at)
    factor = scale if CAP > 0 else scale * _LOG2_E
    q = tl.load(
        query + rows.to(tl.int64)[:, None] * row_stride + head * head_stride + dims[None, :],
        mask=mask,
        other=0.0,
    )
    most = tl.full([ROWS], 0.0 if HAS_SINKS else float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, DIM_PAD], tl.float32)
    if HAS_SINKS:
        most += tl.load(sinks + head).to(tl.float32) * _LOG2_E
        total += 1.0
    begin = 0
    if WINDOW:
        at = tl.where(rows < num_rows, at, last)
        begin = tl.maximum(tl.min(at) - WINDOW + 1, 0)
    for first in range(begin, last + 1, TILE):
        tokens = first + tl.arange(0, TILE)
        there = (tokens <= last)[:, None] & is_dim[None, :]
        offsets = (tokens.to(tl.int64)[:, None] * KV_HEADS + head // GROUP) * DIM + dims[None, :]
        k = tl.load(key + offsets, mask=there, other=0.0)
        v = tl.load(value + offsets, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
        if CAP > 0:
            scores = soften(scores, CAP) * _LOG2_E
        # The first tile has the first token, to which all attend: no sum is ever empty.
        scores = tl.where(tokens[None, :] <= at[:, None], scores, float("-inf"))
        if WINDOW:
            scores = tl.where(tokens[None, :] > at[:, None] - WINDOW, scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        if WINDOW:  # unless a row's window begins after the first tile
            new_most = tl.maximum(new_most, _LEAST)
        shrink = tl.exp2(most - new_most)
        weights = tl.exp2(scores - new_most[:, None])
        total = total * shrink + tl.sum(weights, 1)
        values = values * shrink[:, None]
        values += tl.dot(weights.to(kind), v, input_precision=PRECISION)
        most = new_most
    heads: tl.constexpr = KV_HEADS * GROUP
    target = out + (rows.to(tl.int64)[:, None] * heads + head) * DIM + dims[None, :]
    tl.store(target, values / total[:, None], mask=mask)


def attend_scattered(
    query: Any,
    key: Any,
    value: Any,
    positions: Any,
    scale: float,
    rules: LayerRules = CAUSAL,
) -> Any:
    """Attend with query [rows, heads, dim] to key and value [tokens, kv_heads, dim], contiguous.

    `positions` has the position of each row, in order. The result has the query's shape.
    """
    num_rows, heads, dim = query.shape
    out = query.new_empty(query.shape)
    dim_pad = max(16, triton.next_power_of_2(dim))
    rows, tile, stages = _SHAPE if dim_pad <= 128 else _WIDE_SHAPES[query.element_size()]
    _attend_scattered[(triton.cdiv(num_rows, rows), heads)](
        query,
        key.contiguous(),
        value.contiguous(),
        positions,
        out,
        out if rules.sinks is None else rules.sinks,
        num_rows,
        scale,
        query.stride(0),
        query.stride(1),
        KV_HEADS=key.shape[1],
        GROUP=heads // key.shape[1],
        DIM=dim,
        DIM_PAD=dim_pad,
        ROWS=rows,
        TILE=tile,
        PRECISION="ieee" if query.element_size() == 4 else "tf32",
        WINDOW=rules.window,
        CAP=rules.cap,
        HAS_SINKS=rules.sinks is not None,
        num_warps=4,
        num_stages=stages,
    )
    return out
