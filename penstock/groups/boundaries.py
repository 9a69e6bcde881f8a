"""Boundaries: at which lengths of a prompt a checkpoint is worth its bytes.

Full groups keep every block. A window, a chunk or a state needs a checkpoint for each length at
which a later prompt may continue, and each costs bytes. Some are always kept: where the prompt
ends, where a lookup found that other prompts branch off, and where the client says so. The others
are kept for a reason that has proved itself: `Boundaries` counts, per reason, how often the
checkpoints kept for it were used. What is unknown is tried now and then.

Pure, and without chance: the same calls give the same answers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.groups.kinds import Groups
from penstock.types import BlockKey

_EXPLORE_EVERY = 8  # of the prompts in which an unproved reason has a candidate, one tries it
_MEMORY = 64  # checkpoints of a reason after which an old one counts 1/e
_MIN_REUSE = 0.05  # hits per checkpoint; below it, keeping them is a waste
_MIN_SHARE = 0.25  # hits per byte, compared with those of all checkpoints
_TRUST = 1.0  # hits that an answer's end is credited with in advance: second turns come late
_MAX_TRACKED = 1 << 16  # checkpoints, about 10 MB


class Reason(StrEnum):
    """Why a checkpoint is kept."""

    PROMPT_END = "prompt_end"
    ANSWER_END = "answer_end"
    JUNCTION = "junction"  # other prompts share exactly this much
    HINT = "hint"  # the client asked for it
    FIRST_TURN = "first_turn"  # the end of a system prompt
    TURN = "turn"  # where a later turn or a tool message begins
    PERIODIC = "periodic"  # every so many tokens


SPECULATIVE = (Reason.FIRST_TURN, Reason.TURN, Reason.PERIODIC)
"""Reasons that share the budget."""


@dataclass(slots=True)
class _Record:
    """What became of the checkpoints kept for one reason. Older ones count less."""

    num_saved: float = 0.0
    num_hits: float = 0.0
    num_bytes: float = 0.0

    def saved(self, num_bytes: int) -> None:
        keep = 1 - 1 / _MEMORY
        self.num_saved = self.num_saved * keep + 1
        self.num_hits *= keep
        self.num_bytes = self.num_bytes * keep + num_bytes


class Boundaries:
    """Chooses boundaries for one model. Tell it what was saved, used and lost."""

    def __init__(
        self,
        groups: Groups,
        *,
        checkpoint_bytes: Callable[[int], int],
        budget_bytes: int,
        every_tokens: int | None = None,
    ) -> None:
        """`checkpoint_bytes` is the size of a checkpoint at a boundary.

        At most `budget_bytes` are kept for SPECULATIVE reasons, an equal share for each, not
        counting what other requests have planned and not saved yet. Without `every_tokens` there
        are no periodic checkpoints.
        """
        self._groups = groups
        self._checkpoint_bytes = checkpoint_bytes
        self._share_bytes = budget_bytes // len(SPECULATIVE)
        self._every_tokens = every_tokens
        self._records = {reason: _Record() for reason in Reason}
        self._num_tries: Counter[Reason] = Counter()  # prompts with a candidate for it
        self._tracked: OrderedDict[BlockKey, tuple[Reason, int]] = OrderedDict()
        self._held_bytes: Counter[Reason] = Counter()

    def plan(
        self,
        *,
        start: int,
        num_prompt: int,
        turns: Sequence[int] = (),
        junction: int | None = None,
        hinted: Sequence[int] = (),
    ) -> dict[int, Reason]:
        """The boundaries worth keeping while a prompt is computed from `start` on, in order.

        `turns` are the positions at which turns begin. `junction` is how much of the prompt the
        full groups were found to hold, if no checkpoint was there: other prompts share this much.
        All are rounded down to the next boundary.
        """
        if self._groups.all_full:
            return {}
        align, top = self._groups.align_tokens, self._groups.max_hit(num_prompt)

        def new(positions: Sequence[int]) -> list[int]:
            """The boundaries at these positions that are computed and not chosen yet."""
            rounded = dict.fromkeys(position // align * align for position in positions)
            return [at for at in rounded if start < at <= top and at not in chosen]

        chosen: dict[int, Reason] = {}
        # The most telling reason first: if two agree on a boundary, it learns.
        chosen.update(dict.fromkeys(new(hinted), Reason.HINT))
        if junction is not None:
            chosen.update(dict.fromkeys(new([junction]), Reason.JUNCTION))
        chosen.update(dict.fromkeys(new([top]), Reason.PROMPT_END))
        for reason, positions in (
            (Reason.FIRST_TURN, turns[:1]),
            (Reason.TURN, turns[1:]),
            (Reason.PERIODIC, self._periods(start, top)),
        ):
            chosen.update(dict.fromkeys(self._chosen(reason, new(positions)), reason))
        return dict(sorted(chosen.items()))

    def answer_end(self, *, start: int, num_computed: int) -> int | None:
        """The boundary to keep when an answer ends after `num_computed` tokens, if any.

        `start` is the last boundary that has been kept for this request.
        """
        align = self._groups.align_tokens
        at = num_computed // align * align
        if self._groups.all_full or at <= start:
            return None
        return at if self._is_chosen(Reason.ANSWER_END) else None

    def saved(self, key: BlockKey, reason: Reason, num_bytes: int) -> None:
        """A checkpoint was saved. `num_bytes` were new: windows overlap, and share blocks."""
        if key in self._tracked:
            self._tracked.move_to_end(key)
            return
        self._records[reason].saved(num_bytes)
        self._tracked[key] = (reason, num_bytes)
        self._held_bytes[reason] += num_bytes
        if len(self._tracked) > _MAX_TRACKED:
            self.gone(next(iter(self._tracked)))

    def hit(self, key: BlockKey) -> None:
        """A checkpoint was used. Others are ignored, for instance those of another instance."""
        if key in self._tracked:
            self._tracked.move_to_end(key)
            reason, _ = self._tracked[key]
            self._records[reason].num_hits += 1

    def gone(self, key: BlockKey) -> None:
        """A checkpoint was evicted or superseded."""
        if (tracked := self._tracked.pop(key, None)) is not None:
            reason, num_bytes = tracked
            self._held_bytes[reason] -= num_bytes

    def held_bytes(self, reason: Reason) -> int:
        """The bytes that are kept for a reason."""
        return self._held_bytes[reason]

    def reuse(self, reason: Reason) -> float:
        """How often a checkpoint kept for this reason is used, as far as is known."""
        record = self._records[reason]
        trust = _TRUST if reason is Reason.ANSWER_END else 0.0
        return (record.num_hits + trust) / (record.num_saved + 1)

    def _periods(self, start: int, top: int) -> list[int]:
        """Boundaries at even distances, wider if the budget does not allow for all of them."""
        if not self._every_tokens:
            return []
        align = self._groups.align_tokens
        step = max(align, self._every_tokens // align * align)
        room = self._room(Reason.PERIODIC)
        while True:
            positions = list(range((start // step + 1) * step, top, step))
            if not positions or sum(map(self._checkpoint_bytes, positions)) <= room:
                return positions
            step *= 2

    def _chosen(self, reason: Reason, candidates: list[int]) -> list[int]:
        """Those of the candidates that are worth it and within the budget."""
        if not candidates:
            return []
        proved = self._is_worth_it(reason)
        if not self._is_chosen(reason):
            return []
        if not proved:  # try one, and another the next time
            turn = self._num_tries[reason] // _EXPLORE_EVERY
            candidates = [candidates[turn % len(candidates)]]
        room = self._room(reason)
        chosen: list[int] = []
        for at in candidates:
            room -= self._checkpoint_bytes(at)
            if room < 0:
                break
            chosen.append(at)
        return chosen

    def _is_chosen(self, reason: Reason) -> bool:
        """Whether a reason has proved itself, or is tried now."""
        self._num_tries[reason] += 1
        return self._is_worth_it(reason) or self._num_tries[reason] % _EXPLORE_EVERY == 1

    def _is_worth_it(self, reason: Reason) -> bool:
        """Whether checkpoints kept for this reason are used, and about as much as the others."""
        reuse = self.reuse(reason)
        if reuse < _MIN_REUSE:
            return False
        record, all_records = self._records[reason], self._records.values()
        all_bytes = sum(each.num_bytes for each in all_records)
        if not record.num_bytes or not all_bytes:
            return True
        all_hits = sum(each.num_hits for each in all_records)
        per_byte = reuse * record.num_saved / record.num_bytes
        return per_byte >= _MIN_SHARE * all_hits / all_bytes

    def _room(self, reason: Reason) -> int:
        return self._share_bytes - self._held_bytes[reason]
