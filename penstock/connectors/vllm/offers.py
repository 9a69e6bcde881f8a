"""How much of a match to load, and whether within the step that computes the rest."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.choosing import LoadOrCompute
from penstock.connectors.vllm.tracked import Loading, Offer
from penstock.costs import Choice, LinkRate
from penstock.meters import RateMeter, WaitMeter
from penstock.types import Match, Tier

# For so long a step may wait for a load that it needs: where others compute too, where nobody does.
# Beyond, vLLM's own preparation of the step is worth more if the copy runs beside it.
_SHORT_SECONDS, _ALONE_SECONDS = 0.002, 0.015


class Offers:
    """Pure: it holds no clock, and knows only what it is told."""

    def __init__(
        self, block_bytes: int, block_tokens: int, *, always_load: bool, may_load_now: bool
    ) -> None:
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._always_load = always_load
        self._may_load_now = may_load_now
        self.costs = LoadOrCompute(block_bytes, block_tokens)
        self.copies = RateMeter(of_whole_loads=True)  # what the copy alone takes, from DRAM
        self._waits: dict[Tier, WaitMeter] = {}  # what requests see, vLLM's steps included

    def make(
        self,
        start: int,
        match: Match,
        num_tokens: int,
        now: float,
        *,
        is_alone: bool,
        num_bytes_now: int,
    ) -> Offer:
        """For a prompt of `num_tokens` of which `start` blocks are there and `match` could follow.

        `is_alone` says that nobody else computes or loads; `num_bytes_now` are promised already to
        others for the same step.
        """
        is_now = self._can_be_now(match, is_alone, num_bytes_now)
        num_past = start * self._block_tokens
        choice = Choice(match.num_blocks)
        if not self._always_load:
            choice = self.costs.choose(match, num_past, self._rates(is_now))
        num_offered = choice.num_blocks * self._block_tokens
        if is_now and num_past + num_offered == num_tokens:
            num_offered -= 1  # a step must have a token to compute
        return Offer(start, match, num_offered, choice, is_now, now)

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

    def copied(self, loading: Loading) -> None:
        """All of a load has arrived."""
        if loading.slowest is Tier.HOST:
            self.copies.observe(loading.num_bytes, loading.copy_seconds)

    def _can_be_now(self, match: Match, is_alone: bool, num_bytes_now: int) -> bool:
        rate = self.copies.rate
        if rate is None or not (self._may_load_now and match.num_blocks and is_in_dram(match)):
            return False
        seconds = rate.seconds(match.num_blocks * self._block_bytes + num_bytes_now)
        return seconds <= (_ALONE_SECONDS if is_alone else _SHORT_SECONDS)

    def _rates(self, is_now: bool) -> dict[Tier, LinkRate]:
        known = {Tier.HOST: self.copies.rate}
        if not is_now:
            known = {tier: meter.rate for tier, meter in self._waits.items()}
        return {tier: rate for tier, rate in known.items() if rate is not None}


def is_in_dram(match: Match) -> bool:
    """Whether all that matched can be copied at once."""
    return match.num_from(Tier.HOST) == match.num_blocks and match.num_pending == 0
