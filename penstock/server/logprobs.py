"""Log probabilities in OpenAI's two formats. One entry per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.engine.detokenize import HALF
from penstock.server.answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

if TYPE_CHECKING:
    from penstock.engine.sampler import Sampled
    from penstock.server.prompts import Prompts

_LEAST = -9999.0  # JSON has no infinity; this is OpenAI's stand-in


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and logprob > _LEAST else _LEAST


def chat_logprobs(samples: Sequence[Sampled], prompts: Prompts) -> ChatLogprobs:
    def entry(token_id: int, logprob: float | None) -> TopLogprob:
        text = prompts.token_text(token_id)
        # A replacement character stands for part of a character; the bytes are unknown.
        whole = None if HALF in text else list(text.encode())
        return TopLogprob(token=text, logprob=_finite(logprob), bytes=whole)

    content = [
        TokenLogprob(
            **entry(sampled.token_id, sampled.logprob).model_dump(),
            top_logprobs=[entry(*top) for top in sampled.top],
        )
        for sampled in samples
    ]
    return ChatLogprobs(content=content, refusal=None)


def completion_logprobs(
    samples: Sequence[Sampled], prompts: Prompts, text_offset: int
) -> CompletionLogprobs:
    """`text_offset` is where the first token begins in the text of the whole answer."""
    tokens = [prompts.token_text(sampled.token_id) for sampled in samples]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[_finite(sampled.logprob) for sampled in samples],
        top_logprobs=[
            {prompts.token_text(token_id): _finite(logprob) for token_id, logprob in sampled.top}
            for sampled in samples
        ],
        text_offset=offsets,
    )
