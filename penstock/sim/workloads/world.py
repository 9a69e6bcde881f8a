"""What all generators share: seeded random numbers, contexts, and sessions merged by arrival."""

from __future__ import annotations

import heapq
import math
from bisect import bisect
from collections.abc import Iterable, Iterator
from itertools import accumulate, count
from random import Random

from blake3 import blake3

from penstock.sim.trace import TraceRequest
from penstock.sim.workloads.context import Context

TOKEN_SECONDS = 0.02  # per token of an answer; the session's next request comes after the last one


class World:
    def __init__(self, name: str, seed: int, block_tokens: int) -> None:
        self._name = f"penstock workload {name} {seed}"
        self._block_tokens = block_tokens
        self._root = blake3(f"{self._name} {block_tokens}".encode()).digest()

    def chance(self, label: str) -> Chance:
        """Random numbers for one part of the trace, independent of all other parts."""
        return Chance(f"{self._name} {label}")

    def context(self) -> Context:
        return Context(self._root, self._block_tokens)


class Chance(Random):
    def around(self, mean: float, spread: float = 1.0) -> float:
        """From a log-normal distribution: many small values, few large. `spread` is its sigma."""
        return self.lognormvariate(math.log(mean) - spread * spread / 2, spread)

    def tokens(self, mean: float, spread: float = 1.0) -> int:
        return max(1, round(self.around(mean, spread)))

    def times(self, mean: float) -> int:
        """At least 1, from a geometric distribution."""
        if mean <= 1:
            return 1
        return 1 + int(math.log(1 - self.random()) / math.log(1 - 1 / mean))

    def seconds_between(self, low: float, high: float) -> float:
        """From a log-uniform distribution: every order of magnitude is equally likely."""
        return low * math.exp(self.random() * math.log(high / low))


class Zipf:
    """Draws ranks from 0. The n-th is drawn n**exponent times less often than the first."""

    def __init__(self, num_ranks: int, exponent: float) -> None:
        self._weights = list(accumulate((rank + 1) ** -exponent for rank in range(num_ranks)))

    def draw(self, chance: Random) -> int:
        place = bisect(self._weights, chance.random() * self._weights[-1])
        return min(place, len(self._weights) - 1)


def starts(chance: Random, per_second: float) -> Iterator[tuple[int, float]]:
    """Numbered, independent arrivals (a Poisson process)."""
    now = 0.0
    for number in count():
        yield number, now
        now += chance.expovariate(per_second)


def in_order(
    sessions: Iterable[Iterable[TraceRequest]], num_requests: int
) -> tuple[TraceRequest, ...]:
    """The first requests of all sessions, in order of arrival. The requests of each session, and
    the sessions by their first request, must be in order of arrival."""
    found: list[TraceRequest] = []
    open_sessions: list[tuple[float, int, TraceRequest, Iterator[TraceRequest]]] = []
    coming = (
        (first.arrival_seconds, number, first, rest)
        for number, rest in enumerate(map(iter, sessions))
        for first in [next(rest)]
    )
    upcoming = next(coming, None)
    while len(found) < num_requests and (open_sessions or upcoming is not None):
        if upcoming is not None and (not open_sessions or upcoming[0] < open_sessions[0][0]):
            heapq.heappush(open_sessions, upcoming)
            upcoming = next(coming, None)
            continue
        _, number, request, rest = open_sessions[0]
        found.append(request)
        following = next(rest, None)
        if following is None:
            heapq.heappop(open_sessions)
        else:
            later = (following.arrival_seconds, number, following, rest)
            heapq.heapreplace(open_sessions, later)
    return tuple(found)
