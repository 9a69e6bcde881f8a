"""How fast this machine computes, and what fits into the time there is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from stage import Answer

# Attention reads all that came before: a prompt of this many tokens costs twice what as many
# tokens in short prompts cost. As measured on two cores; it only has to be about right.
_TWICE_AS_DEAR_TOKENS = 5_300


@dataclass(frozen=True, slots=True)
class Plan:
    """What the rest of the demonstration may take, once the machine's speed is known."""

    sizes: tuple[int, ...]  # prompts whose first token is still to be timed
    sessions_seconds: float
    restart_tokens: int


class Pace:
    def __init__(self, started: float, limit_seconds: float) -> None:
        self._end = started + limit_seconds
        self.tokens_per_second = 200.0  # of short prompts, as last seen
        self.decode_seconds = 0.08  # of a step, as last seen
        self.start_seconds = 10.0  # of a server

    @property
    def left_seconds(self) -> float:
        return self._end - time.monotonic()

    def observe(self, answers: Sequence[Answer]) -> None:
        """Prompts of one length were computed, and answered, side by side."""
        last = max(answers, key=lambda answer: answer.first_token_seconds)
        num_tokens = len(last.prompt_ids)
        dearer = 1 + num_tokens / _TWICE_AS_DEAR_TOKENS
        self.tokens_per_second = len(answers) * num_tokens * dearer / last.first_token_seconds
        decoding = last.seconds - last.first_token_seconds
        self.decode_seconds = decoding / max(1, len(last.token_ids) - 1)

    def seconds(self, num_tokens: int) -> float:
        dearer = 1 + num_tokens / _TWICE_AS_DEAR_TOKENS
        return num_tokens * dearer / self.tokens_per_second

    def tokens(self, seconds: float, most: int) -> int:
        """The longest prompt, of `most` at most, that is computed within so many seconds."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.seconds(middle) <= seconds else (low, middle - 1)
        return low

    def plan(self, sizes: Sequence[int], sessions_seconds: float, restart_tokens: int) -> Plan:
        """All of what is wished for if there is time; else everything shorter, in proportion."""
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
