"""Meters: learn the rates of links and of prefill from observations. Pure; they have no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.costs.rates import LinkRate, PrefillRate
from penstock.errors import ConfigError
from penstock.events import Moved

# If the clock jumps, it may report any duration. Nothing measured here takes a day.
_MAX_OBSERVED_SECONDS = 86_400.0
_MAX_OBSERVED_BYTES = 1 << 63
_MAX_BYTES_PER_SECOND = 1e15


class PrefillMeter:
    """Learns a `PrefillRate` from steps as they end. Recent steps weigh more.

    It fits `seconds = fixed + a * tokens + b * pairs` with no coefficient below 0. The fixed and
    quadratic parts are used only as far as the data separates them from the linear part. The fixed
    part never exceeds the shortest step, which matters if all recent steps were alike.
    """

    _MAX_SURPRISE = 8.0  # one stall must not dominate: see `RateMeter`
    _DOUBT = 1e-3
    _TOKENS = 256.0  # scales of the features, so that the sums have similar sizes
    _PAIRS = 256.0 * 2048.0

    def __init__(self, weight: float = 0.05) -> None:
        self._weight = weight
        self._num_observations = 0
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._shortest_seconds = math.inf
        self._rate: PrefillRate | None = None

    @property
    def rate(self) -> PrefillRate | None:
        """The learned rate; None before the first observation."""
        return self._rate

    def observe(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learn from a step that computed these (tokens, past tokens) in `seconds`."""
        num_tokens = sum(tokens for tokens, _ in chunks)
        if not (num_tokens and 0 < seconds < _MAX_OBSERVED_SECONDS):
            return
        num_pairs = sum(tokens * (tokens + 2 * past) for tokens, past in chunks)
        if self._rate is not None:
            expected = self._rate.fixed_seconds + num_tokens / self._rate.tokens_per_second
            expected += self._rate.quadratic_seconds_per_token2 * num_pairs
            seconds = min(seconds, self._MAX_SURPRISE * expected)
        self._num_observations += 1
        self._shortest_seconds = min(self._shortest_seconds, seconds)
        weight = max(self._weight, 1 / self._num_observations)
        features = (num_tokens / self._TOKENS, num_pairs / self._PAIRS, 1.0)
        for row in range(3):
            for column in range(3):
                more = features[row] * features[column] - self._squares[row][column]
                self._squares[row][column] += weight * more
            self._products[row] += weight * (features[row] * seconds - self._products[row])
        self._rate = self._fit()

    def _fit(self) -> PrefillRate:
        found = self._solve_above_zero([0, 1, 2])
        if found[2] > self._shortest_seconds:
            found = self._solve_above_zero([0, 1], fixed=self._shortest_seconds)
        per_token = max(found[0] / self._TOKENS, 1e-12)
        return PrefillRate(1 / per_token, max(found[1], 0.0) / self._PAIRS, max(found[2], 0.0))

    def _solve_above_zero(self, kept: list[int], fixed: float = 0.0) -> list[float]:
        while True:
            found = self._solve(kept, fixed)
            worst = min(kept, key=lambda index: found[index])
            if found[worst] >= 0 or len(kept) == 1:
                return found
            kept.remove(worst if worst != 0 else kept[-1])  # always keep the linear part

    def _solve(self, kept: Sequence[int], fixed: float) -> list[float]:
        """Least squares over the kept features, by Gaussian elimination."""
        matrix = [
            [self._squares[row][column] for column in kept]
            + [self._products[row] - fixed * self._squares[row][2]]
            for row in kept
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
        found = [0.0, 0.0, fixed]
        for place, feature in enumerate(kept):
            found[feature] = matrix[place][size] / matrix[place][place]
        return found


class RateMeter:
    """Learns a `LinkRate` from transfers as they end. Recent transfers weigh more.

    It fits a line through (bytes, seconds): the slope gives the rate, the intercept the latency.
    If all transfers have about the same size, the two cannot be separated, and all time is
    attributed to the rate. In both cases the prediction for an average transfer is as measured.
    """

    # Slower transfers count as this many times slower than expected. Otherwise, after one stall,
    # loads would seem too slow to try, and nothing would ever correct the estimate.
    _MAX_SURPRISE = 8.0
    # Sizes that vary by less than this share of their mean reveal nothing about latency.
    _TELLING_SPREAD = 0.05
    # At least this share of the time is always attributed to the rate, despite noise.
    _MIN_RATE_SHARE = 0.01

    def __init__(self, weight: float = 0.1, *, of_whole_loads: bool = False) -> None:
        """`weight` is the weight of the newest observation, once there are 1 / weight of them.

        A rate learned from parts of loads is valid for any size. A rate learned from whole loads
        is valid only up to a few times the largest load seen.
        """
        if not 0 < weight <= 1:
            raise ConfigError(f"weight is {weight}: expected a number above 0 and up to 1")
        self._weight = weight
        self._num_observations = 0
        self._mean_bytes = 0.0
        self._mean_seconds = 0.0
        self._variance = 0.0  # of the bytes
        self._covariance = 0.0  # of bytes and seconds
        self._largest_bytes = 0.0 if of_whole_loads else math.inf

    @property
    def num_observations(self) -> int:
        return self._num_observations

    @property
    def rate(self) -> LinkRate | None:
        """The learned rate; None before the first observation."""
        if self._num_observations == 0:
            return None
        through_origin = self._mean_seconds / self._mean_bytes
        # The second terms act as a prior for the line through the origin.
        prior = (self._TELLING_SPREAD * self._mean_bytes) ** 2
        slope = (self._covariance + prior * through_origin) / (self._variance + prior)
        slope = min(max(slope, self._MIN_RATE_SHARE * through_origin), through_origin)
        slope = max(slope, 1 / _MAX_BYTES_PER_SECOND)
        latency = max(self._mean_seconds - slope * self._mean_bytes, 0.0)
        return LinkRate(1 / slope, latency, self._largest_bytes)

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Learn that moving `num_bytes` took `seconds`. Ignores impossible values."""
        if not (
            0 < num_bytes < _MAX_OBSERVED_BYTES and 0 < seconds < _MAX_OBSERVED_SECONDS
        ):  # an empty transfer, a coarse clock or one that was set back, nan
            return
        if (rate := self.rate) is not None:
            expected = max(rate.seconds(num_bytes), self._mean_seconds)
            seconds = min(seconds, self._MAX_SURPRISE * expected)
        self._num_observations += 1
        self._largest_bytes = max(self._largest_bytes, num_bytes)
        # Start with a plain mean. Otherwise the first observation would outweigh the next.
        weight = max(self._weight, 1 / self._num_observations)
        more_bytes = num_bytes - self._mean_bytes
        more_seconds = seconds - self._mean_seconds
        self._mean_bytes += weight * more_bytes
        self._mean_seconds += weight * more_seconds
        self._variance = (1 - weight) * (self._variance + weight * more_bytes**2)
        self._covariance = (1 - weight) * (self._covariance + weight * more_bytes * more_seconds)


class LinkMeter:
    """Learns the rate of a link with concurrent transfers.

    A transfer that took a second beside three others did not use the link for a whole second. So
    each counts for the time since the previous one ended; those that end together count as one.
    """

    _MIN_SECONDS = 1e-4

    def __init__(self) -> None:
        self._meter = RateMeter()
        self._num_bytes = 0
        self._seconds = 0.0

    @property
    def rate(self) -> LinkRate | None:
        return self._meter.rate

    def observe(self, moved: Moved) -> None:
        self._num_bytes += moved.num_bytes
        self._seconds += moved.seconds if moved.link_seconds is None else moved.link_seconds
        is_new = self.rate is None and self._seconds > 0
        if is_new or self._seconds >= self._MIN_SECONDS:
            self._meter.observe(self._num_bytes, self._seconds)
            self._num_bytes, self._seconds = 0, 0.0


class WaitMeter:
    """Learns how long whole loads take, as clients see it; several loads may run at once.

    Each load counts only for the time since the previous one ended, because the last of many
    concurrent loads waits for all the others.
    """

    def __init__(self) -> None:
        self._meter = RateMeter(of_whole_loads=True)
        self._last_end = -math.inf

    @property
    def rate(self) -> LinkRate | None:
        return self._meter.rate

    def observe(self, num_bytes: int, started: float, ended: float) -> None:
        """Learn that loads of `num_bytes` in total, the first begun at `started`, have ended."""
        self._meter.observe(num_bytes, ended - max(started, self._last_end))
        self._last_end = ended
