"""Convert token ids to text, one token at a time.

A token is not a piece of text: a character may span several tokens, and some tokenizers drop the
space before the first token. So a few earlier tokens are decoded together with the new one, and
only the text after what was already returned is new. Text that ends in U+FFFD may be an incomplete
character and waits for the rest.

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
# A character has at most 4 bytes and a token at least one, so waiting longer cannot help.
MAX_WAITING_TOKENS = 8
# Enough to include the first byte of an incomplete character.
_CONTEXT_TOKENS = 4


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def decode(
        self, ids: list[int], /, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str | list[str]: ...

    def convert_ids_to_tokens(self, ids: int, /) -> str | list[str] | None: ...

    @property
    def added_tokens_decoder(self) -> dict[int, object]: ...

    @property
    def all_special_ids(self) -> list[int]: ...


class _Stop:
    """One stop string, matched character by character without backtracking (Knuth-Morris-Pratt)."""

    __slots__ = ("_fallback", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0  # length of the longest prefix of the string that the text ends with
        # [k]: the longest shorter match left if k characters matched and the next does not.
        self._fallback = [0, 0]
        length = 0
        for char in string[1:]:
            while length and string[length] != char:
                length = self._fallback[length]
            length += string[length] == char
            self._fallback.append(length)

    def feed(self, char: str) -> bool:
        """Take the text's next character. Returns whether the text now ends with the string."""
        while self.matched and self.string[self.matched] != char:
            self.matched = self._fallback[self.matched]
        self.matched += self.string[self.matched] == char
        if self.matched < len(self.string):
            return False
        self.matched = self._fallback[self.matched]  # continue, in case min_tokens ignores this one
        return True


class Detokenizer:
    """The text of one sequence: only complete characters, and nothing that a stop string removes.

    Append every token that belongs to the text. The end or stop token does not, unless
    `include_stop_str_in_output` is set.
    The stop string that is complete first ends the text; of two that are complete at the same
    character, the longer. So the text does not depend on how it was split into tokens. As in vLLM,
    a stop string that is complete within the first `min_tokens` tokens is ignored.
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
        self._held = ""  # decoded text that may be the start of a stop string
        self._out: list[str] = []
        self._finished = False
        self.stopped_by: str | None = None  # the stop string that ended the text

        context = [i for i in prompt_ids[-_CONTEXT_TOKENS:] if not self._is_silent(i)]
        self._window = context
        self._read = len(context)
        decoded = self._decode(context)
        # An incomplete character at the prompt's end belongs to the output that completes it.
        self._prompt_half = decoded.endswith(HALF)
        self._num_out = len(decoded) - self._prompt_half

    @property
    def text(self) -> str:
        """Everything that append and finish have returned."""
        return "".join(self._out)

    def append(self, token_id: int) -> str:
        """Take the next token and return the text that is now final; it is often empty.

        After a stop string, `stopped_by` is set and every call returns "".
        """
        if self._finished:
            raise BookError(f"token {token_id} was appended after finish(): make a new Detokenizer")
        if self.stopped_by is not None:
            return ""
        self._num_tokens += 1
        return self._emit("" if self._is_silent(token_id) else self._advance(token_id))

    def finish(self) -> str:
        """Return the text held back: an incomplete character as U+FFFD, or part of a stop string.

        A second call returns "".
        """
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
        # Models may pad the vocabulary: ids beyond the tokenizer's have no text.
        return token_id in self._silent or self._tokenizer.convert_ids_to_tokens(token_id) is None

    def _advance(self, token_id: int) -> str:
        """The characters that the token completes."""
        self._window.append(token_id)
        decoded = self._decode(self._window)
        if len(decoded) > self._num_out and not decoded.endswith(HALF):
            new = self._cut(decoded, len(decoded))
            self._window = self._window[self._read :]
            self._num_out = len(self._decode(self._window))
        elif len(self._window) - self._read >= MAX_WAITING_TOKENS:
            # These bytes are not valid text: only the last may still start a character.
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
            start += decoded[start] == HALF  # never completed, so it belongs to the prompt
        return decoded[start:end]

    def _emit(self, new: str) -> str:
        """Match the text against the stop strings; return what none of them can remove."""
        if not self._stops:
            return self._note(new)
        armed = self._num_tokens > self._min_tokens
        for place, char in enumerate(new):
            # Feed every stop string, even if another one is complete.
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
    """A function that decodes ids without clean-up, which would remove spaces already returned.

    If transformers would only pass the ids on, they go straight to the tokenizers library: the
    wrapper takes twice as long as decoding, for every token.
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
        assert isinstance(text, str)  # only a batch gives a list
        return text

    return decode


def _home(kind: type, name: str) -> str | None:
    """The module that defines the method."""
    return next((c.__module__ for c in kind.__mro__ if name in vars(c)), None)


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {
        token_id for token_id, token in added if getattr(token, "special", False)
    }
