"""What is to be copied from the blocks of a segment to those of a prompt. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Placing:
    """Copy KV of tokens from blocks of a segment to blocks of a prompt, turned by `turn` positions.

    All arrays have one number for each token: block and place within it.
    """

    source_slots: NDArray[np.int64]
    source_offsets: NDArray[np.int64]
    slots: NDArray[np.int64]
    offsets: NDArray[np.int64]
    turn: int
