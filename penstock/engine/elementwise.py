"""Fused GPU kernels for a decoder's work between its matrix products.

They round like transformers' own modules, so that results agree to the last bits.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from penstock.engine.attention.fp8_triton import fp8_mode, narrow


@triton.jit
def _add_norm(
    x,
    residual,
    weight,
    out,
    size,
    epsilon,
    HAS_RESIDUAL: tl.constexpr,  # noqa: N803
    SIZE_PAD: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, SIZE_PAD)
    mask = places < size
    kind: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + row * size + places, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * size + places, mask=mask, other=0.0).to(tl.float32)
        value = value.to(kind).to(tl.float32)
    tl.store(residual + row * size + places, value.to(kind), mask=mask)
    variance = tl.sum(value * value, 0) / size
    scaled = (value / tl.sqrt(variance + epsilon)).to(kind)
    scale = tl.load(weight + places, mask=mask, other=0.0)
    tl.store(out + row * size + places, scaled * scale, mask=mask)


@triton.jit
def _gate(
    both,  # [rows, 2 * size]: the gate's input, then the values it multiplies
    out,
    size,
    WIDTH: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = places < size
    kind: tl.constexpr = both.dtype.element_ty
    gate = tl.load(both + row * 2 * size + places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * size + size + places, mask=mask, other=0.0)
    activated = (gate / (1.0 + tl.exp(-gate))).to(kind)
    tl.store(out + row * size + places, activated * up, mask=mask)


# The alignment of these arrays depends on the prompt's length: do not recompile for each.
@triton.jit(do_not_specialize_on_alignment=["positions", "addresses"])
def _rotate_and_store(
    qkv,  # [rows, (heads + 2 kv_heads) * DIM]; queries and keys are rotated in place
    cosines,  # [positions, DIM / 2], float32
    sines,
    positions,
    addresses,  # of each row's keys in the first layer; 0 if they are stored already
    query_weight,
    key_weight,
    layer_bytes,
    epsilon,
    HEADS: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    HALF_PAD: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    HAS_NORM: tl.constexpr,  # noqa: N803
    ALIGN: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    AT_ONCE: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    kind: tl.constexpr = qkv.dtype.element_ty
    stored: tl.constexpr = kind if FP8 == "" else tl.uint8
    half: tl.constexpr = DIM // 2
    places = tl.arange(0, HALF_PAD)[None, :]
    is_place = places < half
    mask = is_place & (heads < HEADS + 2 * KV_HEADS)
    mine = qkv + row * ((HEADS + 2 * KV_HEADS) * DIM) + heads * DIM + places
    low = tl.load(mine, mask=mask, other=0.0)
    high = tl.load(mine + half, mask=mask, other=0.0)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORM:
        norm = tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + epsilon)[:, None]
        of_query, of_key = query_weight + places, key_weight + places
        is_query = heads < HEADS
        queries = tl.load(of_query, mask=is_place, other=0.0)
        keys = tl.load(of_key, mask=is_place, other=0.0)
        a = (a / norm).to(kind) * tl.where(is_query, queries, keys)
        queries = tl.load(of_query + half, mask=is_place, other=0.0)
        keys = tl.load(of_key + half, mask=is_place, other=0.0)
        b = (b / norm).to(kind) * tl.where(is_query, queries, keys)
        a, b = a.to(tl.float32), b.to(tl.float32)
    at = tl.load(positions + row) * half + places
    cosine = tl.load(cosines + at, mask=is_place, other=0.0).to(kind).to(tl.float32)
    sine = tl.load(sines + at, mask=is_place, other=0.0).to(kind).to(tl.float32)
    is_rotated = heads < HEADS + KV_HEADS
    low = tl.where(is_rotated, ((a * cosine).to(kind) - (b * sine).to(kind)).to(kind), low)
    high = tl.where(is_rotated, ((b * cosine).to(kind) + (a * sine).to(kind)).to(kind), high)
    tl.store(mine, low, mask=mask & is_rotated)
    tl.store(mine + half, high, mask=mask & is_rotated)
    address = tl.load(addresses + row)
    number = heads - HEADS  # of the keys of a token, then of its values
    target = tl.multiple_of((address + layer_bytes).to(tl.pointer_type(stored)), ALIGN)
    target += number // KV_HEADS * (BLOCK_TOKENS * KV_HEADS * DIM) + number % KV_HEADS * DIM
    is_stored = mask & (number >= tl.where(address != 0, 0, 2 * KV_HEADS))
    tl.store(target + places, narrow(low, FP8), mask=is_stored)
    tl.store(target + half + places, narrow(high, FP8), mask=is_stored)


def add_norm(x: Any, residual: Any | None, weight: Any, epsilon: float) -> tuple[Any, Any]:
    """The RMS norm of x + residual, and that sum as the new residual."""
    rows, size = x.shape
    has_residual = residual is not None
    residual = x.new_empty(x.shape) if residual is None else residual
    out = x.new_empty(x.shape)
    _add_norm[(rows,)](
        x,
        residual,
        weight,
        out,
        size,
        epsilon,
        HAS_RESIDUAL=has_residual,
        SIZE_PAD=triton.next_power_of_2(size),
        num_warps=8,
    )
    return out, residual


def gate(both: Any) -> Any:
    """silu(left half) * right half."""
    rows, size = both.shape[0], both.shape[1] // 2
    out = both.new_empty((rows, size))
    width = 1024
    _gate[(rows, triton.cdiv(size, width))](both, out, size, WIDTH=width, num_warps=4)
    return out


def rotate_and_store(
    qkv: Any,
    rotary: tuple[Any, Any],
    positions: Any,
    addresses: Any,
    norms: tuple[Any, Any] | None,
    layer_bytes: int,
    epsilon: float,
    heads: int,
    kv_heads: int,
    dim: int,
    block_tokens: int,
    *,
    is_fp8: bool = False,
) -> None:
    """Rotate queries and keys by their positions, in place; store keys and values in the pool.

    `is_fp8`: the pool holds e4m3 bytes. The keys and values in `qkv` are not rounded to them.
    """
    query_weight, key_weight = norms or (qkv, qkv)
    at_once = 16  # heads: fewer would be too little work for a program
    _rotate_and_store[(qkv.shape[0], triton.cdiv(heads + 2 * kv_heads, at_once))](
        qkv,
        *rotary,
        positions,
        addresses,
        query_weight,
        key_weight,
        layer_bytes,
        epsilon,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF_PAD=triton.next_power_of_2(dim // 2),
        BLOCK_TOKENS=block_tokens,
        HAS_NORM=norms is not None,
        ALIGN=math.gcd(16, dim // 2 * (1 if is_fp8 else qkv.element_size())),
        FP8=fp8_mode(qkv, is_fp8=is_fp8),
        AT_ONCE=at_once,
        num_warps=4,
        enable_fp_fusion=False,  # each product is rounded, as in transformers
    )
