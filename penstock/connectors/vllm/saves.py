"""Saves the blocks of requests as they become complete."""

from __future__ import annotations

from collections.abc import Callable

from penstock.connectors.vllm.kv_events import BlockNews
from penstock.connectors.vllm.tracked import Tracked, TrackedRequests
from penstock.offload import Offloader
from penstock.types import Done


class RequestSaves:
    def __init__(
        self,
        offloader: Offloader,
        requests: TrackedRequests,
        *,
        may_save: bool,
        news: BlockNews | None,
        wake: Callable[[], None],
    ) -> None:
        self._offloader = offloader
        self._requests = requests
        self._may_save = may_save
        self._news = news
        self._wake = wake

    def save_computed(self, tracked: Tracked) -> None:
        """Save the blocks that are complete after the step being ordered."""
        # If steps overlap, the token that the last step sampled is not known yet.
        self._save(tracked, min(tracked.num_computed, len(tracked.request.all_token_ids)))

    def save_rest(self, tracked: Tracked) -> None:
        """Save what a request leaves in its blocks. Its last position may hold a draft's KV."""
        self._save(tracked, min(tracked.num_computed, len(tracked.request.all_token_ids) - 1))

    def ended(self, done: Done) -> None:
        if self._news is not None and not done.ok:
            self._news.forget(done.keys)

    def _save(self, tracked: Tracked, num_tokens: int) -> None:
        block_tokens = self._requests.block_tokens
        if not self._may_save or not tracked.has_unsaved(num_tokens, block_tokens):
            return
        if not self._requests.is_named(tracked):
            return
        start = tracked.num_saved
        keys, slots = tracked.take_unsaved(num_tokens, block_tokens)
        if self._news is not None:
            self._news.name(keys, start, tracked.request, block_tokens)
        parents = {0: tracked.parent_key(start, block_tokens)}
        self._offloader.save(keys, slots, tenant=tracked.tenant, parents=parents)
        self._wake()
