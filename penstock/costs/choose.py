"""Decide how much of a match to load and how much to compute. Pure.

From a tier that is slower than computing, both can work at once: the front of the prompt is
computed, since every token needs those before it, while the back is loaded, until the two meet
(Cake, arXiv 2410.03065).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.costs.meters import PrefillMeter
from penstock.costs.rates import LinkRate, PrefillRate, load_seconds
from penstock.types import Match, Run, Tier

_Loading = Callable[[Sequence[Run]], float | None]
_Computing = Callable[[int, int], float]

# Both at once is more to do and to go wrong: it must be sooner by so much.
_MIN_GAIN = 0.25
_MIN_BLOCKS = 4
_MIN_PATIENCE_SECONDS = 1.0
# A link that looks slow is only measured by using it: one match in so many is loaded all the same.
_LOOK_AGAIN = 32


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """How many leading blocks of a match to load; seconds are None where nothing is known yet."""

    num_blocks: int
    load_seconds: float | None = None
    compute_seconds: float | None = None  # what computing these blocks would take instead
    num_two_ended: int = 0  # blocks behind them: loaded from the back, computed from the front

    @property
    def patience_seconds(self) -> float | None:
        """How long the load may take before computing is begun after all; None: not known.

        Whoever waits longer than computing takes has lost already; twice that, and never less
        than a moment, leaves room for what only happens now and then.
        """
        if self.compute_seconds is None:
            return None
        return max(_MIN_PATIENCE_SECONDS, 2 * self.compute_seconds)


def choose_load(
    match: Match,
    *,
    block_bytes: int,
    block_tokens: int,
    num_past_tokens: int,
    rates: Mapping[Tier, LinkRate],
    prefill: PrefillRate | None,
) -> LoadChoice:
    """The leading blocks whose loading saves most over computing them.

    A match is a row of runs, each from one tier. The gain within a run is at its largest at one of
    its ends: loading is linear in its length and computing convex. So only ends are tried. A step
    is computed in any case, for the prompt's last token at least: its fixed part is not saved.
    """
    best = LoadChoice(0, 0.0, 0.0)
    best_gain = 0.0
    num_blocks = 0
    for index, run in enumerate(match.runs):
        num_blocks += run.num_blocks
        loading = load_seconds(match.runs[: index + 1], block_bytes, rates)
        if prefill is None:
            return LoadChoice(match.num_blocks)
        if loading is None:  # to load is how a link's rate becomes known; but not at any price
            num_tokens = match.num_blocks * block_tokens
            return LoadChoice(match.num_blocks, None, prefill.seconds(num_tokens, num_past_tokens))
        computing = prefill.seconds(num_blocks * block_tokens, num_past_tokens)
        computing -= prefill.fixed_seconds
        if computing - loading > best_gain:
            best_gain = computing - loading
            best = LoadChoice(num_blocks, loading, computing)
    if best.num_blocks == 0 and match.num_blocks:
        return LoadChoice(0, loading, computing)
    return best


def choose_two_ended(
    match: Match,
    plain: LoadChoice,
    *,
    block_bytes: int,
    block_tokens: int,
    num_past_tokens: int,
    rates: Mapping[Tier, LinkRate],
    prefill: PrefillRate,
) -> LoadChoice:
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
            best = LoadChoice(start, lead, computing(0, start), num_two_ended=num_all - start)
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


class LoadOrCompute:
    def __init__(self, block_bytes: int, block_tokens: int) -> None:
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._meter = PrefillMeter()
        self._num_spurned = 0

    @property
    def prefill(self) -> PrefillRate | None:
        return self._meter.rate

    def observe(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step computed these (tokens, past tokens). Steps that also decode tell us little."""
        if all(num_tokens > 1 for num_tokens, _ in chunks):
            self._meter.observe(chunks, seconds)

    def choose(
        self,
        match: Match,
        num_past_tokens: int,
        rates: Mapping[Tier, LinkRate],
        *,
        can_load_two_ended: bool = False,
    ) -> LoadChoice:
        """`can_load_two_ended`: the client can compute the front while the back loads."""
        choice = choose_load(
            match,
            block_bytes=self._block_bytes,
            block_tokens=self._block_tokens,
            num_past_tokens=num_past_tokens,
            rates=rates,
            prefill=self._meter.rate,
        )
        if can_load_two_ended and self._meter.rate is not None and choice.load_seconds is not None:
            choice = choose_two_ended(
                match,
                choice,
                block_bytes=self._block_bytes,
                block_tokens=self._block_tokens,
                num_past_tokens=num_past_tokens,
                rates=rates,
                prefill=self._meter.rate,
            )
        if choice.num_blocks or choice.num_two_ended or not match.num_blocks:
            return choice
        self._num_spurned += 1
        if self._num_spurned % _LOOK_AGAIN:
            return choice
        return LoadChoice(match.num_blocks, choice.load_seconds, choice.compute_seconds)
