"""Prompts in pieces, some of which may be reused anywhere, become token ids and segments.

A reusable piece is tokenized on its own, so that it has the same tokens wherever it stands. Plain
text between two of them is tokenized as one text. A prompt without reusable pieces has the tokens
that it would have had as one text.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import index
from typing import Any, NamedTuple

from penstock.engine.anywhere.segments import check_number
from penstock.errors import ConfigError

REUSE_ANYWHERE = "anywhere"
_MARK = '{"reuse": "anywhere"}'
_SEGMENT = (
    'a string, a list of token ids, or an object with "text" or "token_ids", which may be reused '
    f'with "penstock": {_MARK}'
)


class PromptPiece(NamedTuple):
    """A part of a prompt: text, or token ids."""

    content: str | Sequence[int]
    is_reusable: bool = False


@dataclass(frozen=True, slots=True)
class PromptTokens:
    ids: list[int]
    # Where each segment begins and ends.
    segments: list[tuple[int, int]] = field(default_factory=list)


def is_marked(mark: object) -> bool:
    """Whether the field `penstock` of a text says that it may be reused. Raises ConfigError."""
    if mark is None:
        return False
    if isinstance(mark, Mapping) and set(mark) <= {"reuse"}:
        reuse = mark.get("reuse")
        if reuse is None:
            return False
        if reuse == REUSE_ANYWHERE:
            return True
    raise ConfigError(f"penstock of a text is {reprlib.repr(mark)}: expected {_MARK}; correct it.")


def read_segments(given: object) -> list[PromptPiece]:
    """The pieces of a prompt that is given as {"segments": given}. Raises ConfigError."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ConfigError(
            f"segments is {reprlib.repr(given)}: expected a list, each item of which is {_SEGMENT}."
        )
    return [_read_segment(each) for each in given]


def _read_segment(given: object) -> PromptPiece:
    content, is_reusable = given, False
    if isinstance(given, Mapping):
        names = set(given) - {"penstock"}
        content = given[names.pop()] if names in ({"text"}, {"token_ids"}) else None
        is_reusable = is_marked(given.get("penstock"))
    if isinstance(content, str):
        return PromptPiece(content, is_reusable)
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        try:
            return PromptPiece([index(each) for each in content], is_reusable)
        except TypeError:
            pass
    raise ConfigError(f"a segment is {reprlib.repr(given)}: expected {_SEGMENT}; correct it.")


def split_text(text: str, separator: str | None) -> list[PromptPiece]:
    """What stands between the first and the last separator may be reused."""
    if separator is None or separator not in text:
        return [PromptPiece(text)]
    first, *middle, last = text.split(separator)
    return [
        PromptPiece(first),
        *(PromptPiece(each, is_reusable=True) for each in middle),
        PromptPiece(last),
    ]


def text_of(pieces: Sequence[PromptPiece]) -> str:
    """Only for pieces that are text."""
    return "".join(piece.content for piece in pieces if isinstance(piece.content, str))


def is_one_text(pieces: Sequence[PromptPiece]) -> bool:
    """Whether nothing may be reused, and nothing is token ids."""
    return all(
        isinstance(piece.content, str) and not (piece.is_reusable and piece.content)
        for piece in pieces
    )


def tokenize(tokenizer: Any, pieces: Sequence[PromptPiece]) -> PromptTokens:
    """Without the special tokens that the tokenizer adds to a text.

    Raises ConfigError if there are too many reusable pieces: each takes a call of the tokenizer.
    """
    check_number(sum(piece.is_reusable and len(piece.content) > 0 for piece in pieces))
    tokens = PromptTokens([])
    for is_plain, group in groupby(
        (piece for piece in pieces if len(piece.content)),
        lambda piece: isinstance(piece.content, str) and not piece.is_reusable,
    ):
        for piece in [PromptPiece(text_of(list(group)))] if is_plain else group:
            start = len(tokens.ids)
            tokens.ids.extend(_ids(tokenizer, piece.content))
            if piece.is_reusable:
                tokens.segments.append((start, len(tokens.ids)))
    return tokens


def put_around(tokens: PromptTokens, before: list[int], after: list[int]) -> PromptTokens:
    moved = [(start + len(before), end + len(before)) for start, end in tokens.segments]
    return PromptTokens([*before, *tokens.ids, *after], moved)


def special_ids(tokenizer: Any, pieces: Sequence[PromptPiece]) -> tuple[list[int], list[int]]:
    """What the tokenizer adds before a text, and after it; nothing if token ids come first."""
    if pieces and not isinstance(pieces[0].content, str):
        return [], []
    text = "a"
    inner, whole = _ids(tokenizer, text), list(tokenizer(text)["input_ids"])
    for at in range(len(whole) - len(inner) + 1):
        if whole[at : at + len(inner)] == inner:
            return whole[:at], whole[at + len(inner) :]
    return [], []


def _ids(tokenizer: Any, content: str | Sequence[int]) -> list[int]:
    if not isinstance(content, str):
        return list(content)
    return list(tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"])
