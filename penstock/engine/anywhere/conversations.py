"""Conversations with reusable parts: the chat template is rendered around them.

A chat template is a program that makes one text of a conversation. So that the reusable parts can
be found in that text, whatever they say, the template is given placeholders in their place. They
are random digits: nobody can guess them, and trimming or changing case does not alter them.
"""

from __future__ import annotations

import re
import reprlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from penstock.engine.anywhere.pieces import PromptPiece, is_marked, split_text, text_of
from penstock.errors import ConfigError

_NONCE_DIGITS = 40
_NUMBER_DIGITS = 8
_PART_DIGITS = 12  # that tell a part of a placeholder from other numbers

Render = Callable[[list[dict[str, Any]]], str]


def render_pieces(
    messages: Sequence[Mapping[str, Any]], render: Render, separator: str | None = None
) -> list[PromptPiece]:
    """The pieces of a conversation's text. A message's content may be a list of pieces.

    Plain text in it is split at `separator`. If the template leaves out a placeholder, or fails
    because of it, nothing is reusable: the text is that of the same conversation without marks.
    """
    split = [_split(message, separator) for message in messages]
    placeholders = _Placeholders()
    marked = [_with_content(message, placeholders.put) for message in split]
    if placeholders.is_used:
        try:
            pieces = placeholders.split(render(marked))
        except Exception:
            pieces = None  # if the template rejects the plain conversation too, that one is told
        if pieces is not None:
            return pieces
    return [PromptPiece(render([_with_content(message, text_of) for message in split]))]


def read_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message in OpenAI's format: with pieces as its content if a part is marked, else as it is.

    Raises ConfigError if a mark is not one, or if a part beside a marked one is not text.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    marks = [is_marked(part.get("penstock")) for part in content if isinstance(part, Mapping)]
    if not any(marks):
        return message
    pieces = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type") != "text":
            raise ConfigError(
                f"a message with a part that may be reused also has {reprlib.repr(part)}: expected "
                "only parts of type text; send the other in a message of its own."
            )
        pieces.append(PromptPiece(text, is_marked(part.get("penstock"))))
    return {**message, "content": pieces}


def _split(message: Mapping[str, Any], separator: str | None) -> dict[str, Any]:
    content = message.get("content")
    if separator is None:
        return dict(message)
    if isinstance(content, str) and separator in content:
        return {**message, "content": split_text(content, separator)}
    if not _has_pieces(content):
        return dict(message)
    pieces: list[PromptPiece] = []
    for piece in content:
        # A marked part is taken as it is, whatever it says.
        pieces += [piece] if piece.is_reusable else split_text(text_of([piece]), separator)
    return {**message, "content": pieces}


def _with_content(
    message: Mapping[str, Any], to_text: Callable[[Sequence[PromptPiece]], str]
) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": to_text(content)} if _has_pieces(content) else dict(message)


def _has_pieces(content: object) -> TypeGuard[list[PromptPiece]]:
    return isinstance(content, list) and bool(content) and isinstance(content[0], PromptPiece)


class _Placeholders:
    def __init__(self) -> None:
        self._nonce = "".join(secrets.choice("0123456789") for _ in range(_NONCE_DIGITS))
        starts = range(_NONCE_DIGITS - _PART_DIGITS + 1)
        self._parts = [self._nonce[start : start + _PART_DIGITS] for start in starts]
        self._texts: list[str] = []

    @property
    def is_used(self) -> bool:
        return bool(self._texts)

    def put(self, pieces: Sequence[PromptPiece]) -> str:
        """The text of pieces, with placeholders for those that are reusable."""
        return "".join(self._put(piece) for piece in pieces)

    def split(self, rendered: str) -> list[PromptPiece] | None:
        """None if the text has not all placeholders, or a part of one.

        One that is repeated is used repeatedly.
        """
        found: set[int] = set()
        pieces = []
        at = 0
        for match in re.finditer(f"{self._nonce}([0-9]{{{_NUMBER_DIGITS}}})", rendered):
            number = int(match[1])
            if number >= len(self._texts):
                return None
            found.add(number)
            pieces += [
                PromptPiece(rendered[at : match.start()]),
                PromptPiece(self._texts[number], True),
            ]
            at = match.end()
        pieces.append(PromptPiece(rendered[at:]))
        is_cut = any(part in piece.content for piece in pieces[::2] for part in self._parts)
        return None if is_cut or len(found) < len(self._texts) else pieces

    def _put(self, piece: PromptPiece) -> str:
        assert isinstance(piece.content, str)
        if not piece.is_reusable or not piece.content:
            return piece.content
        self._texts.append(piece.content)
        return f"{self._nonce}{len(self._texts) - 1:0{_NUMBER_DIGITS}}"
