"""Load or recompute: measured rates in, seconds out. Pure; it holds no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from penstock.errors import ConfigError

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
