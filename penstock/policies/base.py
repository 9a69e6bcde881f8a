"""The contract between a ledger and the policy that orders its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.types import BlockKey


class Policy(Protocol):
    """Orders the READY blocks of one tier. Pure: no I/O, no clock, no randomness.

    The ledger calls `insert` when a block becomes READY, `touch` when it is used, and `forget`
    when it is dropped for a reason other than eviction. Leased blocks stay in the order, and `pick`
    skips them.

    A prompt's blocks are inserted and used from first to last. A block is useless without those
    before it, so a use of a block implies a use of them, even if this tier was not asked for them.
    """

    def __len__(self) -> int: ...

    def admit(self, key: BlockKey) -> bool:
        """Whether a block that the tier lacks is worth writing to it. Changes nothing."""
        ...

    def insert(self, key: BlockKey, parent: BlockKey | None = None) -> None:
        """Add a block. `parent` is the block before it in its prompt, or None if unknown."""
        ...

    def insert_all(self, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None]) -> None:
        """Insert each in turn. Override it if that can be done faster."""
        for key, parent in zip(keys, parents, strict=True):
            self.insert(key, parent)

    def touch(self, key: BlockKey) -> None: ...

    def touch_all(self, keys: Sequence[BlockKey]) -> None:
        """Touch each in turn. Override it if that can be done faster."""
        for key in keys:
            self.touch(key)

    def forget(self, key: BlockKey) -> None: ...

    def demote(self, key: BlockKey) -> None:
        """Evict a block first, because it is known not to be used again soon."""
        ...

    def pick(self, num_victims: int, is_idle: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """Choose blocks to evict and remove them from the order.

        Returns exactly `num_victims` idle keys. If there are fewer, it returns an empty list and
        removes none, though the order itself may have aged.
        """
        ...
