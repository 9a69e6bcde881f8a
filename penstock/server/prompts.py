"""Texts and conversations into token ids, and token ids into the text of one token."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

from penstock.server.errors import ApiError

_Result = TypeVar("_Result")


class Prompts:
    """Works on a thread of its own, one prompt at a time, so that a long one delays no answer."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        # The engine's thread decodes with the original: changing its state here could break that.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._max_tokens = max_tokens
        longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self._max_chars = max_tokens * longest
        self._thread = ThreadPoolExecutor(1, "penstock-prompts")
        self.token_text = lru_cache(1 << 16)(self._token_text)

    async def encode(self, text: str) -> list[int]:
        """A prompt's ids, with the special tokens that the tokenizer puts before a text."""
        if not text:
            raise ApiError(400, "the prompt is empty; expected some text.", param="prompt")
        return await self._run(lambda: self._ids(text, add_special_tokens=True))

    async def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """A conversation's ids, up to where the answer begins."""

        def render_and_encode() -> list[int]:
            return self._ids(self._render(messages), add_special_tokens=False)

        return await self._run(render_and_encode)

    async def decode(self, ids: Sequence[int]) -> str:
        return await self._run(lambda: self._decode(list(ids)))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > self._max_chars:  # a bound on what a prompt can cost before it is refused
            raise ApiError(
                400,
                f"the prompt has {len(text)} characters, more than fit in the model's "
                f"{self._max_tokens} tokens, whatever they are; shorten it.",
                code="context_length_exceeded",
            )
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        ids: list[int] = encoded["input_ids"]
        if not ids:
            raise ApiError(400, "the prompt is empty; expected at least one token.", param="prompt")
        return ids

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        if self._tokenizer.chat_template is None:
            raise ApiError(
                400, "the model has no chat template; use /v1/completions, and write the prompt."
            )
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program, and refuses in any way it likes
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise ApiError(
                400,
                f"the model's chat template does not take these messages ({reason}); correct them.",
                param="messages",
            ) from None
        assert isinstance(rendered, str)  # a list only where several conversations were given
        return rendered

    def _token_text(self, token_id: int) -> str:
        return self._decode([token_id])

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
