"""Converts texts and conversations to token ids, and token ids to text."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from penstock.engine.anywhere.conversations import render_pieces
from penstock.engine.anywhere.pieces import (
    PromptPiece,
    PromptTokens,
    is_one_text,
    put_around,
    special_ids,
    split_text,
    text_of,
    tokenize,
)
from penstock.errors import ConfigError
from penstock.server.errors import ApiError, from_engine
from penstock.server.tools.formats import find_format, format_of

_Result = TypeVar("_Result")
_TOOLS = re.compile(r"\btools\b")  # a template's variable


@dataclass(frozen=True, slots=True)
class Cut:
    """How a prompt that is too long is shortened: to its first tokens, or to its last.

    `keeps_special`: also keep the special tokens that the tokenizer adds to a text. Models trained
    with a begin token produce nonsense without it.
    """

    max_tokens: int
    keeps_end: bool = True
    keeps_special: bool = False

    def of(self, ids: list[int]) -> list[int]:
        if len(ids) <= self.max_tokens:
            return ids
        return ids[len(ids) - self.max_tokens :] if self.keeps_end else ids[: self.max_tokens]

    def of_tokens(self, tokens: PromptTokens) -> PromptTokens:
        """A segment that loses its beginning is none any more: it would not be found again."""
        ids = self.of(tokens.ids)
        num_cut = len(tokens.ids) - len(ids) if self.keeps_end else 0
        moved = [(start - num_cut, end - num_cut) for start, end in tokens.segments]
        kept = [(start, min(end, len(ids))) for start, end in moved if 0 <= start < len(ids)]
        return PromptTokens(ids, kept)

    def of_pieces(self, pieces: Sequence[PromptPiece], max_chars: int) -> list[PromptPiece]:
        """Cut texts that are far too long, before they are tokenized."""
        kept: list[PromptPiece] = []
        for piece in reversed(pieces) if self.keeps_end else pieces:
            content = piece.content[-max_chars:] if self.keeps_end else piece.content[:max_chars]
            is_begun = not self.keeps_end or len(content) == len(piece.content)
            kept.append(PromptPiece(content, piece.is_reusable and is_begun))
            max_chars -= len(content)
            if max_chars <= 0:
                break
        return kept[::-1] if self.keeps_end else kept


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How a conversation becomes text. The names are vLLM's."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_values: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()


class Prompts:
    """The tokenizer, on its own thread: a long prompt does not delay the event loop."""

    def __init__(
        self,
        tokenizer: Any,
        max_tokens: int,
        chat_template: str | None = None,
        segment_separator: str | None = None,
        tool_call_parser: str | None = None,
    ) -> None:
        """Raises ConfigError for an invalid chat template or an unknown parser."""
        # A copy: the engine's thread decodes with the original, and changes here could break it.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._tokenizer.truncation_side = "left"  # used if special tokens are kept
        self.max_tokens = max_tokens
        self._separator = segment_separator
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
            self._check_template()
        templates = _templates(self._tokenizer)
        self.has_tools = any(_TOOLS.search(text) for text in templates)
        text = "\n".join(templates)
        self.tool_format = (
            format_of(text) if tool_call_parser is None else find_format(tool_call_parser, text)
        )
        self._special_ids = {
            token.content: token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if getattr(token, "special", False)
        }
        longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self._max_chars = max_tokens * longest
        self._thread = ThreadPoolExecutor(1, "penstock-prompts")
        self.token_text = lru_cache(1 << 16)(self._token_text)

    def special_id(self, text: str) -> int | None:
        """The id of a text that is one special token."""
        return self._special_ids.get(text)

    def split(self, text: str) -> list[PromptPiece]:
        """The pieces of a prompt that is one text."""
        return split_text(text, self._separator)

    async def encode(
        self,
        prompt: str | Sequence[PromptPiece],
        *,
        add_special_tokens: bool = True,
        cut: Cut | None = None,
    ) -> PromptTokens:
        """The token ids of a prompt, by default with the tokenizer's special tokens."""
        pieces = self.split(prompt) if isinstance(prompt, str) else prompt
        if not any(len(piece.content) for piece in pieces):
            raise ApiError(400, "the prompt is empty; expected some text.", param="prompt")
        return await self._run(lambda: self._tokens(pieces, add_special_tokens, cut))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        style: ChatStyle | None = None,
        *,
        add_special_tokens: bool = False,
        cut: Cut | None = None,
    ) -> PromptTokens:
        """The token ids of a conversation, up to where the answer begins.

        A message's content is text, or a list of pieces.
        """

        def render(plain: list[dict[str, Any]]) -> str:
            return self._render(plain, style or ChatStyle())

        def render_and_encode() -> PromptTokens:
            pieces = render_pieces(messages, render, self._separator)
            return self._tokens(pieces, add_special_tokens, cut)

        return await self._run(render_and_encode)

    async def token_names(self, ids: Sequence[int]) -> list[str]:
        """The tokens as they are written in the vocabulary."""
        return await self._run(lambda: list(self._tokenizer.convert_ids_to_tokens(list(ids))))

    async def decode(self, ids: Sequence[int]) -> str:
        return await self._run(lambda: self._decode(list(ids)))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _tokens(
        self, pieces: Sequence[PromptPiece], add_special_tokens: bool, cut: Cut | None
    ) -> PromptTokens:
        pieces = self._bounded(pieces, cut)
        if is_one_text(pieces):
            return PromptTokens(self._ids(text_of(pieces), add_special_tokens, cut))
        before, after = special_ids(self._tokenizer, pieces) if add_special_tokens else ([], [])
        try:
            tokens = tokenize(self._tokenizer, pieces)
        except ConfigError as error:
            raise from_engine(error) from None
        if cut is None:
            tokens = put_around(tokens, before, after)
        elif cut.keeps_special and cut.max_tokens > len(before) + len(after):
            inner = Cut(cut.max_tokens - len(before) - len(after)).of_tokens(tokens)
            tokens = put_around(inner, before, after)
        else:
            tokens = cut.of_tokens(put_around(tokens, before, after))
        if not tokens.ids:
            raise _empty()
        return tokens

    def _bounded(self, pieces: Sequence[PromptPiece], cut: Cut | None) -> Sequence[PromptPiece]:
        """Bounds the work before a prompt is refused."""
        num_chars = sum(len(piece.content) for piece in pieces)
        if num_chars <= self._max_chars:
            return pieces
        if cut is None:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.max_tokens} tokens. However, "
                f"your prompt has {num_chars} characters, more than {self.max_tokens} tokens "
                "can hold. Please reduce the length of the prompt.",
                code="context_length_exceeded",
            )
        return cut.of_pieces(pieces, self._max_chars)

    def _ids(self, text: str, add_special_tokens: bool, cut: Cut | None) -> list[int]:
        options: dict[str, Any] = {}
        if cut is not None and cut.keeps_special and add_special_tokens:
            has_room = cut.max_tokens > self._tokenizer.num_special_tokens_to_add() > 0
            options = {"truncation": True, "max_length": cut.max_tokens} if has_room else {}
        encoded = self._tokenizer(
            text, add_special_tokens=add_special_tokens, verbose=False, **options
        )
        ids: list[int] = encoded["input_ids"]
        if cut is not None:
            ids = cut.of(ids)
        if not ids:
            raise _empty()
        return ids

    def _check_template(self) -> None:
        try:
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:
            # Other errors may be due to this conversation; real ones report their own.
            if type(error).__name__ == "TemplateSyntaxError":
                raise ConfigError(
                    f"--chat-template is not a Jinja template ({_first_line(error)}); correct it."
                ) from None

    def _render(self, messages: list[dict[str, Any]], style: ChatStyle) -> str:
        if self._tokenizer.chat_template is None:
            raise ApiError(
                400,
                "the model has no chat template; send a whole prompt to /v1/completions instead.",
            )
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=style.add_generation_prompt,
                continue_final_message=style.continue_final_message,
                tokenize=False,
                **({"tools": list(style.tools)} if style.tools else {}),
                **style.template_values,
            )
        except Exception as error:  # a template is a program and may raise anything
            raise ApiError(
                400,
                "the model's chat template rejects these messages "
                f"({_first_line(error)}); correct them.",
                param="messages",
            ) from None
        assert isinstance(rendered, str)  # it would be a list for several conversations
        return rendered

    def _token_text(self, token_id: int) -> str:
        return self._decode([token_id])

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def _templates(tokenizer: Any) -> list[str]:
    """The texts of a model's chat templates: some have another for conversations with tools."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return list(template.values())
    return [] if template is None else [template]


def _empty() -> ApiError:
    return ApiError(400, "the prompt is empty; expected at least one token.", param="prompt")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
