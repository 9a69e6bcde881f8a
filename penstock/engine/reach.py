"""How far back the layers of a model read, so that cold blocks before a window stay in HOST. Pure.

Layers with windows of different width all count with the widest one: they fetch a little too much,
and a step's plan has one number for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.engine.table import Places


@dataclass(frozen=True, slots=True)
class Reach:
    window: int = 0  # the widest one, in tokens; 0: no layer has one
    is_limited: bool = False  # every layer has a window
    block_tokens: int = 1

    @classmethod
    def of(cls, windows: Sequence[int], block_tokens: int) -> Reach:
        """`windows`: of each layer, 0 if it has none."""
        return cls(max(windows, default=0), bool(windows) and all(windows), block_tokens)

    def tokens_after(self, indices: Places, lengths: Places) -> Places:
        """How many tokens come after these blocks of sequences that have `lengths`."""
        return lengths - (indices + 1) * self.block_tokens

    def num_near(self, after: Places) -> int:
        """How many of these blocks, from the first, have all those that a window reaches.

        `after`: how many tokens the nearest of the sequences that read a block has after it.
        """
        if not self.window:
            return 0
        near = np.flatnonzero(after < self.window)
        return int(near[-1]) + 1 if len(near) else 0

    def nearest_first(self, indices: Places, after: Places) -> Places:
        """`indices` in order of `after`, if that matters."""
        return indices[np.argsort(after[indices], kind="stable")] if self.window else indices


FAR_REACH = Reach()
