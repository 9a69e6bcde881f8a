"""Measures how far two blocks are apart, by layer, K or V, and head. Pure.

For numbers, the difference is the relative distance |a - b| / max(|a|, |b|), with Euclidean norms
over all tokens of a block. Rounding in another batch shape gives 1e-6 (float32) to a few percent
(bfloat16); KV of other tokens, another position, another rope or nothing at all gives 0.1 to 1.4.
A number that is infinite or NaN in one block only makes the difference infinite.

For bytes of unknown meaning, the difference is the share of bytes that differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.audits.layout import HEAD, KV, BlockLayout, Stretch

_Numbers = NDArray[Any]  # float32 or float64

# A head with (nearly) no KV is measured against the others: its own rounding errors are not faults.
_QUIET_SHARE = 1e-3
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference within one stretch, and where it is."""

    layer: str
    part: str  # "K" or "V"; "" if unknown
    head: int | None  # None if unknown
    value: float  # may be infinite

    @property
    def place(self) -> str:
        words = [f"layer {self.layer}"]
        if self.part:
            words.append(self.part)
        if self.head is not None:
            words.append(f"head {self.head}")
        return ", ".join(words)


def compare_blocks(layout: BlockLayout, one: memoryview, other: memoryview) -> list[Difference]:
    """The largest difference of each stretch, in the order of the layout."""
    return [_compare(stretch, one, other) for stretch in layout.stretches]


def differing_stretches(
    layout: BlockLayout, one: memoryview, other: memoryview
) -> list[Difference]:
    """The stretches that are not the same bit for bit."""
    return [
        _compare(stretch, one, other)
        for stretch in layout.stretches
        if not np.array_equal(_bytes(stretch, one), _bytes(stretch, other))
    ]


def _compare(stretch: Stretch, one: memoryview, other: memoryview) -> Difference:
    if stretch.is_opaque:
        share = float(np.mean(_bytes(stretch, one) != _bytes(stretch, other)))
        return Difference(stretch.layer, "", None, share)
    distances = _distances(_numbers(stretch, one), _numbers(stretch, other))
    worst = int(np.argmax(distances))
    kv, head = np.unravel_index(worst, distances.shape)
    return Difference(
        stretch.layer,
        stretch.part(int(kv)) if KV in stretch.axes else "",
        int(head) if HEAD in stretch.axes else None,
        float(distances.flat[worst]),
    )


def _distances(one: _Numbers, other: _Numbers) -> NDArray[np.float64]:
    """Relative distances of arrays [kv, heads, numbers]: an array [kv, heads]."""
    is_finite = np.isfinite(one) & np.isfinite(other)
    is_mismatch = np.zeros(one.shape[:2], np.bool_)
    if not is_finite.all():
        # Two infinities of the same sign are equal, and so are two NaNs.
        is_same = (one == other) | (np.isnan(one) & np.isnan(other))
        is_mismatch = (~is_finite & ~is_same).any(axis=2)
        one, other = np.where(is_finite, one, 0), np.where(is_finite, other, 0)
    norms = np.maximum(_norms(one), _norms(other))
    typical = np.sqrt(np.mean(np.square(norms), axis=1, keepdims=True))
    scale = np.maximum(np.maximum(norms, _QUIET_SHARE * typical), _TINY)
    with np.errstate(over="ignore"):
        distances = _norms(one.astype(np.float64) - other) / scale
    distances[is_mismatch] = np.inf
    return np.asarray(distances, np.float64)


def _norms(numbers: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(np.sqrt(np.square(numbers, dtype=np.float64).sum(axis=2)), np.float64)


def _bytes(stretch: Stretch, block: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(block, np.uint8, stretch.num_bytes, stretch.offset)


def _numbers(stretch: Stretch, block: memoryview) -> _Numbers:
    """The numbers of a stretch as an array [kv, heads, the rest]."""
    flat = _decode(_bytes(stretch, block), stretch.dtype)
    if stretch.strides:
        steps = [stride * flat.itemsize for stride in stretch.strides]
        numbers: NDArray[Any] = np.lib.stride_tricks.as_strided(flat, stretch.shape, steps)
    else:
        numbers = flat.reshape(stretch.shape)
    named = [stretch.axes.index(name) for name in (KV, HEAD) if name in stretch.axes]
    numbers = np.moveaxis(numbers, named, range(len(named)))
    num_parts = stretch.shape[stretch.axes.index(KV)] if KV in stretch.axes else 1
    num_heads = stretch.shape[stretch.axes.index(HEAD)] if HEAD in stretch.axes else 1
    return numbers.reshape(num_parts, num_heads, -1)


def _decode(data: NDArray[np.uint8], dtype: str) -> _Numbers:
    if dtype == "bfloat16":  # the upper half of a float32
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return _widen((data.astype(np.uint16) << 8).view(np.float16))
    if dtype == "float8_e4m3fn":
        return _e4m3_values()[data]
    if dtype == "float16":
        return _widen(data.view(np.float16))
    return data.view(np.float64 if dtype == "float64" else np.float32)


def _widen(halves: NDArray[np.float16]) -> _Numbers:
    with np.errstate(invalid="ignore"):  # on some processors, signaling NaNs give a warning
        return halves.astype(np.float32)


@cache
def _e4m3_values() -> NDArray[np.float32]:
    """The value of each byte: a sign, 4 bits of exponent, 3 of mantissa; no infinity."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    size = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    size[(byte & 127) == 127] = np.nan
    return np.where(byte & 128, -size, size).astype(np.float32)
