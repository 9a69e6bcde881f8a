from __future__ import annotations

from typing import Any, cast

from penstock.engine.anywhere.pieces import PromptTokens
from penstock.engine.sampler import Sampled
from penstock.engine.service import Delta
from penstock.server.generation import Generation, OutputPiece


class Spoken:
    num_tokens = 0


def piece(choice: int, num_cached: int, num_lossy: int) -> OutputPiece:
    sampled = cast(Sampled, None)
    delta = Delta(0, "a", sampled, num_cached_tokens=num_cached, num_lossy_tokens=num_lossy)
    return OutputPiece(choice, delta)


def test_usage_says_how_much_kv_was_lossy() -> None:
    generation = Generation(
        cast(Any, [None, None]),
        [PromptTokens([1] * 64), PromptTokens([2] * 64)],
        2,
        cast(Any, Spoken()),
    )
    for each in (piece(0, 48, 0), piece(1, 48, 32), piece(2, 16, 16), piece(3, 16, 0)):
        generation._count(each)
    details = generation.usage().prompt_tokens_details
    assert (details.cached_tokens, details.lossy_tokens) == (64, 48)
