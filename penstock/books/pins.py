"""Pinned blocks of HOST: sequences whose KV is partly off the device read them in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from penstock.books.ledger import Ledger
from penstock.errors import BookError
from penstock.types import BlockKey, Slot


class Pins:
    """A pin is a lease that the client holds until it unpins the block."""

    def __init__(self, host: Ledger) -> None:
        self._host = host
        self._pins: Counter[Slot] = Counter()

    def __len__(self) -> int:
        """How many blocks are pinned."""
        return len(self._pins)

    @property
    def counts(self) -> Mapping[Slot, int]:
        """How often each slot is pinned."""
        return self._pins

    def pin(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        """Pin the blocks that are in HOST; returns each one's slot, or None if it is not there."""
        slots = self._host.use_ready(keys)
        self._pins.update(slot for slot in slots if slot is not None)
        return slots

    def keep(self, slot: Slot) -> None:
        """Turn an existing lease into a pin."""
        self._pins[slot] += 1

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Remove one pin from each slot."""
        for slot in slots:
            self._pins[slot] -= 1
            if self._pins[slot] < 0:
                raise BookError(f"slot {slot} of HOST is unpinned more often than pinned")
            if not self._pins[slot]:
                del self._pins[slot]
        self._host.release(slots)

    def clear(self) -> None:
        """Remove all pins."""
        self.unpin(list(self._pins.elements()))
