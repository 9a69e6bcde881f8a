"""Compute a prompt from the front while its back is loaded, until both meet. Pure.

From a tier that is slower than computing, loading everything loses, and so does loading nothing:
the link and the processor can work at the same time. The front is computed, since every token
needs those before it; the back is loaded, since blocks are good without those before them once
these are there. (Cake, arXiv 2410.03065.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.costs import Choice, LinkRate, PrefillRate, load_seconds
from penstock.types import Match, Run, Tier

_Loading = Callable[[Sequence[Run]], float | None]
_Computing = Callable[[int, int], float]

# Both at once is more to do and to go wrong: it must be sooner by so much.
_MIN_GAIN = 0.25
_MIN_BLOCKS = 4


def choose_meeting(
    match: Match,
    plain: Choice,
    *,
    block_bytes: int,
    block_tokens: int,
    num_past_tokens: int,
    rates: Mapping[Tier, LinkRate],
    prefill: PrefillRate,
) -> Choice:
    """`plain`, or, where that is sooner, fewer leading blocks and a meeting behind them."""

    def loading(runs: Sequence[Run]) -> float | None:
        return load_seconds(runs, block_bytes, rates) if runs else 0.0

    def computing(start: int, end: int) -> float:
        past = num_past_tokens + start * block_tokens
        seconds = prefill.seconds((end - start) * block_tokens, past)
        return max(0.0, seconds - prefill.fixed_seconds)

    num_all = match.num_blocks
    plain_load = loading(_head(match.runs, plain.num_blocks))
    if plain_load is None:
        return plain
    best, best_seconds = plain, plain_load + computing(plain.num_blocks, num_all)
    best_seconds *= 1 - _MIN_GAIN
    start = 0
    for run in (Run(Tier.HOST, 0), *match.runs):
        start += run.num_blocks
        lead = loading(_head(match.runs, start))
        if lead is None or num_all - start < _MIN_BLOCKS:
            break
        meeting = _meet(match.runs, start, loading, computing)
        if meeting is not None and lead + meeting < best_seconds:
            best_seconds = lead + meeting
            best = Choice(start, lead, computing(0, start), num_meeting=num_all - start)
    return best


def _meet(
    runs: Sequence[Run],
    start: int,
    loading: _Loading,
    computing: _Computing,
) -> float | None:
    """Seconds until front and back meet, between `start` and the end of the match."""
    end = sum(run.num_blocks for run in runs)
    low, high = start, end  # the front ends between these
    while low < high:
        middle = (low + high) // 2
        back = loading(_tail(runs, end - middle))
        if back is None:
            return None
        if computing(start, middle) < back:
            low = middle + 1
        else:
            high = middle
    back = loading(_tail(runs, end - low))
    return None if back is None else max(computing(start, low), back)


def _head(runs: Sequence[Run], num_blocks: int) -> list[Run]:
    """The runs of the first so many blocks."""
    found: list[Run] = []
    for run in runs:
        taken = min(run.num_blocks, num_blocks)
        if taken:
            found.append(Run(run.tier, taken))
        num_blocks -= taken
    return found


def _tail(runs: Sequence[Run], num_blocks: int) -> list[Run]:
    """The runs of the last so many blocks."""
    return _head(runs[::-1], num_blocks)[::-1]
