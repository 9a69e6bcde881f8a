"""Asks a store which blocks it holds, on separate threads: answers must not wait for loads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from penstock.errors import StoreError
from penstock.transfer.pool import DaemonPool
from penstock.types import Answer, BlockKey, Question

Exists = Callable[[Sequence[BlockKey], int], list[bool]]
"""Takes the blocks of a prompt in order and a limit; returns which of the first ones exist."""

_NUM_THREADS = 2
# Blocks are saved from the front: after a missing block the rest rarely exists. The first batch is
# short because most prompts are new, and some stores charge for every name.
_FIRST_BLOCKS = 32
_GROWTH = 4
_MAX_BLOCKS = 512


class Asker:
    def __init__(self, exists: Exists, report: Callable[[Answer], None]) -> None:
        """If `exists` raises, the answer has an error and the blocks found until then."""
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
        except Exception as bug:  # a bug fails the answer, but not the thread
            error = repr(bug)
        seconds = time.perf_counter() - started
        return Answer(question.id, tuple(present), seconds, error)
