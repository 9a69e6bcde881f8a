"""Saves the blocks of requests as they become complete."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.connectors.vllm.kv_events import BlockNews
from penstock.connectors.vllm.tracked import Tracked, TrackedRequests
from penstock.offload import Offloader
from penstock.types import Done


@dataclass(frozen=True, slots=True)
class RequestSaves:
    offloader: Offloader
    requests: TrackedRequests
    may_save: bool
    news: BlockNews | None

    def save_computed(self, tracked: Tracked) -> None:
        """Save the blocks that are complete after the step being ordered."""
        # If steps overlap, the token that the last step sampled is not known yet.
        self._save(tracked, min(tracked.num_computed, len(tracked.request.all_token_ids)))

    def save_rest(self, tracked: Tracked) -> None:
        """Save what a request leaves in its blocks. Its last position may hold a draft's KV."""
        self._save(tracked, min(tracked.num_computed, len(tracked.request.all_token_ids) - 1))

    def ended(self, done: Done) -> None:
        if self.news is not None and not done.ok:
            self.news.forget(done.keys)

    def _save(self, tracked: Tracked, num_tokens: int) -> None:
        block_tokens = self.requests.block_tokens
        if not self.may_save or not tracked.has_unsaved(num_tokens, block_tokens):
            return
        if not self.requests.is_named(tracked):
            return
        start = tracked.num_saved
        keys, slots = tracked.take_unsaved(num_tokens, block_tokens)
        if self.news is not None:
            self.news.name(keys, start, tracked.request, block_tokens)
        parents = {0: tracked.parent_key(start, block_tokens)}
        self.offloader.save(keys, slots, tenant=tracked.tenant, parents=parents)
