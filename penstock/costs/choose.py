"""Decides how much of a match to load and how much to compute. Pure.

If a tier is slower than computing, both can run at once in a two-ended load: the front of the
prompt is computed, because every token needs those before it, while the back is loaded, until the
two meet (Cake, arXiv 2410.03065).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.costs.meters import PrefillMeter
from penstock.costs.rates import LinkRate, PrefillRate, load_seconds
from penstock.types import Match, Run, Tier

_Loading = Callable[[Sequence[Run]], float | None]
_Computing = Callable[[int, int], float]

# A two-ended load is more complex, so it must save at least this share of the time.
_MIN_GAIN = 0.25
_MIN_BLOCKS = 4
_MIN_PATIENCE_SECONDS = 1.0
# Only loads measure a link. So load one match in 32 even if the link seems too slow.
_PROBE_EVERY = 32


@dataclass(frozen=True, slots=True)
class Hit:
    """A legal hit: tokens that need not be computed, and where the blocks that it needs are."""

    num_tokens: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """How many leading blocks of a match to load. Seconds are None while rates are unknown."""

    num_blocks: int
    load_seconds: float | None = None
    compute_seconds: float | None = None  # to compute these blocks instead
    num_two_ended: int = 0  # blocks after them, for a two-ended load
    # The best without a two-ended load, if this one has one.
    plain: LoadChoice | None = field(default=None, compare=False)

    @property
    def one_ended(self) -> LoadChoice:
        """What to load if the front of these blocks is not computed meanwhile."""
        if not self.num_two_ended:
            return self
        return self.plain or LoadChoice(self.num_blocks, self.load_seconds, self.compute_seconds)

    @property
    def patience_seconds(self) -> float | None:
        """How long to wait for the load before computing after all; None if unknown.

        Twice the time computing would take, and at least a second: shorter limits would give up
        loads because of a rare delay.
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
    """Choose the number of leading blocks that saves the most time.

    A match consists of runs, each from one tier. Within a run, loading time is linear and computing
    time convex, so the largest saving is at one of its ends and only ends are tried. One step is
    always computed, at least for the prompt's last token, so its fixed time is never saved.
    """
    best = LoadChoice(0, 0.0, 0.0)
    best_gain = 0.0
    num_blocks = 0
    for index, run in enumerate(match.runs):
        num_blocks += run.num_blocks
        loading = load_seconds(match.runs[: index + 1], block_bytes, rates)
        if prefill is None:
            return LoadChoice(match.num_blocks)
        if loading is None:  # load it, to measure the link, but with a limit on the wait
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


def choose_hit(
    hits: Sequence[Hit],
    *,
    block_bytes: int,
    num_past_tokens: int,
    rates: Mapping[Tier, LinkRate],
    prefill: PrefillRate | None,
) -> tuple[Hit | None, LoadChoice]:
    """Choose among the legal hits of a model with several KV cache groups, longest first.

    Only these lengths are legal, and their bytes do not grow evenly: a checkpoint of windows or
    states costs the same at every length.
    """
    if not hits:
        return None, LoadChoice(0)
    best: Hit | None = None
    choice = LoadChoice(0)
    best_gain = 0.0
    for hit in hits:
        num_blocks = sum(run.num_blocks for run in hit.runs)
        if prefill is None:
            return hit, LoadChoice(num_blocks)
        computing = prefill.seconds(hit.num_tokens, num_past_tokens)
        loading = load_seconds(hit.runs, block_bytes, rates)
        if loading is None:  # load it, to measure the link, but with a limit on the wait
            return hit, LoadChoice(num_blocks, None, computing)
        computing -= prefill.fixed_seconds
        if hit is hits[0]:
            choice = LoadChoice(0, loading, computing)
        if computing - loading > best_gain:
            best_gain = computing - loading
            best, choice = hit, LoadChoice(num_blocks, loading, computing)
    return best, choice


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
    """Return `plain`, or fewer leading blocks and a two-ended load after them if that is faster."""

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
        both = _two_ended_seconds(match.runs, start, loading, computing)
        if both is not None and lead + both < best_seconds:
            best_seconds = lead + both
            best = LoadChoice(
                start, lead, computing(0, start), num_two_ended=num_all - start, plain=plain
            )
    return best


def _two_ended_seconds(
    runs: Sequence[Run],
    start: int,
    loading: _Loading,
    computing: _Computing,
) -> float | None:
    """Seconds until a two-ended load from `start` to the end of the match is complete."""
    end = sum(run.num_blocks for run in runs)
    low, high = start, end  # the front and the back meet between these
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
    """The runs of the first `num_blocks` blocks."""
    found: list[Run] = []
    for run in runs:
        taken = min(run.num_blocks, num_blocks)
        if taken:
            found.append(Run(run.tier, taken))
        num_blocks -= taken
    return found


def _tail(runs: Sequence[Run], num_blocks: int) -> list[Run]:
    """The runs of the last `num_blocks` blocks."""
    return _head(runs[::-1], num_blocks)[::-1]


class LoadOrCompute:
    """Decides for each match, with rates measured by this client."""

    def __init__(self, block_bytes: int, block_tokens: int) -> None:
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._meter = PrefillMeter()
        self._num_declined = 0

    @property
    def prefill(self) -> PrefillRate | None:
        return self._meter.rate

    def observe(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learn from a step that computed these (tokens, past tokens). Skips steps that decode."""
        if all(num_tokens > 1 for num_tokens, _ in chunks):
            self._meter.observe(chunks, seconds)

    def choose_hit(
        self, hits: Sequence[Hit], num_past_tokens: int, rates: Mapping[Tier, LinkRate]
    ) -> tuple[Hit | None, LoadChoice]:
        """Choose one of the legal hits, given longest first, or none."""
        hit, choice = choose_hit(
            hits,
            block_bytes=self._block_bytes,
            num_past_tokens=num_past_tokens,
            rates=rates,
            prefill=self._meter.rate,
        )
        if hit is None and hits and self._is_time_to_probe():
            num_blocks = sum(run.num_blocks for run in hits[0].runs)
            return hits[0], LoadChoice(num_blocks, choice.load_seconds, choice.compute_seconds)
        return hit, choice

    def choose(
        self,
        match: Match,
        num_past_tokens: int,
        rates: Mapping[Tier, LinkRate],
        *,
        can_load_two_ended: bool = False,
    ) -> LoadChoice:
        """Choose what to load. `can_load_two_ended`: the client supports two-ended loads."""
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
        if not self._is_time_to_probe():
            return choice
        return LoadChoice(match.num_blocks, choice.load_seconds, choice.compute_seconds)

    def _is_time_to_probe(self) -> bool:
        self._num_declined += 1
        return self._num_declined % _PROBE_EVERY == 0
