"""Moves grammars on by a token, on other threads than the one that computes.

Some grammars need seconds for one token, for example with hundreds of ambiguous rules, and no limit
of llguidance's prevents all of them. The thread that computes therefore waits only a little. Then
the sequence sits out until its grammar is ready, and all others go on. One that needs more time
than `_MAX_CPU_SECONDS` for a token ends with an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher

_THREADS = 2
_PATIENCE_SECONDS = 0.01  # in a step
_IMPATIENCE_SECONDS = 0.1  # after which a step waits again
_MAX_CPU_SECONDS = 1.0


class TooSlow(Exception):
    """The grammar may go on, but not within reasonable time."""


class NextMask:
    """What is known of a grammar after a token: first whether it may go on, then its mask."""

    def __init__(self) -> None:
        self.taken: Future[tuple[bool, bool]] = Future()  # whether it was allowed; whether it ends
        self.bits: Future[bytes] = Future()

    @property
    def is_ready(self) -> bool:
        return self.bits.done()


class MaskThreads:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "penstock-masks")
        self._waits_again = 0.0

    def move(self, matcher: LLMatcher, token_id: int) -> NextMask:
        moved = NextMask()
        try:
            self._threads.submit(_move, matcher, token_id, moved)
        except RuntimeError:  # the engine closes
            _move(matcher, token_id, moved)
        return moved

    def patience(self) -> Callable[[], float]:
        """For how much longer the caller may wait, now and later."""
        end = time.monotonic() + _PATIENCE_SECONDS
        return lambda: 0.0 if (now := time.monotonic()) < self._waits_again else max(0.0, end - now)

    def is_done(self, future: Future[Any], seconds: float) -> bool:
        """Whether it is, or becomes so within this time."""
        if future.done():
            return True
        if seconds > 0:
            try:
                future.exception(seconds)
            except TimeoutError:
                self._waits_again = time.monotonic() + _IMPATIENCE_SECONDS
            except CancelledError:
                pass
        return future.done()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _move(matcher: LLMatcher, token_id: int, moved: NextMask) -> None:
    began = time.thread_time()  # of the CPU: on a busy machine, others' time is not counted
    try:
        is_taken = matcher.consume_token(token_id)
        is_finished = is_taken and matcher.is_stopped()
        moved.taken.set_result((is_taken, is_finished))
        bits = matcher.compute_bitmask() if is_taken else b""  # finished: only end tokens
        if time.thread_time() - began > _MAX_CPU_SECONDS:
            raise TooSlow
        moved.bits.set_result(b"" if matcher.is_error() else bits)
    except BaseException as error:
        if not moved.taken.done():
            moved.taken.set_exception(error)
        moved.bits.set_exception(error)
