"""Rates of links and of prefill, and the time that loading or computing takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from penstock.errors import ConfigError
from penstock.types import Tier

# A rate is used for sizes up to this many times the largest measured: a small transfer that
# stalled says little about large ones.
_MAX_STRETCH = 4


def _check_rate(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value}: expected a number above 0; correct it")


def _check_cost(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {value}: expected 0 or more; correct it")


@dataclass(frozen=True, slots=True)
class LinkRate:
    """The time to move bytes over a link: `latency + bytes / rate`, or 0 for no bytes."""

    bytes_per_second: float
    latency_seconds: float = 0.0
    # The largest transfer it was learned from. It says little about much larger ones.
    largest_bytes: float = math.inf

    def __post_init__(self) -> None:
        _check_rate("bytes_per_second", self.bytes_per_second)
        _check_cost("latency_seconds", self.latency_seconds)

    def per_bytes_of(self, share: float) -> LinkRate:
        """The rate in other bytes, of which `share` of one crosses the link for each."""
        return replace(
            self,
            bytes_per_second=self.bytes_per_second / share,
            largest_bytes=self.largest_bytes / share,
        )

    def knows(self, num_bytes: float) -> bool:
        """Whether the rate is valid for this size."""
        return num_bytes <= _MAX_STRETCH * self.largest_bytes

    def seconds(self, num_bytes: float) -> float:
        if num_bytes <= 0:
            return 0.0
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """The time to compute the KV of `n` tokens after `past` others:

        fixed + n / tokens_per_second + quadratic * ((past + n)^2 - past^2)

    The middle term is the matrix products, the same for every token. The last term is attention:
    each token reads all tokens before it, so a whole prompt costs its length squared. Apart from
    the fixed part (one per call), `seconds(n, past) == seconds(past + n) - seconds(past)`.
    No tokens take no time.
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
        # (past + n)^2 - past^2, without cancellation errors.
        pairs = num_tokens * (num_tokens + 2 * num_past_tokens)
        return (
            self.fixed_seconds
            + num_tokens / self.tokens_per_second
            + self.quadratic_seconds_per_token2 * pairs
        )


def break_even_tokens(
    link: LinkRate, prefill: PrefillRate, kv_bytes_per_token: float, max_tokens: int = 1 << 20
) -> int | None:
    """The shortest prompt from which loading is faster than computing, up to `max_tokens`.

    None if computing is still faster at `max_tokens`, even if loading is faster for some shorter
    prompts.
    """
    _check_rate("kv_bytes_per_token", kv_bytes_per_token)
    if max_tokens < 1:
        return None
    # Time saved by loading: gain(n) = constant + linear * n + square * n^2. Computed in fractions,
    # so that the answer does not depend on rounding when the two are close.
    constant = Fraction(prefill.fixed_seconds) - Fraction(link.latency_seconds)
    linear = 1 / Fraction(prefill.tokens_per_second) - Fraction(kv_bytes_per_token) / Fraction(
        link.bytes_per_second
    )
    square = Fraction(prefill.quadratic_seconds_per_token2)

    def gains(num_tokens: int) -> bool:
        return constant + linear * num_tokens + square * num_tokens * num_tokens > 0

    if not gains(max_tokens):
        return None
    # The gain is convex: it falls to its minimum and then rises. After the minimum, bisection
    # works; before it, a gain may be lost again.
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
    """How long loading these runs takes. Tiers work in parallel, and all share HOST's link.

    None if no link they need has been measured, or only with far fewer bytes.
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
