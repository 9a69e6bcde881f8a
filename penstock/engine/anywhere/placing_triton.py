"""Copies KV of tokens within a pool on a GPU, and turns the keys. One launch has all layers."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _place_tokens(
    pool,  # [blocks, LAYERS, 2, BLOCK_TOKENS, KV_HEADS, DIM]
    source_slots,  # of each token
    source_offsets,
    slots,
    offsets,
    rotations,  # of each layer: a number in `angles`, or -1
    angles,  # [rotations, 2, HALF]: cosines and sines of the turn
    LAYERS: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    HEADS_PAD: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    DIM_PAD: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    HALF_PAD: tl.constexpr,  # noqa: N803
    INTERLEAVED: tl.constexpr,  # noqa: N803
):
    token, layer = tl.program_id(0), tl.program_id(1)
    size: tl.constexpr = KV_HEADS * DIM
    source = (tl.load(source_slots + token).to(tl.int64) * LAYERS + layer) * 2 * BLOCK_TOKENS
    source = pool + (source + tl.load(source_offsets + token)) * size
    target = (tl.load(slots + token).to(tl.int64) * LAYERS + layer) * 2 * BLOCK_TOKENS
    target = pool + (target + tl.load(offsets + token)) * size
    heads = tl.arange(0, HEADS_PAD)
    dims = tl.arange(0, DIM_PAD)
    at = heads[:, None] * DIM + dims[None, :]
    mask = (heads < KV_HEADS)[:, None] & (dims < DIM)[None, :]
    values = tl.load(source + BLOCK_TOKENS * size + at, mask=mask)
    tl.store(target + BLOCK_TOKENS * size + at, values, mask=mask)
    rotation = tl.load(rotations + layer)
    if rotation < 0:
        tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)
    else:
        # What is not rotated.
        rest = mask & (dims >= 2 * HALF)[None, :]
        tl.store(target + at, tl.load(source + at, mask=rest), mask=rest)
        pairs = tl.arange(0, HALF_PAD)
        is_pair = pairs < HALF
        cosines = tl.load(angles + rotation * 2 * HALF + pairs, mask=is_pair, other=0.0)
        sines = tl.load(angles + (rotation * 2 + 1) * HALF + pairs, mask=is_pair, other=0.0)
        there = (heads < KV_HEADS)[:, None] & is_pair[None, :]
        if INTERLEAVED:
            first = heads[:, None] * DIM + 2 * pairs[None, :]
            second = first + 1
        else:
            first = heads[:, None] * DIM + pairs[None, :]
            second = first + HALF
        one = tl.load(source + first, mask=there, other=0.0).to(tl.float32)
        two = tl.load(source + second, mask=there, other=0.0).to(tl.float32)
        kind = pool.dtype.element_ty
        turned = one * cosines[None, :] - two * sines[None, :]
        tl.store(target + first, turned.to(kind), mask=there)
        turned = two * cosines[None, :] + one * sines[None, :]
        tl.store(target + second, turned.to(kind), mask=there)


def place_tokens(
    pool: Any,
    sources: tuple[Any, Any],
    targets: tuple[Any, Any],
    rotations: Any,
    angles: Any,
    *,
    is_interleaved: bool,
) -> None:
    """Copy tokens in a pool, [blocks, layers, 2, block_tokens, kv_heads, head_dim], contiguous.

    `sources` and `targets` are slots and offsets of each token. `rotations` has a number for each
    layer, -1 for none; `angles` [rotations, 2, pairs] are their cosines and sines.
    """
    _, layers, _, block_tokens, kv_heads, dim = pool.shape
    half = angles.shape[2]
    _place_tokens[(len(targets[0]), layers)](
        pool,
        *sources,
        *targets,
        rotations,
        angles,
        LAYERS=layers,
        BLOCK_TOKENS=block_tokens,
        KV_HEADS=kv_heads,
        HEADS_PAD=triton.next_power_of_2(kv_heads),
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        INTERLEAVED=is_interleaved,
        num_warps=2,
    )
