"""Lookups in REMOTE, the tier that other instances write to: which of these blocks does it hold?

REMOTE's ledger holds only what this instance believes. A request's blocks are looked up once, when
the request arrives. The answer is entered into the ledger, where `match` finds it. A client waits
for an answer at most until its deadline; a late answer is still entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from penstock.books.ledgers import Ledgers
from penstock.types import Answer, BlockKey, Direction, LookupId, Question, Tier

_MAX_OPEN = 256


class Lookups:
    """Without a REMOTE tier nothing is ever asked."""

    def __init__(self, ledgers: Ledgers, deadline_seconds: float) -> None:
        self._ledgers = ledgers
        self._deadline_seconds = deadline_seconds
        self._ids = count(1)
        self._unasked: list[Question] = []
        self._open: dict[LookupId, Question] = {}
        self._deadlines: dict[LookupId, float] = {}  # of those a client may still wait for

    def __len__(self) -> int:
        """How many answers a client may still wait for."""
        return len(self._deadlines)

    def ask(self, keys: Sequence[BlockKey], now: float) -> LookupId | None:
        """Ask REMOTE about the blocks that no tier above holds.

        Returns None if there is nothing to wait for: no such blocks, or REMOTE cannot be asked.
        """
        self._ledgers.now = now
        if Tier.REMOTE not in self._ledgers.lower or len(self._open) >= _MAX_OPEN:
            return None
        if self._ledgers.is_resting(Tier.REMOTE, Direction.LOAD):
            return None
        above = [ledger.held for tier, ledger in self._ledgers if tier < Tier.REMOTE]
        wanted = [key for key in keys if not any(key in held for held in above)]
        if not wanted:
            return None
        question = Question(LookupId(next(self._ids)), Tier.REMOTE, tuple(wanted))
        self._unasked.append(question)
        self._open[question.id] = question
        self._deadlines[question.id] = now + self._deadline_seconds
        return question.id

    def is_open(self, lookup_id: LookupId) -> bool:
        """Whether the answer is still worth waiting for."""
        return lookup_id in self._deadlines

    def take_questions(self) -> list[Question]:
        """Questions not yet put to REMOTE. Each must be settled exactly once."""
        questions, self._unasked = self._unasked, []
        return questions

    def settle(self, answer: Answer, now: float) -> None:
        """Enter an answer into REMOTE's ledger."""
        self._ledgers.now = now
        question = self._open.pop(answer.lookup_id)
        is_late = self._deadlines.pop(answer.lookup_id, None) is None
        self._ledgers.asked(question, answer, is_late=is_late)
        self._ledgers.learn(question.tier, question.keys[: len(answer.present)], answer.present)

    def tick(self) -> None:
        """Close lookups whose deadline has passed."""
        for lookup_id, deadline in list(self._deadlines.items()):
            if self._ledgers.now >= deadline:
                del self._deadlines[lookup_id]
                self._ledgers.fault(Tier.REMOTE, Direction.LOAD, "a lookup passed its deadline")
