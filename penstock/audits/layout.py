"""What the bytes of a block mean, so that a difference can be given a layer and a head. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Number types whose values are compared. Of all others (packed, unknown), bytes are compared."""

KV, TOKEN, HEAD, DIM = "kv", "token", "head", "dim"  # names of axes
_PARTS = ("K", "V")


@dataclass(frozen=True, slots=True)
class Stretch:
    """One layer's bytes in a block: an array of numbers, or bytes of unknown meaning.

    `axes` names the dimensions. A difference is measured for each index of "kv" (0 is K, 1 is V)
    and "head" separately, over all other dimensions together. Use any other name, or "", for
    dimensions without such a meaning, for example in the state of a Mamba layer.
    """

    layer: str
    offset: int  # in bytes, from the block's first
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...] = ()
    # In numbers, of each dimension, as torch gives them. Empty: dense, the last one fastest.
    strides: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.axes and len(self.axes) != len(self.shape):
            raise ValueError(f"{self.layer}: {len(self.shape)} dimensions, {len(self.axes)} names")
        if self.strides and len(self.strides) != len(self.shape):
            raise ValueError(f"{self.layer}: {len(self.shape)} dimensions, other strides")

    @property
    def is_opaque(self) -> bool:
        return self.dtype not in ITEM_BYTES

    @property
    def num_bytes(self) -> int:
        """The bytes from its first to its last number. An opaque stretch has bytes as items."""
        item_bytes = ITEM_BYTES.get(self.dtype, 1)
        if not self.strides:
            return math.prod(self.shape) * item_bytes
        steps = zip(self.shape, self.strides, strict=True)
        return (1 + sum((size - 1) * stride for size, stride in steps)) * item_bytes

    def part(self, index: int | None) -> str:
        """What an index of the axis "kv" is called."""
        return "" if index is None else _PARTS[index] if index < len(_PARTS) else str(index)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The stretches of one kind of block. Bytes outside of them are padding, and never compared."""

    stretches: tuple[Stretch, ...]

    @property
    def num_bytes(self) -> int:
        """Where the last stretch ends."""
        return max((each.offset + each.num_bytes for each in self.stretches), default=0)

    @classmethod
    def uniform(
        cls, layers: Sequence[str], dtype: str, shape: tuple[int, ...], axes: tuple[str, ...]
    ) -> BlockLayout:
        """Layers of the same shape, one after the other."""
        size = math.prod(shape) * ITEM_BYTES.get(dtype, 1)
        return cls(
            tuple(
                Stretch(layer, number * size, dtype, shape, axes)
                for number, layer in enumerate(layers)
            )
        )
