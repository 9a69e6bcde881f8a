"""The requests that the scheduler's side follows, and the keys that name their KV."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.books.sessions import Sessions
from penstock.connectors.vllm.identity import Naming, RequestKeys, tenant_of
from penstock.connectors.vllm.request_hints import TransferParamHints
from penstock.costs.choose import LoadChoice
from penstock.hints import NO_HINTS, Hints
from penstock.keys import Namespace
from penstock.types import BlockKey, LookupId, Match, Slot, TicketId, Tier


@dataclass(frozen=True, slots=True)
class Offer:
    """The last lookup's answer: `num_tokens` can be loaded, starting at block `start`."""

    start: int
    match: Match
    num_tokens: int
    choice: LoadChoice
    at: float


@dataclass(slots=True)
class Loading:
    """A load under way, and how many of its blocks have not been ordered from the workers yet."""

    request_id: str
    ticket: TicketId
    start: int  # position of its first block in the request
    slots: tuple[Slot, ...]
    num_unordered: int
    slowest: Tier
    num_bytes: int
    started: float


@dataclass(slots=True)
class Tracked:
    request: Any
    keys: RequestKeys | None  # None if its KV cannot be named: it is neither loaded nor saved
    hints: Hints = NO_HINTS
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose KV is computed by the steps so far
    num_saved: int = 0  # leading blocks that need no further save
    offer: Offer | None = None
    loading: Loading | None = None  # the load that the request waits for
    num_found: int | None = None  # leading blocks in the cache when it was first admitted
    has_looked_up: bool = False
    lookup: LookupId | None = None  # a question to the remote tier, not answered yet
    barred_until: float = 0.0  # after a failed load: compute, which cannot fail the same way
    tokens_from: dict[Tier, int] = field(default_factory=dict)

    @property
    def tenant(self) -> str:
        return "" if self.keys is None else tenant_of(self.request)

    def prompt_keys(self) -> list[BlockKey]:
        """The keys of all full blocks of the tokens known so far."""
        assert self.keys is not None
        return self.keys.first(self.request.num_tokens)

    def parent_key(self, index: int, block_tokens: int) -> BlockKey | None:
        """The key of the block before the one at `index`."""
        if self.keys is None or not index:
            return None
        return self.keys.first(index * block_tokens)[-1]

    def has_unsaved(self, num_tokens: int, block_tokens: int) -> bool:
        num_full = min(num_tokens // block_tokens, len(self.block_ids))
        return self.keys is not None and num_full > self.num_saved

    def take_unsaved(
        self, num_tokens: int, block_tokens: int
    ) -> tuple[Sequence[BlockKey], Sequence[Slot]]:
        """Keys and slots of unsaved blocks within `num_tokens`; they count as saved from now on."""
        assert self.keys is not None
        num_full = min(num_tokens // block_tokens, len(self.block_ids))
        start, self.num_saved = self.num_saved, num_full
        keys = self.keys.first(num_full * block_tokens)
        return keys[start:], [Slot(block) for block in self.block_ids[start:num_full]]


class TrackedRequests(dict[str, Tracked]):
    """The requests by id, from vLLM's first lookup of one until it has finished."""

    def __init__(self, namespace: Namespace, naming: Naming, sessions: Sessions) -> None:
        super().__init__()
        self.block_tokens = namespace.block_tokens
        self.namespace = namespace
        self.naming = naming
        self._hints = TransferParamHints()
        self._sessions = sessions

    def track(self, request: Any) -> Tracked:
        tracked = self.get(request.request_id)
        if tracked is None:
            keys = self.naming.keys(self.namespace, request)
            hints = self._hints.of(request)
            tracked = self[request.request_id] = Tracked(request, keys, hints)
            self._sessions.began(hints, tracked.tenant)
        return tracked

    def apply_hints(self, tracked: Tracked) -> None:
        """Do what a finished request's hints ask for its blocks."""
        if tracked.keys is not None and tracked.hints is not NO_HINTS:
            keys = tracked.keys.first(tracked.num_saved * self.block_tokens)
            num_found = min(tracked.num_found or 0, len(keys))
            self._sessions.ended(tracked.hints, keys, num_found, tracked.tenant)

    def is_named(self, tracked: Tracked) -> bool:
        """Whether its keys still name its KV. An adapter's files may change while it runs."""
        if tracked.keys is not None and not self.naming.holds(tracked.keys):
            tracked.keys = tracked.offer = None
        return tracked.keys is not None

    def rename_all(self) -> None:
        """Use a new namespace for this run only; requests under way are not saved any more."""
        self.namespace = replace(self.namespace, tenant=f"reset {time.time_ns()}")
        self._sessions.clear()
        for tracked in self.values():
            tracked.keys = tracked.offer = None
