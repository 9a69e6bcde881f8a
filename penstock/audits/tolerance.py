"""How far computed KV may be from stored KV: what another batch shape can cause, and no more. Pure.

Each layer has its own limit, because rounding errors grow from layer to layer: the first layers,
where even a small fault shows, have the tightest one. The limit is several times the largest
difference seen between clean blocks, within bounds that depend on the number type:

- An engine computes one prompt in two batch shapes when it starts, and calls `calibrate`.
- A client that cannot do this calls `learn` with its first audits. Until there have been enough of
  them, the upper bound is the limit, which still finds KV of other tokens or other positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.audits.compare import Difference
from penstock.audits.layout import BlockLayout

_MARGIN = 8.0  # times the largest difference seen
_NUM_LEARNED = 64  # blocks


class _Bounds(NamedTuple):
    low: float
    high: float


# Low: a few units in the last place of every number. High: far below what KV of other tokens gives.
_BOUNDS = {
    "float64": _Bounds(1e-9, 0.02),
    "float32": _Bounds(1e-4, 0.02),
    "float16": _Bounds(0.005, 0.1),
    "bfloat16": _Bounds(0.02, 0.2),
    "float8_e4m3fn": _Bounds(0.1, 0.3),
    "float8_e5m2": _Bounds(0.15, 0.4),
}
_OPAQUE = _Bounds(0.25, 0.7)  # share of bytes that differ; unrelated bytes: more than 0.95


class Tolerance:
    """The limit of each stretch of a layout."""

    def __init__(self, layout: BlockLayout) -> None:
        self._bounds = [_BOUNDS.get(each.dtype, _OPAQUE) for each in layout.stretches]
        self._largest = [0.0] * len(self._bounds)
        self._num_seen = 0
        self._is_calibrated = False

    @property
    def is_calibrated(self) -> bool:
        return self._is_calibrated

    @property
    def limits(self) -> list[float]:
        if not self._is_calibrated:
            return [bounds.high for bounds in self._bounds]
        return [
            min(max(_MARGIN * largest, bounds.low), bounds.high)
            for largest, bounds in zip(self._largest, self._bounds, strict=True)
        ]

    @property
    def span(self) -> tuple[float, float]:
        """The smallest and the largest limit."""
        limits = self.limits
        return min(limits), max(limits)

    def calibrate(self, clean: Iterable[Sequence[Difference]]) -> None:
        """Set the limits from blocks computed twice: each one's differences, by stretch."""
        for differences in clean:
            self._see(differences)
        self._is_calibrated = True

    def learn(self, differences: Sequence[Difference]) -> None:
        """Note an audited block that has passed. Ignored once there have been enough."""
        if not self._is_calibrated:
            self._see(differences)
            self._num_seen += 1
            self._is_calibrated = self._num_seen >= _NUM_LEARNED

    def exceeded(self, differences: Sequence[Difference]) -> list[tuple[Difference, float]]:
        """The differences beyond their limit, each with that limit."""
        pairs = zip(differences, self.limits, strict=True)
        # Written so that NaN counts as beyond.
        return [(each, limit) for each, limit in pairs if not each.value <= limit]

    def _see(self, differences: Sequence[Difference]) -> None:
        self._largest = [
            max(before, difference.value)
            for before, difference in zip(self._largest, differences, strict=True)
        ]
