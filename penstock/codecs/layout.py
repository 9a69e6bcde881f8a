"""How the values of one worker's part of a block lie in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

LAYER, KIND, TOKEN, HEAD, DIM = "layer", "kind", "token", "head", "dim"
AXES = (LAYER, KIND, TOKEN, HEAD, DIM)

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Dense values, as axes from the outermost to the innermost.

    KIND has size 2: keys, then values. Each axis occurs once.
    """

    dtype: str  # as torch names it, without "torch."
    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if sorted(names) != sorted(AXES) or self.size(KIND) != 2:
            raise ValueError(f"a layout needs each of {', '.join(AXES)} once: {self.axes}")

    @classmethod
    def of_engine(
        cls, dtype: str, num_layers: int, block_tokens: int, kv_heads: int, head_dim: int
    ) -> KvLayout:
        """The embedded engine's blocks."""
        sizes = (num_layers, 2, block_tokens, kv_heads, head_dim)
        return cls(dtype, tuple(zip((LAYER, KIND, TOKEN, HEAD, DIM), sizes, strict=True)))

    def size(self, axis: str) -> int:
        return dict(self.axes)[axis]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_values * VALUE_BYTES[self.dtype]
