"""The bytes of quantized parts: which numbers, in which order, and how many. Needs no torch.

A packed part is one run of bytes per layer, all of the same size, in the order of the layers. A
run consists of the sections below, without gaps. Numbers are little-endian, the last axis is the
innermost. The order does not depend on how the raw values lie in memory.

    fp8     scales        float32   [kind, head]
            codes         e4m3      [kind, head, token, dim]          value = code * scale

    int8    scales        bfloat16  [kind, head, token]
            codes         int8      [kind, head, token, dim]          value = code * scale

    int4    key scales    bfloat16  [head, dim]
            key minima    raw dtype [head, dim]
            value scales  bfloat16  [head, token, group]
            value minima  raw dtype [head, token, group]
            key codes     4 bits    [head, token, dim]                value = minimum + code * scale
            value codes   4 bits    [head, token, dim]

`kind` is 0 for keys and 1 for values. Two codes of 4 bits share a byte: the one of the even `dim`
is in the lower half. A group of `int4` consists of `group_size(dim)` neighboring channels. `value`
is computed in float32 and rounded once, to the raw dtype; in float16 at most to 65,504.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.codecs.layout import DIM, HEAD, LAYER, TOKEN, VALUE_BYTES, KvLayout
from penstock.codecs.names import LOSSY
from penstock.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
MAX_GROUP = 64  # channels of a value that share a scale in int4

_VERSION = 1
_ITEM_BYTES = {**VALUE_BYTES, "int8": 1}


@dataclass(frozen=True, slots=True)
class PackedSection:
    """Numbers of one layer that lie next to each other in its run."""

    dtype: str  # as torch names it, without "torch."
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def group_size(head_dim: int) -> int:
    """Equal groups, as large as possible: the largest divisor that is at most MAX_GROUP."""
    return next(size for size in range(MAX_GROUP, 0, -1) if head_dim % size == 0)


def why_not_lossy(name: str, layout: KvLayout) -> str:
    """Why a lossy codec cannot pack such values, in words; empty if it can."""
    if layout.dtype not in DTYPES:
        return f"it packs {', '.join(DTYPES)}, and this KV is {layout.dtype}"
    if name == "int4" and layout.size(DIM) % 2:
        return f"it needs an even number of elements per head, and this KV has {layout.size(DIM)}"
    return ""


def lossy_sections(name: str, layout: KvLayout) -> tuple[PackedSection, ...]:
    """The sections of one layer's run. ConfigError if the codec cannot pack such values."""
    if name not in LOSSY:
        raise ConfigError(f'the codec "{name}" is not lossy: expected one of {", ".join(LOSSY)}')
    if why := why_not_lossy(name, layout):
        raise ConfigError(f'the codec "{name}" cannot be used: {why}; choose "raw"')
    heads, tokens, dim = layout.size(HEAD), layout.size(TOKEN), layout.size(DIM)
    if name == "fp8":
        return (
            PackedSection("float32", (2, heads)),
            PackedSection("float8_e4m3fn", (2, heads, tokens, dim)),
        )
    if name == "int8":
        return (
            PackedSection("bfloat16", (2, heads, tokens)),
            PackedSection("int8", (2, heads, tokens, dim)),
        )
    groups = dim // group_size(dim)
    return (
        PackedSection("bfloat16", (heads, dim)),
        PackedSection(layout.dtype, (heads, dim)),
        PackedSection("bfloat16", (heads, tokens, groups)),
        PackedSection(layout.dtype, (heads, tokens, groups)),
        PackedSection("uint8", (heads, tokens, dim // 2)),
        PackedSection("uint8", (heads, tokens, dim // 2)),
    )


def lossy_layer_bytes(name: str, layout: KvLayout) -> int:
    """The size of one layer's run."""
    return sum(section.num_bytes for section in lossy_sections(name, layout))


def lossy_packed_bytes(name: str, layout: KvLayout) -> int:
    """The size of a packed part."""
    return layout.size(LAYER) * lossy_layer_bytes(name, layout)


def lossy_version(name: str, layout: KvLayout) -> str:
    axes = " ".join(f"{axis}={layout.size(axis)}" for axis in (LAYER, HEAD, TOKEN, DIM))
    return f"{name}/{_VERSION} {layout.dtype} {axes}"
