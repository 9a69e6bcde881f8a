"""Load or recompute: measured rates in, seconds out. Pure; it holds no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from penstock.errors import ConfigError
from penstock.types import Match, Tier

# A clock that steps can claim any duration; nothing measured here takes a day.
_MAX_OBSERVED_SECONDS = 86_400.0
_MAX_OBSERVED_BYTES = 1 << 63
_MAX_BYTES_PER_SECOND = 1e15


def _check_rate(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value}: expected a number above 0; measure or correct it")


def _check_cost(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {value}: expected 0 or more; measure or correct it")


@dataclass(frozen=True, slots=True)
class LinkRate:
    """What it takes to move bytes over a link: `latency + bytes / rate`, or 0 for no bytes."""

    bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_rate("bytes_per_second", self.bytes_per_second)
        _check_cost("latency_seconds", self.latency_seconds)

    def seconds(self, num_bytes: float) -> float:
        if num_bytes <= 0:
            return 0.0
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """What it takes to compute the KV of `n` tokens behind `past` others:

        fixed + n / tokens_per_second + quadratic * ((past + n)^2 - past^2)

    The middle term is the matrix products, the same for every token. The last is attention:
    each token reads all before it, so a whole prompt costs its length squared, and the tail of
    one costs the whole less the head. Hence, fixed parts aside (one per call),
    `seconds(n, past) == seconds(past + n) - seconds(past)`. No tokens take no time.
    """

    tokens_per_second: float
    quadratic_seconds_per_token2: float = 0.0
    fixed_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_rate("tokens_per_second", self.tokens_per_second)
        _check_cost("quadratic_seconds_per_token2", self.quadratic_seconds_per_token2)
        _check_cost("fixed_seconds", self.fixed_seconds)

    def seconds(self, num_tokens: int, num_past_tokens: int = 0) -> float:
        if num_tokens <= 0:
            return 0.0
        # (past + n)^2 - past^2, without the cancellation.
        pairs = num_tokens * (num_tokens + 2 * num_past_tokens)
        return (
            self.fixed_seconds
            + num_tokens / self.tokens_per_second
            + self.quadratic_seconds_per_token2 * pairs
        )


def break_even_tokens(
    link: LinkRate, prefill: PrefillRate, kv_bytes_per_token: float, max_tokens: int = 1 << 20
) -> int | None:
    """The shortest prompt from which on, up to `max_tokens`, loading is faster than computing.

    None when a prompt of `max_tokens` is still computed faster: whoever loads more slowly at
    that length may win below it, but not from some length on.
    """
    _check_rate("kv_bytes_per_token", kv_bytes_per_token)
    if max_tokens < 1:
        return None
    # What loading gains, gain(n) = constant + linear n + square n^2, in exact numbers so that
    # the answer does not hang on rounding where the two are close.
    constant = Fraction(prefill.fixed_seconds) - Fraction(link.latency_seconds)
    linear = 1 / Fraction(prefill.tokens_per_second) - Fraction(kv_bytes_per_token) / Fraction(
        link.bytes_per_second
    )
    square = Fraction(prefill.quadratic_seconds_per_token2)

    def gains(num_tokens: int) -> bool:
        return constant + linear * num_tokens + square * num_tokens * num_tokens > 0

    if not gains(max_tokens):
        return None
    # The gain is convex: it falls until its lowest point and rises from there, so beyond that
    # point a search by halves is safe, and before it a gain need not last.
    lowest = 1
    if linear < 0:
        lowest = max_tokens if square == 0 else min(max_tokens, round(-linear / (2 * square)))
    lowest = max(1, lowest)
    if gains(lowest):
        return 1
    loses, wins = lowest, max_tokens
    while wins - loses > 1:
        middle = (loses + wins) // 2
        if gains(middle):
            wins = middle
        else:
            loses = middle
    return wins


def load_seconds(
    runs: Sequence[tuple[Tier, int]], block_bytes: int, rates: Mapping[Tier, LinkRate]
) -> float | None:
    """How long blocks take to the device: tiers stream side by side, all cross HOST's link.

    None while no link they need has been measured.
    """
    counts = {Tier.HOST: sum(count for _, count in runs)}
    for tier, count in runs:
        if tier is not Tier.HOST:
            counts[tier] = counts.get(tier, 0) + count
    known = [
        rates[tier].seconds(count * block_bytes) for tier, count in counts.items() if tier in rates
    ]
    return max(known) if known else None


@dataclass(frozen=True, slots=True)
class Choice:
    """How many leading blocks of a match to load; seconds are None where nothing is known yet."""

    num_blocks: int
    load_seconds: float | None = None
    compute_seconds: float | None = None  # what computing these blocks would take instead


def choose_load(
    match: Match,
    *,
    block_bytes: int,
    block_tokens: int,
    num_past_tokens: int,
    rates: Mapping[Tier, LinkRate],
    prefill: PrefillRate | None,
) -> Choice:
    """The leading blocks whose loading saves most over computing them.

    A match is a row of runs, each from one tier. The gain within a run is at its largest at one of
    its ends: loading is linear in its length and computing convex. So only ends are tried.
    """
    best = Choice(0, 0.0, 0.0)
    best_gain = 0.0
    num_blocks = 0
    for index, run in enumerate(match.runs):
        num_blocks += run.num_blocks
        taken = [(earlier.tier, earlier.num_blocks) for earlier in match.runs[: index + 1]]
        loading = load_seconds(taken, block_bytes, rates)
        if prefill is None or loading is None:
            return Choice(match.num_blocks)  # to load is how the rates become known
        computing = prefill.seconds(num_blocks * block_tokens, num_past_tokens)
        if computing - loading > best_gain:
            best_gain = computing - loading
            best = Choice(num_blocks, loading, computing)
    if best.num_blocks == 0 and match.num_blocks:
        return Choice(0, loading, computing)
    return best


class PrefillMeter:
    """Learns a `PrefillRate` from steps as they end; recent ones weigh more.

    It fits `seconds = fixed + a tokens + b pairs`, none of them below 0. Fixed and quadratic parts
    are believed only as far as the steps tell them apart from the linear one.
    """

    _MAX_SURPRISE = 8.0  # as for links: one stall must not look like the rule
    _DOUBT = 1e-3
    _TOKENS = 256.0  # scales of the features, so that the sums are of like size
    _PAIRS = 256.0 * 2048.0

    def __init__(self, weight: float = 0.05) -> None:
        self._weight = weight
        self._num_observations = 0
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._rate: PrefillRate | None = None

    @property
    def rate(self) -> PrefillRate | None:
        """What was learnt; None before the first observation."""
        return self._rate

    def observe(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Note that one step computed these (tokens, past tokens) in so many seconds."""
        num_tokens = sum(tokens for tokens, _ in chunks)
        if not (num_tokens and 0 < seconds < _MAX_OBSERVED_SECONDS):
            return
        num_pairs = sum(tokens * (tokens + 2 * past) for tokens, past in chunks)
        if self._rate is not None:
            expected = self._rate.fixed_seconds + num_tokens / self._rate.tokens_per_second
            expected += self._rate.quadratic_seconds_per_token2 * num_pairs
            seconds = min(seconds, self._MAX_SURPRISE * expected)
        self._num_observations += 1
        weight = max(self._weight, 1 / self._num_observations)
        features = (num_tokens / self._TOKENS, num_pairs / self._PAIRS, 1.0)
        for row in range(3):
            for column in range(3):
                more = features[row] * features[column] - self._squares[row][column]
                self._squares[row][column] += weight * more
            self._products[row] += weight * (features[row] * seconds - self._products[row])
        self._rate = self._fit()

    def _fit(self) -> PrefillRate:
        kept = [0, 1, 2]
        while True:
            found = self._solve(kept)
            worst = min(kept, key=lambda index: found[index])
            if found[worst] >= 0 or len(kept) == 1:
                break
            kept.remove(worst if worst != 0 else kept[-1])  # the linear part stays
        per_token = max(found[0] / self._TOKENS, 1e-12)
        return PrefillRate(1 / per_token, max(found[1], 0.0) / self._PAIRS, max(found[2], 0.0))

    def _solve(self, kept: Sequence[int]) -> list[float]:
        """Least squares over the kept features, by elimination; 0 for the others."""
        matrix = [
            [self._squares[row][column] for column in kept] + [self._products[row]] for row in kept
        ]
        for place, feature in enumerate(kept):
            if feature != 0:
                matrix[place][place] *= 1 + self._DOUBT
        size = len(kept)
        for pivot in range(size):
            for row in range(size):
                if row != pivot:
                    factor = matrix[row][pivot] / matrix[pivot][pivot]
                    for column in range(pivot, size + 1):
                        matrix[row][column] -= factor * matrix[pivot][column]
        found = [0.0] * 3
        for place, feature in enumerate(kept):
            found[feature] = matrix[place][size] / matrix[place][place]
        return found


