"""The contract between a ledger and the policy that orders its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.types import BlockKey


class Policy(Protocol):
    """Orders the READY blocks of one tier. Pure: no I/O, no clock, no randomness.

    The ledger calls `insert` when a block becomes READY, `touch` when it is used, and `forget`
    when it is dropped for another reason than eviction. Leased blocks stay in the order and are
    stepped over by `pick`.
    """

    def __len__(self) -> int: ...

    def admit(self, key: BlockKey) -> bool:
        """Whether a block not held now is worth writing to this tier. Changes nothing."""
        ...

    def insert(self, key: BlockKey) -> None: ...

    def touch(self, key: BlockKey) -> None: ...

    def forget(self, key: BlockKey) -> None: ...

    def pick(self, num_victims: int, is_idle: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """Choose blocks to evict and take them out of the order.

        Returns exactly `num_victims` idle keys or, if there are fewer, an empty list; then no
        key has left the order, though the order itself may have aged.
        """
        ...
