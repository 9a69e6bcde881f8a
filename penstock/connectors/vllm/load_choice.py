"""Chooses how many of the matched blocks to load, and how many to compute instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.connectors.vllm.tracked import Loading, Offer
from penstock.costs.choose import Hit, LoadChoice, LoadOrCompute
from penstock.costs.meters import WaitMeter
from penstock.costs.rates import LinkRate
from penstock.types import Match, Tier

_MAX_TIMED_STEPS = 64


class LoadChooser:
    """Compares the measured cost of loading with that of computing. Pure: time is an argument."""

    def __init__(self, block_bytes: int, block_tokens: int, *, always_load: bool) -> None:
        self._block_tokens = block_tokens
        self._always_load = always_load
        self.costs = LoadOrCompute(block_bytes, block_tokens)
        self._waits: dict[Tier, WaitMeter] = {}  # as requests see them, vLLM's steps included
        self._timed: dict[int, Sequence[tuple[int, int]]] = {}  # by step: what it computes

    def choose(self, start: int, match: Match, now: float) -> Offer:
        """The offer for a prompt whose first `start` tokens are on the device."""
        choice = LoadChoice(match.num_blocks)
        if not self._always_load:
            choice = self.costs.choose(match, start, self._rates())
        num_tokens = choice.num_blocks * self._block_tokens
        return Offer(start, match, num_tokens, choice, now, match.num_blocks * self._block_tokens)

    def choose_hit(self, start: int, hits: Sequence[Hit], num_asked: int, now: float) -> Offer:
        """The offer for a model with several groups, of whose legal hits the longest come first."""
        if not hits:
            return Offer(start, Match(num_asked), 0, LoadChoice(0), now, 0)
        longest = hits[0]
        hit: Hit | None = longest
        choice = LoadChoice(sum(run.num_blocks for run in longest.runs))
        if not self._always_load:
            hit, choice = self.costs.choose_hit(hits, start, self._rates())
        match = Match(num_asked, (longest if hit is None else hit).runs)
        num_tokens = 0 if hit is None else hit.num_tokens
        return Offer(start, match, num_tokens, choice, now, longest.num_tokens)

    def expect_time(self, step: int, chunks: Sequence[tuple[int, int]]) -> bool:
        """Returns whether to time a step that computes these (tokens, past tokens).

        Only steps without decodes show the prefill rate.
        """
        if not chunks or not all(count > 1 for count, _ in chunks):
            return False
        self._timed[step] = chunks
        while len(self._timed) > _MAX_TIMED_STEPS:
            del self._timed[next(iter(self._timed))]
        return True

    def computed(self, step_seconds: Mapping[int, float]) -> None:
        """Learn the prefill rate from the measured duration of steps."""
        for step, seconds in step_seconds.items():
            if (chunks := self._timed.pop(step, None)) is not None:
                self.costs.observe(chunks, seconds)

    def waited(self, loadings: Sequence[Loading], now: float) -> None:
        """Learn the load rate from requests whose load has just ended."""
        for tier in {loading.slowest for loading in loadings}:
            mine = [loading for loading in loadings if loading.slowest is tier]
            num_bytes = sum(loading.num_bytes for loading in mine)
            started = min(loading.started for loading in mine)
            self._waits.setdefault(tier, WaitMeter()).observe(num_bytes, started, now)

    def _rates(self) -> dict[Tier, LinkRate]:
        rates = {tier: meter.rate for tier, meter in self._waits.items()}
        return {tier: rate for tier, rate in rates.items() if rate is not None}