class RateMeter:
    """Learns a `LinkRate` from transfers as they end; recent ones weigh more.

    It fits a line through (bytes, seconds): the slope is the rate, the intercept the latency.
    Where all transfers are about the same size a line cannot be told from its intercept, and
    everything is put down to the rate. Either way the mean transfer is predicted as measured.
    """

    # A transfer this many times slower than expected counts as only so slow: after one stall,
    # loads would look so dear that none is tried, and nothing would ever correct the estimate.
    _MAX_SURPRISE = 8.0
    # Sizes that spread by less than this share of their mean say nothing about latency.
    _TELLING_SPREAD = 0.05
    # However the noise falls, latency never explains more than all but this share of the time.
    _MIN_RATE_SHARE = 0.01

    def __init__(self, weight: float = 0.1) -> None:
        """`weight` is that of the newest observation, once there are 1 / weight of them."""
        if not 0 < weight <= 1:
            raise ConfigError(f"weight is {weight}: expected a number above 0 and up to 1")
        self._weight = weight
        self._num_observations = 0
        self._mean_bytes = 0.0
        self._mean_seconds = 0.0
        self._variance = 0.0  # of the bytes
        self._covariance = 0.0  # of bytes and seconds

    @property
    def num_observations(self) -> int:
        return self._num_observations

    @property
    def rate(self) -> LinkRate | None:
        """What was learnt; None before the first observation."""
        if self._num_observations == 0:
            return None
        through_origin = self._mean_seconds / self._mean_bytes
        # The second terms are as if `prior` of the evidence spoke for the line through the origin.
        prior = (self._TELLING_SPREAD * self._mean_bytes) ** 2
        slope = (self._covariance + prior * through_origin) / (self._variance + prior)
        slope = min(max(slope, self._MIN_RATE_SHARE * through_origin), through_origin)
        latency = self._mean_seconds - slope * self._mean_bytes
        return LinkRate(1 / max(slope, 1 / _MAX_BYTES_PER_SECOND), max(latency, 0.0))

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Note that moving `num_bytes` took `seconds`. What cannot have been is passed over."""
        if not (
            0 < num_bytes < _MAX_OBSERVED_BYTES and 0 < seconds < _MAX_OBSERVED_SECONDS
        ):  # an empty transfer, a clock too coarse or set back, nan
            return
        if (rate := self.rate) is not None:
            expected = max(rate.seconds(num_bytes), self._mean_seconds)
            seconds = min(seconds, self._MAX_SURPRISE * expected)
        self._num_observations += 1
        # At first a plain mean, or the first observation would outweigh the next ones.
        weight = max(self._weight, 1 / self._num_observations)
        more_bytes = num_bytes - self._mean_bytes
        more_seconds = seconds - self._mean_seconds
        self._mean_bytes += weight * more_bytes
        self._mean_seconds += weight * more_seconds
        self._variance = (1 - weight) * (self._variance + weight * more_bytes**2)
        self._covariance = (1 - weight) * (self._covariance + weight * more_bytes * more_seconds)
