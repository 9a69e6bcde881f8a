"""Questions to a tier that others write to: which of these blocks do you hold?

Its book is only what this instance believes. A request's blocks are asked for once, when it comes;
the answer is entered into the book, where a match then finds it. Whoever waits for an answer waits
no longer than its deadline; one that comes later is entered all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from penstock.books.ledgers import Ledgers
from penstock.types import Answer, BlockKey, Direction, LookupId, Question, Tier

_MAX_OPEN = 256


class Lookups:
    def __init__(self, ledgers: Ledgers, tier: Tier, deadline_seconds: float) -> None:
        self._ledgers = ledgers
        self._tier = tier
        self._deadline_seconds = deadline_seconds
        self._ids = count(1)
        self._unasked: list[Question] = []
        self._open: dict[LookupId, Question] = {}
        self._deadlines: dict[LookupId, float] = {}  # of those that somebody may wait for

    def __len__(self) -> int:
        """Answers that somebody may wait for."""
        return len(self._deadlines)

    def ask(self, keys: Sequence[BlockKey]) -> LookupId | None:
        """Ask for what no tier above holds; None where there is nothing or nobody to ask."""
        if self._ledgers.is_resting(self._tier, Direction.LOAD) or len(self._open) >= _MAX_OPEN:
            return None
        above = [ledger.held for tier, ledger in self._ledgers if tier < self._tier]
        wanted = [key for key in keys if not any(key in held for held in above)]
        if not wanted:
            return None
        question = Question(LookupId(next(self._ids)), self._tier, tuple(wanted))
        self._unasked.append(question)
        self._open[question.id] = question
        self._deadlines[question.id] = self._ledgers.now + self._deadline_seconds
        return question.id

    def is_open(self, lookup_id: LookupId) -> bool:
        return lookup_id in self._deadlines

    def take_questions(self) -> list[Question]:
        questions, self._unasked = self._unasked, []
        return questions

    def settle(self, answer: Answer) -> None:
        question = self._open.pop(answer.lookup_id)
        is_late = self._deadlines.pop(answer.lookup_id, None) is None
        self._ledgers.asked(question, answer, is_late=is_late)
        self._ledgers.learn(question.tier, question.keys[: len(answer.present)], answer.present)

    def tick(self) -> None:
        """Let nobody wait past a deadline."""
        for lookup_id, deadline in list(self._deadlines.items()):
            if self._ledgers.now >= deadline:
                del self._deadlines[lookup_id]
                self._ledgers.fault(self._tier, Direction.LOAD, "a lookup passed its deadline")
