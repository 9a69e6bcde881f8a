"""Grammars over tokens: which tokens may come next in a structured answer.

    compiled = grammars.compile(params)      # waits, or: grammars.submit(params)
    grammar = compiled.fork()                # the state of one sequence
    grammar.mask(scores)                     # tokens that may not come next become -inf
    grammar.advance(token_id)                # after each token of the output

A grammar only reads and writes scores at sampling: KV does not depend on it. Its state depends on
the output tokens alone, so preemption and restarts do not touch it. Other threads do the work (see
`mask_threads`): a sequence whose next mask is not ready sits out, so that no schema or regular
expression can stall the thread that computes. One that reaches a limit is an error of its own
request.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.admission import Busy
from penstock.engine.compile_threads import CompileThreads
from penstock.engine.faults import GrammarFault
from penstock.engine.grammar_text import first_line, grammar_text, invalid
from penstock.engine.mask_threads import MaskThreads, NextMask
from penstock.engine.sending import sent
from penstock.engine.structure import (
    GrammarSource,
    StructuredOutputsParams,
)
from penstock.errors import ConfigError
from penstock.install import STRUCTURED, require

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILE_SECONDS = 10.0  # for which a request waits
_LATE_SECONDS = 2.0  # after which others need not wait for the same thread
_MAX_REMEMBERED = 32
_MAX_REMEMBERED_CHARS = 1 << 20  # of their sources: a compiled one has some hundred times as many
# To compile them all. Small sources can become large too: `{"multipleOf": 999983}` takes 9 seconds
# and 400 MB, and others that take long take as much in proportion.
_MAX_REMEMBERED_SECONDS = 20.0
_MAX_COMPILING = 32  # waiting or running


class Grammar:
    """The state of one sequence. One thread uses it."""

    def __init__(self, matcher: LLMatcher, bits: bytes, threads: MaskThreads) -> None:
        self._matcher = matcher
        self._bits: bytes | NextMask = bits
        self._threads = threads
        self._is_finished = False

    def is_ready(self) -> bool:
        """Whether the next mask is known. If not, a sequence should not be computed yet."""
        return not isinstance(self._bits, NextMask) or self._bits.is_ready

    def wait(self, patience: Callable[[], float]) -> None:
        """Until it is ready, but not for long."""
        if isinstance(self._bits, NextMask):
            self._threads.is_done(self._bits.bits, patience())

    @property
    def is_finished(self) -> bool:
        """Only an end token could follow. False if that is not known yet: then masks say so."""
        return self._is_finished

    def mask(self, scores: Tensor, banned_ids: Sequence[int] = ()) -> None:
        """Set the scores of all tokens that may not come next to -inf.

        Also those of `banned_ids`, unless nothing else may come next. After an error nothing
        changes: `advance` reports it.
        """
        allowed = torch.zeros(scores.numel(), dtype=torch.bool)
        bits = torch.from_numpy(np.unpackbits(self._read(), bitorder="little").view(np.bool_))
        num_known = min(scores.numel(), len(bits))
        allowed[:num_known] = bits[:num_known]
        if banned_ids:
            unbanned = allowed.clone()
            unbanned[list(banned_ids)] = False
            allowed = unbanned if unbanned.any() else allowed
        if allowed.any():
            scores.masked_fill_(sent(~allowed, scores), -torch.inf)

    def advance(self, token_id: int) -> None:
        """Take the next token. Raises GrammarFault if it reached a limit."""
        bits = self._read()
        if not (len(bits) * 8 > token_id and bits[token_id >> 3] >> (token_id & 7) & 1):
            raise _too_complex()
        if self._is_finished:
            return  # it was not known before this end token was chosen
        self._bits = moved = self._threads.move(self._matcher, token_id)
        if self._threads.is_done(moved.taken, self._threads.patience()()):
            try:
                is_taken, self._is_finished = moved.taken.result()
            except Exception as error:
                raise _too_complex() from error
            if not is_taken:
                raise _too_complex()

    def _read(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The mask. Empty after an error."""
        if isinstance(self._bits, NextMask):
            moved = self._bits
            try:
                self._bits = moved.bits.result()
                _, self._is_finished = moved.taken.result()
            except (Exception, CancelledError):
                self._bits = b""
        return np.frombuffer(self._bits, dtype=np.uint8)


