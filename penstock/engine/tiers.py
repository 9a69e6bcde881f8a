"""What the engine's scheduler needs from the tiers below the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.types import BlockKey, LookupId, Match, Slot, TicketId


class EngineTiers(Protocol):
    """The part of `Offloader` that the scheduler calls.

    `tenant` and `parents` have no defaults here, so that no caller can forget them.
    """

    def lookup(self, keys: Sequence[BlockKey]) -> LookupId | None: ...
    def is_looking_up(self, lookup_id: LookupId) -> bool: ...
    def match(self, keys: Sequence[BlockKey]) -> Match: ...
    def note(self, match: Match) -> None: ...
    def used(self, keys: Sequence[BlockKey], *, tenant: str) -> None: ...
    def load(
        self,
        keys: Sequence[BlockKey],
        into: Sequence[Slot | None],
        *,
        patience_seconds: float | None = None,
        tenant: str,
        parents: Mapping[int, BlockKey | None],
    ) -> TicketId: ...
    def save(
        self,
        keys: Sequence[BlockKey],
        source: Sequence[Slot],
        *,
        tenant: str,
        parents: Mapping[int, BlockKey | None],
    ) -> TicketId: ...
    def cancel(self, ticket: TicketId) -> None: ...
    def is_in_host(self, key: BlockKey) -> bool: ...
    def pin(self, keys: Sequence[BlockKey]) -> list[Slot | None]: ...
    def unpin(self, slots: Sequence[Slot]) -> None: ...
