"""How long to wait for KV that another server computes. Pure."""

from __future__ import annotations

MIN_SECONDS = 1.0
IF_UNKNOWN_SECONDS = 5.0


def prefill_patience(compute_seconds: float | None) -> float:
    """Seconds to wait for the next block, if computing the rest here takes `compute_seconds`.

    Twice as long: computing it here delays all answers that are being generated. None: unknown.
    """
    if compute_seconds is None:
        return IF_UNKNOWN_SECONDS
    return max(MIN_SECONDS, 2 * compute_seconds)
