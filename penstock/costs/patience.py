"""How long to wait for KV that another server computes. Pure."""

from __future__ import annotations

MIN_SECONDS = 1.0
IF_UNKNOWN_SECONDS = 5.0
# A decoder computes only the ends of prompts. What it learns from these few tokens can be a hundred
# times too slow for a whole prompt, and its user would wait for a server that is gone.
MAX_SECONDS = 30.0


def prefill_patience(compute_seconds: float | None, at_most: float = MAX_SECONDS) -> float:
    """Seconds to wait for the next block, if computing the rest here takes `compute_seconds`.

    Twice as long: computing it here delays all answers that are being generated. None: unknown.
    """
    if compute_seconds is None:
        return min(IF_UNKNOWN_SECONDS, at_most)
    return min(max(MIN_SECONDS, 2 * compute_seconds), at_most)
