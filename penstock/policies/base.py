"""The contract between a ledger and the policy that orders its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.types import BlockKey


class Policy(Protocol):
    """Orders the READY blocks of one tier. Pure: no I/O, no clock, no randomness.

    The ledger calls `insert` when a block becomes READY, `touch` when it is used, and `forget`
    when it is dropped for another reason than eviction. Leased blocks stay in the order and are
    stepped over by `pick`.

    A prompt's blocks come and are used from its first to its last. None is of use without those
    before it: who uses a block has used them too, whether or not this tier was asked for them.
    """

    def __len__(self) -> int: ...

    def admit(self, key: BlockKey) -> bool:
        """Whether a block not held now is worth writing to this tier. Changes nothing."""
        ...

    def insert(self, key: BlockKey, parent: BlockKey | None = None) -> None:
        """`parent` is the block that this one follows in its prompt; None: nothing, or unknown."""
        ...

    def insert_all(self, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None]) -> None:
        """As `insert` of each in turn; for those who can do it faster."""
        for key, parent in zip(keys, parents, strict=True):
            self.insert(key, parent)

    def touch(self, key: BlockKey) -> None: ...

    def touch_all(self, keys: Sequence[BlockKey]) -> None:
        """As `touch` of each in turn; for those who can do it faster."""
        for key in keys:
            self.touch(key)

    def forget(self, key: BlockKey) -> None: ...

    def demote(self, key: BlockKey) -> None:
        """Somebody knows that a block will not be used again soon: let it go first."""
        ...

    def pick(self, num_victims: int, is_idle: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """Choose blocks to evict and take them out of the order.

        Returns exactly `num_victims` idle keys or, if there are fewer, an empty list; then no
        key has left the order, though the order itself may have aged.
        """
        ...
