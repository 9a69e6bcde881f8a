"""Saves the blocks of requests as they become complete."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.connectors.vllm.auditing import RequestAudits
from penstock.connectors.vllm.kv_events import BlockNews
from penstock.connectors.vllm.tracked import Tracked, TrackedRequests
from penstock.groups.kinds import Group
from penstock.tiers import Tiers
from penstock.types import Done, Slot


@dataclass(frozen=True, slots=True)
class RequestSaves:
    """Of groups with full attention. `RequestCheckpoints` saves the others."""

    offloader: Tiers
    requests: TrackedRequests
    may_save: bool
    news: BlockNews | None
    audits: RequestAudits

    def save_computed(self, tracked: Tracked) -> None:
        """Save the blocks that are complete after the step being ordered."""
        # If steps overlap, the token that the last step sampled is not known yet.
        self._save(tracked, min(tracked.num_computed, tracked.num_known))

    def save_rest(self, tracked: Tracked) -> None:
        """Save what a request leaves in its blocks. Its last position may hold a draft's KV."""
        self._save(tracked, min(tracked.num_computed, tracked.num_known - 1))

    def ended(self, done: Done) -> None:
        if self.news is not None and not done.ok:
            self.news.forget(done.keys)

    def _save(self, tracked: Tracked, num_tokens: int) -> None:
        if not self.may_save or tracked.keys is None:
            return
        for place, group in self.requests.full():
            num_full = min(num_tokens // group.block_tokens, len(tracked.tables[place]))
            if num_full > tracked.num_saved[place] and self.requests.is_named(tracked):
                self._save_blocks(tracked, place, group, num_full)

    def _save_blocks(self, tracked: Tracked, place: int, group: Group, end: int) -> None:
        start, tracked.num_saved[place] = tracked.num_saved[place], end
        keys = tracked.keys_of(group, range(start, end))
        slots = [Slot(block) for block in tracked.tables[place][start:end]]
        parents = {0: tracked.parent_key(group, start)}
        if self.news is not None:
            self.news.name(keys, start, tracked.request, group)
        if self.audits.is_busy:
            self.audits.computed(tracked, keys, slots)
            pairs = zip(keys, slots, [parents[0], *keys], strict=False)
            saved = [each for each in pairs if not self.audits.keeps_from_tiers(each[0])]
            parents = {at: parent for at, (_, _, parent) in enumerate(saved)}
            keys, slots = [key for key, _, _ in saved], [slot for _, slot, _ in saved]
        if keys:
            self.offloader.save(keys, slots, tenant=tracked.tenant, parents=parents)
