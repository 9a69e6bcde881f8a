"""What prompts with segments need in numpy. Imported only if a trace has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.engine.table import Places
from penstock.types import Slot


def places_of(slots: Sequence[Slot]) -> Places:
    return np.array(slots, np.int64)


def spread(parts: Sequence[range], share: float) -> Places:
    """`share` of the positions of each part, spread evenly."""
    chosen = [
        part.start + np.arange(count, dtype=np.int64) * len(part) // count
        for part in parts
        if (count := min(len(part), round(share * len(part))))
    ]
    return np.concatenate([np.zeros(0, np.int64), *chosen])
