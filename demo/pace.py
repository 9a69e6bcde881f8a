"""How fast this machine computes, and what fits into the available time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from stage import Answer

# Attention reads all earlier tokens, so a prompt of this length takes twice as long as the same
# number of tokens in short prompts. Measured on two cores; a rough value is enough.
_DOUBLE_COST_TOKENS = 5_300


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes for the rest of the demo, once the machine's speed is known."""

    sizes: tuple[int, ...]  # prompts whose first token is yet to be timed
    sessions_seconds: float
    restart_tokens: int


class Pace:
    def __init__(self, started: float, limit_seconds: float) -> None:
        self._end = started + limit_seconds
        self.tokens_per_second = 200.0  # of short prompts, as last measured
        self.decode_seconds = 0.08  # per step, as last measured
        self.start_seconds = 10.0  # to start a server

    @property
    def left_seconds(self) -> float:
        return self._end - time.monotonic()

    def observe(self, answers: Sequence[Answer]) -> None:
        """Update the rates from prompts of equal length that were computed in parallel."""
        last = max(answers, key=lambda answer: answer.first_token_seconds)
        num_tokens = len(last.prompt_ids)
        cost = 1 + num_tokens / _DOUBLE_COST_TOKENS
        self.tokens_per_second = len(answers) * num_tokens * cost / last.first_token_seconds
        decoding = last.seconds - last.first_token_seconds
        self.decode_seconds = decoding / max(1, len(last.token_ids) - 1)

    def seconds(self, num_tokens: int) -> float:
        """The estimated time to compute a prompt."""
        cost = 1 + num_tokens / _DOUBLE_COST_TOKENS
        return num_tokens * cost / self.tokens_per_second

    def tokens(self, seconds: float, most: int) -> int:
        """The longest prompt, up to `most` tokens, that can be computed within `seconds`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.seconds(middle) <= seconds else (low, middle - 1)
        return low

    def plan(self, sizes: Sequence[int], sessions_seconds: float, restart_tokens: int) -> Plan:
        """The wanted sizes if there is time for them; else all are reduced in proportion."""
        fixed = 2 * self.start_seconds + 10
        computing = sum(map(self.seconds, sizes)) + 3 * self.seconds(restart_tokens)
        wanted = computing + sessions_seconds
        share = min(1.0, max(0.05, (self.left_seconds - fixed) / wanted))
        return Plan(
            tuple(self._shorten(size, share) for size in sizes),
            share * sessions_seconds,
            self._shorten(restart_tokens, share),
        )

    def _shorten(self, num_tokens: int, share: float) -> int:
        if share == 1:
            return num_tokens
        return max(64, self.tokens(share * self.seconds(num_tokens), num_tokens) // 32 * 32)
