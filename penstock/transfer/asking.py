"""Asks a store which blocks it holds, beside what is moved: an answer must not wait for a load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from penstock.errors import StoreError
from penstock.transfer.pool import DaemonPool
from penstock.types import Answer, BlockKey, Question

Exists = Callable[[Sequence[BlockKey], int], list[bool]]
"""(blocks of a prompt in order, how many of them to look for) to which of those are there."""

_NUM_THREADS = 2
# Blocks are saved from the front: behind a stretch that lacks one, the rest is hardly there. The
# first is short, since most prompts are new, and some stores are paid for every name.
_FIRST_BLOCKS = 32
_GROWTH = 4
_MAX_BLOCKS = 512


class Asker:
    def __init__(self, exists: Exists, report: Callable[[Answer], None]) -> None:
        """`exists` may raise StoreError; whatever it raises is an answer without news."""
        self._exists = exists
        self._report = report
        self._threads = DaemonPool(_NUM_THREADS, "penstock-ask")

    def ask(self, question: Question) -> None:
        self._threads.submit(lambda: self._report(self._answer(question)))

    def close(self) -> None:
        self._threads.close()

    def _answer(self, question: Question) -> Answer:
        started = time.perf_counter()
        present: list[bool] = []
        error = ""
        num_blocks = _FIRST_BLOCKS
        try:
            while len(present) < len(question.keys) and all(present):
                present += self._exists(question.keys[len(present) :], num_blocks)
                num_blocks = min(_GROWTH * num_blocks, _MAX_BLOCKS)
        except StoreError as fault:
            error = str(fault)
        except Exception as bug:  # it costs the answer, never the thread
            error = repr(bug)
        seconds = time.perf_counter() - started
        return Answer(question.id, tuple(present), seconds, error)
