"""Quantiles of a Prometheus histogram, as `histogram_quantile` estimates them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from penstock.watch.samples import Samples


def quantile(seen: Samples, name: str, share: float, **labels: str) -> float | None:
    """The value below which `share` of the observations are; None if there are none.

    Observations are assumed to be spread evenly within a bucket. For those above the last finite
    bound, that bound is returned.
    """
    buckets = _buckets(seen, name, labels)
    if not buckets or buckets[-1][1] <= 0:
        return None
    wanted = share * buckets[-1][1]
    low = num_below = 0.0
    for bound, count in buckets:
        if count >= wanted and count > num_below:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (wanted - num_below) / (count - num_below)
        low, num_below = bound, count
    return low


def _buckets(seen: Samples, name: str, labels: dict[str, str]) -> Sequence[tuple[float, float]]:
    """Ascending bounds with their cumulative counts, summed over all series."""
    counts: dict[float, float] = {}
    for text, count in seen.by(f"{name}_bucket", "le", **labels).items():
        with suppress(ValueError):  # a bound that is not a number
            bound = float(text)  # "1" and "1.0" are the same
            counts[bound] = counts.get(bound, 0.0) + count
    return sorted(counts.items())
