"""Load or recompute, decided with what this very host has measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.costs import Choice, LinkRate, PrefillRate, choose_load
from penstock.meeting import choose_meeting
from penstock.meters import PrefillMeter
from penstock.types import Match, Tier

# A link that looks slow is only measured by using it: one match in so many is loaded all the same.
_LOOK_AGAIN = 32


class LoadOrCompute:
    def __init__(self, block_bytes: int, block_tokens: int) -> None:
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._meter = PrefillMeter()
        self._num_spurned = 0

    @property
    def prefill(self) -> PrefillRate | None:
        return self._meter.rate

    def observe(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step computed these (tokens, past tokens). Steps that also decode tell us little."""
        if all(num_tokens > 1 for num_tokens, _ in chunks):
            self._meter.observe(chunks, seconds)

    def choose(
        self,
        match: Match,
        num_past_tokens: int,
        rates: Mapping[Tier, LinkRate],
        *,
        can_meet: bool = False,
    ) -> Choice:
        """`can_meet`: the host can compute a prompt from the front while its back is loaded."""
        choice = choose_load(
            match,
            block_bytes=self._block_bytes,
            block_tokens=self._block_tokens,
            num_past_tokens=num_past_tokens,
            rates=rates,
            prefill=self._meter.rate,
        )
        if can_meet and self._meter.rate is not None and choice.load_seconds is not None:
            choice = choose_meeting(
                match,
                choice,
                block_bytes=self._block_bytes,
                block_tokens=self._block_tokens,
                num_past_tokens=num_past_tokens,
                rates=rates,
                prefill=self._meter.rate,
            )
        if choice.num_blocks or choice.num_meeting or not match.num_blocks:
            return choice
        self._num_spurned += 1
        if self._num_spurned % _LOOK_AGAIN:
            return choice
        return Choice(match.num_blocks, choice.load_seconds, choice.compute_seconds)
