"""From token ids to text, a token at a time.

A token is not a piece of text: a character may be spread over several tokens, and some tokenizers
drop the space before the first. So a few tokens before the new one are decoded with it, and only
what lies behind the text that is already out is new. What ends in U+FFFD may be half a character
and waits for the rest.

    window   [ context | waiting | new ]
                       ^ read            decode(window)[num_out:] is the new text
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from penstock.engine.params import SamplingParams
from penstock.errors import BookError

HALF = "\ufffd"
# A character has at most 4 bytes, and a token at least one: longer waiting is for nothing.
MAX_WAITING_TOKENS = 8
# Enough to hold the first byte of a character that is not complete yet.
_CONTEXT_TOKENS = 4


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def decode(
        self, ids: list[int], /, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str | list[str]: ...

    def convert_ids_to_tokens(self, ids: int, /) -> str | list[str] | None: ...

    @property
    def added_tokens_decoder(self) -> dict[int, object]: ...

    @property
    def all_special_ids(self) -> list[int]: ...


class _Stop:
    """One stop string, matched a character at a time without ever looking back (Knuth, Morris,
    Pratt)."""

    __slots__ = ("_fallback", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0  # how much of its start the text now ends in
        # [k]: the longest shorter match that remains when k characters matched and the next fails.
        self._fallback = [0, 0]
        length = 0
        for char in string[1:]:
            while length and string[length] != char:
                length = self._fallback[length]
            length += string[length] == char
            self._fallback.append(length)

    def feed(self, char: str) -> bool:
        """Take the text's next character; whether the text now ends in the whole string."""
        while self.matched and self.string[self.matched] != char:
            self.matched = self._fallback[self.matched]
        self.matched += self.string[self.matched] == char
        if self.matched < len(self.string):
            return False
        self.matched = self._fallback[self.matched]  # ready for the next, if this does not count
        return True


class Detokenizer:
    """The text of one sequence. Whole characters only, and nothing that a stop string will cut.

    Give it every token that belongs to the text: not the end or stop token that ended it, unless
    `include_stop_str_in_output` makes that part of the text.
    A stop string counts where it is complete first; of two complete at the same character, the
    longer. So the text does not depend on how it was cut into tokens. As in vLLM, one that is
    complete within the first `min_tokens` tokens does not count.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._tokenizer = tokenizer
        self._decode = _decoder(tokenizer, skip_special=params.skip_special_tokens)
        self._silent = _special_ids(tokenizer) if params.skip_special_tokens else frozenset()
        self._min_tokens = params.min_tokens
        self._shows_stop = params.include_stop_str_in_output
        self._stops = [_Stop(string) for string in params.stop_strings]
        self._num_tokens = 0
        self._held = ""  # decoded, and perhaps the start of a stop string
        self._out: list[str] = []
        self._finished = False
        self.stopped_by: str | None = None  # the stop string that ended the text

        context = [i for i in prompt_ids[-_CONTEXT_TOKENS:] if not self._is_silent(i)]
        self._window = context
        self._read = len(context)
        decoded = self._decode(context)
        # A character the prompt leaves half is the output's, once the output completes it.
        self._prompt_half = decoded.endswith(HALF)
        self._num_out = len(decoded) - self._prompt_half

    @property
    def text(self) -> str:
        """All that append and finish have returned."""
        return "".join(self._out)

    def append(self, token_id: int) -> str:
        """Take the next token and return the text that is now certain, often none.

        After a stop string, `stopped_by` is set and every call returns "".
        """
        if self._finished:
            raise BookError(
                f"token {token_id} came after finish(): expected none; make a new Detokenizer"
            )
        if self.stopped_by is not None:
            return ""
        self._num_tokens += 1
        return self._emit("" if self._is_silent(token_id) else self._advance(token_id))

    def finish(self) -> str:
        """Return what was held back: half a character as U+FFFD, the start of a stop string.

        Again, it returns ""."""
        if self._finished or self.stopped_by is not None:
            self._finished = True
            return ""
        self._finished = True
        decoded = self._decode(self._window)
        new = self._emit(self._cut(decoded, len(decoded)))
        if self.stopped_by is None and self._held:
            self._out.append(self._held)
            new += self._held
        self._held = ""
        return new

    def _is_silent(self, token_id: int) -> bool:
        # Ids beyond the vocabulary come from models that pad it; they have no text.
        return token_id in self._silent or self._tokenizer.convert_ids_to_tokens(token_id) is None

    def _advance(self, token_id: int) -> str:
        """The whole characters that the token completes."""
        self._window.append(token_id)
        decoded = self._decode(self._window)
        if len(decoded) > self._num_out and not decoded.endswith(HALF):
            new = self._cut(decoded, len(decoded))
            self._window = self._window[self._read :]
            self._num_out = len(self._decode(self._window))
        elif len(self._window) - self._read >= MAX_WAITING_TOKENS:
            # Bytes that are no text: of all these, only the last may still become a character.
            new = self._cut(decoded, len(decoded) - decoded.endswith(HALF))
            self._window = self._window[-_CONTEXT_TOKENS:]
            decoded = self._decode(self._window)
            self._num_out = len(decoded) - decoded.endswith(HALF)
        else:
            return ""
        self._read = len(self._window)
        return new

    def _cut(self, decoded: str, end: int) -> str:
        start = self._num_out
        if self._prompt_half and end > start:
            self._prompt_half = False
            start += decoded[start] == HALF  # it stayed half: it is the prompt's
        return decoded[start:end]

    def _emit(self, new: str) -> str:
        """Pass the text by the stop strings, and return what none of them can cut any more."""
        if not self._stops:
            return self._note(new)
        armed = self._num_tokens > self._min_tokens
        for place, char in enumerate(new):
            # Each must see the character, also when another is complete.
            complete = [stop.string for stop in self._stops if stop.feed(char)]
            if complete and armed:
                self.stopped_by = max(complete, key=len)
                text = self._held + new[: place + 1]
                self._held = ""
                return self._note(text if self._shows_stop else text[: -len(self.stopped_by)])
        known = self._held + new
        held = 0 if self._shows_stop else max(stop.matched for stop in self._stops)
        keep = len(known) - held
        self._held = known[keep:]
        return self._note(known[:keep])

    def _note(self, text: str) -> str:
        if text:
            self._out.append(text)
        return text


def _decoder(tokenizer: Tokenizer, *, skip_special: bool) -> Callable[[list[int]], str]:
    """Its text of some ids, without cleaning up: that takes back spaces that are already out.

    Where transformers would only pass the ids on, they go straight to the library below: what it
    wraps around that takes twice as long as the decoding, for every token.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    where = {name: _home(type(tokenizer), name) for name in ("decode", "_decode")}
    if backend is not None and where == {
        "decode": "transformers.tokenization_utils_base",
        "_decode": "transformers.tokenization_utils_tokenizers",
    }:
        straight: Callable[[list[int]], str] = partial(
            backend.decode, skip_special_tokens=skip_special
        )
        return straight

    def decode(ids: list[int]) -> str:
        text = tokenizer.decode(
            ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)  # a list only where a batch was given
        return text

    return decode


def _home(kind: type, name: str) -> str | None:
    """The module that the method comes from."""
    return next((c.__module__ for c in kind.__mro__ if name in vars(c)), None)


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {
        token_id for token_id, token in added if getattr(token, "special", False)
    }
