"""How much of a match to load."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.connectors.vllm.tracked import Loading, Offer
from penstock.costs.choose import LoadChoice, LoadOrCompute
from penstock.costs.meters import WaitMeter
from penstock.costs.rates import LinkRate
from penstock.types import Match, Tier


class Offers:
    """Pure: it holds no clock, and knows only what it is told."""

    def __init__(self, block_bytes: int, block_tokens: int, *, always_load: bool) -> None:
        self._block_tokens = block_tokens
        self._always_load = always_load
        self.costs = LoadOrCompute(block_bytes, block_tokens)
        self._waits: dict[Tier, WaitMeter] = {}  # what requests see, vLLM's steps included

    def make(self, start: int, match: Match, now: float) -> Offer:
        """For a prompt of which `start` blocks are there and `match` could follow."""
        choice = LoadChoice(match.num_blocks)
        if not self._always_load:
            choice = self.costs.choose(match, start * self._block_tokens, self._rates())
        return Offer(start, match, choice.num_blocks * self._block_tokens, choice, now)

    def computed(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step computed these (tokens, past tokens)."""
        self.costs.observe(chunks, seconds)

    def waited(self, loadings: Sequence[Loading], now: float) -> None:
        """Requests that waited for their loads can go on."""
        for tier in {loading.slowest for loading in loadings}:
            mine = [loading for loading in loadings if loading.slowest is tier]
            num_bytes = sum(loading.num_bytes for loading in mine)
            started = min(loading.started for loading in mine)
            self._waits.setdefault(tier, WaitMeter()).observe(num_bytes, started, now)

    def _rates(self) -> dict[Tier, LinkRate]:
        rates = {tier: meter.rate for tier, meter in self._waits.items()}
        return {tier: rate for tier, rate in rates.items() if rate is not None}
