"""One request as the scheduler's side follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.connectors.vllm.identity import RequestKeys, tenant_of
from penstock.costs.choose import LoadChoice
from penstock.hints import NO_HINTS, Hints
from penstock.types import BlockKey, LookupId, Match, Slot, TicketId, Tier


@dataclass(frozen=True, slots=True)
class Offer:
    """What the last lookup promised: from block `start` on, so many can be loaded."""

    start: int
    match: Match
    num_tokens: int
    choice: LoadChoice
    at: float


@dataclass(slots=True)
class Loading:
    """A load under way, and how much of it the workers have not been told."""

    request_id: str
    ticket: TicketId
    start: int  # its first block's place in the request
    slots: tuple[Slot, ...]
    num_untold: int
    slowest: Tier
    num_bytes: int
    started: float


@dataclass(slots=True)
class Tracked:
    request: Any
    keys: RequestKeys | None  # None: its KV cannot be named, and is left alone
    hints: Hints = NO_HINTS
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose KV the steps ordered so far compute
    num_saved: int = 0  # leading blocks that need no further save
    offer: Offer | None = None
    loading: Loading | None = None  # the one that it waits for
    num_found: int | None = None  # leading blocks that were there when it was first let in
    has_looked_up: bool = False
    lookup: LookupId | None = None  # an answer of the tier that instances share, awaited
    barred_until: float = 0.0  # a load failed: computing cannot fail in the same way again
    tokens_from: dict[Tier, int] = field(default_factory=dict)

    @property
    def tenant(self) -> str:
        return "" if self.keys is None else tenant_of(self.request)

    def key_before(self, index: int, block_tokens: int) -> BlockKey | None:
        """Of the block that the one at `index` follows."""
        if self.keys is None or not index:
            return None
        return self.keys.first(index * block_tokens)[-1]

    def has_unsaved(self, num_tokens: int, block_tokens: int) -> bool:
        num_full = min(num_tokens // block_tokens, len(self.block_ids))
        return self.keys is not None and num_full > self.num_saved

    def unsaved(
        self, num_tokens: int, block_tokens: int
    ) -> tuple[Sequence[BlockKey], Sequence[Slot]]:
        """Keys and blocks that are complete with `num_tokens`; from now on they count as saved."""
        num_full = min(num_tokens // block_tokens, len(self.block_ids))
        start = self.num_saved
        if self.keys is None or num_full <= start:
            return (), ()
        self.num_saved = num_full
        keys = self.keys.first(num_full * block_tokens)
        return keys[start:], [Slot(block) for block in self.block_ids[start:num_full]]
