"""Which boundaries are worth a checkpoint. (A first form: the prompt's end.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

from penstock.groups.kinds import Groups
from penstock.types import BlockKey


class Reason(StrEnum):
    PROMPT_END = "prompt_end"
    ANSWER_END = "answer_end"
    JUNCTION = "junction"


class Boundaries:
    def __init__(
        self,
        groups: Groups,
        *,
        checkpoint_bytes: Callable[[int], int],
        budget_bytes: int,
        every_tokens: int | None,
    ) -> None:
        self._groups = groups

    def plan(
        self,
        *,
        start: int,
        num_prompt: int,
        turns: Sequence[int],
        junction: int | None,
        hinted: Sequence[int],
    ) -> dict[int, Reason]:
        found = {}
        end = self._groups.max_hit(num_prompt)
        if junction is not None and start < junction <= end:
            found[junction] = Reason.JUNCTION
        if end > start:
            found[end] = Reason.PROMPT_END
        return found

    def saved(self, key: BlockKey, reason: Reason, num_bytes: int) -> None: ...

    def hit(self, key: BlockKey) -> None: ...
