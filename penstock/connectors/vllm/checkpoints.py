"""Saves checkpoints: the blocks of windows and states that a hit at a boundary needs.

Windows and states move on with a request, so their blocks exist for a while only. A checkpoint is
saved by the step that computes past its boundary, from the tables that vLLM has at that step; a
table kept from before may name a block that another request has got meanwhile.

Of a prompt the planned boundaries are kept. Of an answer the last one is, as far as it has come:
the one before it is given up, and lower tiers get none but the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.connectors.vllm.auditing import RequestAudits
from penstock.connectors.vllm.tracked import (
    NULL_BLOCK,
    Tables,
    Tracked,
    TrackedRequests,
)
from penstock.events import Event, Removed
from penstock.groups.boundaries import Boundaries, Reason
from penstock.groups.kinds import Group, Kind
from penstock.tiers import Tiers
from penstock.types import BlockKey, Done, Slot, TicketId, Tier

States = Mapping[tuple[int, int], int]
"""Blocks in which vLLM offers a state, by group and boundary."""


class _LastSave(NamedTuple):
    """The save of an answer's last checkpoint, which replaces the one before it once it is done."""

    tracked: Tracked
    old: tuple[BlockKey, ...]


@dataclass(slots=True)
class RequestCheckpoints:
    offloader: Tiers
    requests: TrackedRequests
    boundaries: Boundaries
    may_save: bool
    audits: RequestAudits
    # With drafts, vLLM's tables do not show which state is in which block: only offers do.
    has_drafts: bool = False
    # With drafts in a pipeline, stages before the last put an answer's states in their places only
    # when they compute the request again.
    states_lag: bool = False
    turns: Callable[[Tracked], Sequence[int]] = lambda _: ()
    _last_of: dict[TicketId, _LastSave] = field(default_factory=dict)  # under way

    def planned(self, tracked: Tracked, start: int) -> Iterable[int]:
        """The boundaries of a prompt at which checkpoints are kept."""
        if tracked.boundaries is None:
            tracked.boundaries = self.boundaries.plan(
                start=start,
                num_prompt=tracked.request.num_prompt_tokens,
                turns=self.turns(tracked),
                junction=tracked.junction,
                hinted=() if tracked.audited_tokens is None else (tracked.audited_tokens,),
            )
        return tracked.boundaries

    def admitted(self, tracked: Tracked, start: int) -> None:
        """A request will be computed from `start` on: plan its boundaries with what was found."""
        tracked.boundaries = None
        if self.may_save and tracked.keys is not None:
            self.planned(tracked, start)

    def save_computed(
        self,
        tracked: Tracked,
        before: int,
        tables: Callable[[str], Tables | None],
        states: States,
    ) -> None:
        """Save the checkpoints that the step being ordered makes possible.

        It computes from `before` tokens to `tracked.num_computed`.
        """
        known = min(tracked.num_computed, tracked.num_known)
        due = self._due(tracked, known)
        tracked.num_checked = max(tracked.num_checked, known)
        if not due or not self.may_save or not self.requests.is_named(tracked):
            return
        current = tables(tracked.request.request_id)
        if current is None:
            return
        exact = () if self.has_drafts else (before, tracked.num_computed)
        planned = tracked.boundaries or {}
        for boundary in due:
            if boundary in planned:
                self._save(tracked, boundary, current, states, exact)
        # Of an answer only the last counts. A request that resumes computes many of them at once.
        for boundary in reversed(due):
            if boundary not in planned and self._save(tracked, boundary, current, states, exact):
                break

    def save_last(self, tracked: Tracked, tables: Tables) -> None:
        """A request ends: its tokens are all known now, and so is its last boundary."""
        known = min(tracked.num_computed, tracked.num_known - 1)
        due = self._due(tracked, known)
        if due and self.may_save and self.requests.is_named(tracked):
            exact = () if self.has_drafts else (tracked.num_computed,)
            self._save(tracked, due[-1], tables, {}, exact)

    def finished(self, tracked: Tracked) -> None:
        """Write the checkpoint of a request's answer to the lower tiers too."""
        tracked.has_finished = True
        self._offer_last(tracked)

    def ended(self, done: Done) -> None:
        """A save has ended."""
        save = self._last_of.pop(done.ticket, None)
        if not done.ok:  # no room, or a block does not fit its codec: it is not kept
            self.boundaries.gone(done.keys[-1])
        if save is None:
            return
        tracked, old = save
        if not done.ok:  # the one before it stays the last
            if tracked.last_checkpoint == done.keys:
                tracked.last_checkpoint = old
        elif old and old != done.keys:  # the same one comes again after a preemption
            self.offloader.supersede(old)
            self.boundaries.gone(old[-1])
        if tracked.has_finished:
            self._offer_last(tracked)

    def used(self, tracked: Tracked, num_tokens: int) -> None:
        """A hit of so many tokens is loaded: learn that its checkpoint was worth its bytes."""
        keys = [
            key
            for group in self.requests.groups.partial
            for key in tracked.keys_of(group, group.needed(num_tokens))
        ]
        if keys:
            self.boundaries.hit(keys[-1])
            self.offloader.keep_together(keys)  # after a restart nobody else has said so

    def __call__(self, event: Event) -> None:
        """An observer: checkpoints that leave DRAM make room for others."""
        if isinstance(event, Removed) and event.tier is Tier.HOST:
            for key in event.keys:
                self.boundaries.gone(key)

    def _due(self, tracked: Tracked, known: int) -> list[int]:
        """The boundaries between those checked before and the tokens known now."""
        align = self.requests.groups.align_tokens
        start = tracked.num_checked
        end_of_prompt = self.requests.groups.max_hit(tracked.request.num_prompt_tokens)
        due = [one for one in sorted(tracked.boundaries or ()) if start < one <= known]
        first = max(start, end_of_prompt) // align * align + align
        due += [one for one in range(first, known + 1, align) if one not in due]
        return due

    def _save(
        self,
        tracked: Tracked,
        boundary: int,
        tables: Tables,
        states: States,
        exact: Sequence[int],
    ) -> bool:
        """Save the checkpoint at a boundary. False if one of its blocks is not there."""
        is_of_prompt = boundary <= tracked.request.num_prompt_tokens
        keys: list[BlockKey] = []
        slots: list[Slot] = []
        for place, group in enumerate(self.requests.groups):
            if group.kind is Kind.STATE and self.states_lag and not is_of_prompt:
                return False
            if group.is_full:
                continue
            blocks = group.needed(boundary)
            found = self._blocks(group, boundary, blocks, tables[place], states, exact)
            if found is None:
                return False  # a checkpoint without one of its blocks is worthless
            keys += tracked.keys_of(group, blocks)
            slots += found
        if not keys:
            return True  # at the border of a chunk nothing is needed
        self.audits.computed(tracked, keys, slots)
        if any(map(self.audits.keeps_from_tiers, keys)):
            return True  # it is stored already
        reason = (tracked.boundaries or {}).get(boundary)
        is_of_answer = reason is None
        ticket = self.offloader.save(
            keys,
            slots,
            tenant=tracked.tenant,
            whole=True,
            write_down=not is_of_answer,
        )
        self.offloader.keep_together(keys)
        num_bytes = len(keys) * self.requests.block_bytes
        self.boundaries.saved(keys[-1], reason or Reason.ANSWER_END, num_bytes)
        if is_of_answer:
            self._last_of[ticket] = _LastSave(tracked, tracked.last_checkpoint)
            tracked.last_checkpoint = tuple(keys)
        return True

    def _blocks(
        self,
        group: Group,
        boundary: int,
        blocks: range,
        table: Sequence[int],
        states: States,
        exact: Sequence[int],
    ) -> list[Slot] | None:
        """The blocks of one group that a checkpoint needs, or None if one is not there."""
        if group.kind is Kind.STATE:
            offered = states.get((group.index, boundary))
            if offered is not None:
                return [Slot(offered)]
            if boundary not in exact:
                return None  # the block may hold the state of another token
        if blocks.stop > len(table):
            return None
        found = [Slot(block) for block in table[blocks.start : blocks.stop]]
        return None if NULL_BLOCK in found else found

    def _offer_last(self, tracked: Tracked) -> None:
        """Only what has arrived in DRAM: a save under way is offered when it has ended."""
        keys = tracked.last_checkpoint
        if keys and tracked.keys is not None:
            no_parents = dict.fromkeys(range(len(keys)))
            self.offloader.offer(keys, tenant=tracked.tenant, parents=no_parents)