def _too_complex() -> GrammarFault:
    return GrammarFault(
        "the structure that this request asked for became too complex while the answer was "
        "generated, or nothing can follow what was generated; simplify its schema or grammar."
    )


class CompiledGrammar:
    """A grammar at its beginning, from which sequences start."""

    def __init__(
        self, matcher: LLMatcher, bits: bytes, threads: MaskThreads, compile_seconds: float = 0.0
    ) -> None:
        self.compile_seconds = compile_seconds  # of a processor
        self._matcher = matcher
        self._bits = bits
        self._threads = threads

    def fork(self) -> Grammar:
        return Grammar(self._matcher.deep_copy(), self._bits, self._threads)


class Grammars:
    """Compiles grammars for one tokenizer, and remembers the latest. Threads may share it."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._hf_tokenizer = tokenizer
        self._num_ids = max(vocab_size, len(tokenizer))
        self._end_ids = sorted(end_ids)
        self._special = [
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        ]
        self._tokenizer: LLTokenizer | None = None  # made on first use: it takes a second or two
        self._remembered: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._num_compiling = 0
        self._threads = CompileThreads(_LATE_SECONDS)
        self.mask_threads = MaskThreads()

    def compile(self, wanted: StructuredOutputsParams) -> CompiledGrammar:
        """Raises UnusableStructure, and ConfigError if this model cannot have any."""
        return self._threads.submit(partial(self._find_or_compile, wanted.source)).result()

    def submit(self, wanted: StructuredOutputsParams) -> Future[CompiledGrammar]:
        """`compile` without waiting for it. Raises Busy if too many are being compiled."""
        future: Future[CompiledGrammar] = Future()
        found = self._find(wanted.source)
        if found is not None:
            future.set_result(found)
            return future
        with self._lock:
            if self._num_compiling >= _MAX_COMPILING:
                raise Busy(
                    f"{self._num_compiling} schemas and grammars are already being compiled; send "
                    "the request again later.",
                    retry_after_seconds=1.0,
                )
            self._num_compiling += 1
        try:
            future = self._threads.submit(partial(self._find_or_compile, wanted.source))
        except BaseException:
            self._note_compiled()
            raise
        future.add_done_callback(self._note_compiled)
        return future

    def replace_late(self) -> None:
        """Let what waits be compiled on other threads than those that are late."""
        self._threads.replace_late()

    def close(self) -> None:
        self._threads.close()
        self.mask_threads.close()

    def _note_compiled(self, _: object = None) -> None:
        with self._lock:
            self._num_compiling -= 1

    def _find(self, source: GrammarSource) -> CompiledGrammar | None:
        with self._lock:
            found = self._remembered.get(source)
            if found is not None:
                self._remembered.move_to_end(source)
            return found

    def _find_or_compile(self, source: GrammarSource) -> CompiledGrammar:
        found = self._find(source)
        if found is not None:
            return found
        require("structured", STRUCTURED, "structured outputs")
        made = self._compile(source)
        with self._lock:
            self._remembered[source] = made
            while (
                len(self._remembered) > _MAX_REMEMBERED
                or sum(len(each.text) for each in self._remembered) > _MAX_REMEMBERED_CHARS
                or sum(each.compile_seconds for each in self._remembered.values())
                > _MAX_REMEMBERED_SECONDS
            ):
                self._remembered.popitem(last=False)
        return made

    def _compile(self, source: GrammarSource) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_grammar_size=100_000,
            max_lexer_states=25_000,  # of 1 to 2 kB each
            step_max_items=10_000,
            verbose_errors=False,  # they would contain the schema
        )
        tokenizer = self._read_tokenizer()
        began = time.thread_time()
        text = grammar_text(source, self._special)
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        bits = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise invalid(source, matcher.get_error())
        if not any(bits):
            raise invalid(source, "no text satisfies it")
        return CompiledGrammar(matcher, bits, self.mask_threads, time.thread_time() - began)

    def _read_tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        with self._reading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = from_tokenizer(
                        self._hf_tokenizer, self._num_ids, self._end_ids or None
                    )
                except Exception as error:
                    raise ConfigError(
                        "structured outputs are not possible with this model's tokenizer "
                        f"({first_line(str(error))}); leave them out."
                    ) from None
            return self._tokenizer
