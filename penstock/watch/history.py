"""Recent samples of a server's metrics: for rates, and for the last minutes. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.watch.samples import Samples

RATE_SECONDS = 5.0
RECENT_SECONDS = 300.0
_SPACING_SECONDS = 5.0
_COUNTED = ("_total", "_count", "_bucket", "_sum")


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """What was counted in the last `seconds`. Gauges have their current values."""

    seconds: float
    seen: Samples


class History:
    """Samples of the last minutes: all of the last seconds, and one every few seconds before."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, Samples]] = deque()
        self._early: deque[tuple[float, Samples]] = deque()

    def add(self, at: float, samples: Samples) -> None:
        """`at` is from a monotonic clock.

        If the server was restarted, earlier samples are dropped: differences to them would mix two
        processes.
        """
        if self._late and _was_restarted(self._late[-1][1], samples):
            self._late.clear()
            self._early.clear()
        self._late.append((at, samples))
        if not self._early or at - self._early[-1][0] >= _SPACING_SECONDS:
            self._early.append((at, samples))
        _forget(self._late, at - RATE_SECONDS)
        _forget(self._early, at - RECENT_SECONDS)

    @property
    def latest(self) -> Samples | None:
        return self._late[-1][1] if self._late else None

    def rate_span(self) -> SampleSpan:
        """The last few seconds."""
        return self._since(self._late)

    def recent_span(self) -> SampleSpan:
        """The last minutes."""
        return self._since(self._early)

    def _since(self, kept: deque[tuple[float, Samples]]) -> SampleSpan:
        if not self._late:
            return SampleSpan(0.0, Samples({}))
        (at, now), (then, before) = self._late[-1], kept[0]
        return SampleSpan(at - then, now.since(before))


def _was_restarted(before: Samples, now: Samples) -> bool:
    """Whether any counter has decreased."""
    return any(
        value < before.values.get(key, value)
        for key, value in now.values.items()
        if key[0].endswith(_COUNTED)
    )


def _forget(kept: deque[tuple[float, Samples]], before: float) -> None:
    """Drop samples older than `before`, except the latest of them, where the span begins."""
    while len(kept) > 1 and kept[1][0] <= before:
        kept.popleft()
