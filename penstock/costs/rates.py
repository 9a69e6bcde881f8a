"""Load or recompute: measured rates in, seconds out. Pure; it holds no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from penstock.errors import ConfigError
from penstock.types import Tier

# One small transfer that stalled must not stand for all the large ones that were never tried.
_MAX_STRETCH = 4


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
    # Learnt from transfers up to this size: what far larger ones take is not known by it.
    largest_bytes: float = math.inf

    def __post_init__(self) -> None:
        _check_rate("bytes_per_second", self.bytes_per_second)
        _check_cost("latency_seconds", self.latency_seconds)

    def knows(self, num_bytes: float) -> bool:
        return num_bytes <= _MAX_STRETCH * self.largest_bytes

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

    None while no link they need has been measured, or not with anything like as many bytes.
    """
    counts = {Tier.HOST: sum(count for _, count in runs)}
    for tier, count in runs:
        if tier is not Tier.HOST:
            counts[tier] = counts.get(tier, 0) + count
    known = []
    for tier, count in counts.items():
        if tier in rates:
            if not rates[tier].knows(count * block_bytes):
                return None
            known.append(rates[tier].seconds(count * block_bytes))
    return max(known) if known else None
