"""Blocks that HOST is to let go first, because somebody knows that they will not be used soon."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ledger import Ledger
from penstock.retention import Retention
from penstock.types import BlockKey


class Demotions:
    """What somebody else has retained is left alone."""

    def __init__(self, host: Ledger, retention: Retention) -> None:
        self._host = host
        self._retention = retention
        self._coming: set[BlockKey] = set()  # on their way into HOST, or were when they were named

    def demote(self, keys: Sequence[BlockKey]) -> int:
        """Now, or when they arrive; returns how many that are. A chain loses its end first."""
        self._coming = set(filter(self._host.is_filling, self._coming))
        wanted = [key for key in keys if key in self._host and key not in self._retention]
        for key in wanted:
            self._host.demote(key)
            if self._host.is_filling(key):
                self._coming.add(key)
        return len(wanted)

    def arrived(self, keys: Sequence[BlockKey]) -> None:
        """These have become READY in HOST."""
        if self._coming:
            late = [key for key in keys if key in self._coming]
            self._coming.difference_update(late)
            self.demote(late)
