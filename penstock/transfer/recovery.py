"""Reads a store's index after a restart, in the background.

A thread scans; the owner of the books takes the results in small batches, so that loads are served
from the first batch on and no step is delayed for long.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from itertools import islice

from penstock.stores.base import Found, Store
from penstock.types import Slot, Tier

log = logging.getLogger(__name__)

_MAX_BATCHES_AHEAD = 16
_BATCH_SLOTS = 4096


class Recovery:
    """Returns every slot of the store exactly once, even if the scan fails."""

    def __init__(self, tier: Tier, store: Store, num_slots: int) -> None:
        self.tier = tier
        self.num_slots = num_slots
        self.num_taken = 0
        self._store = store
        self._batches: queue.Queue[list[Found]] = queue.Queue(_MAX_BATCHES_AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._scan, name="penstock-recovery", daemon=True)
        self._thread.start()

    @property
    def complete(self) -> bool:
        return self.num_taken >= self.num_slots

    def take(self, timeout_seconds: float = 0.0) -> list[Found] | None:
        """The next batch, or None if no more has been read yet."""
        try:
            batch = self._batches.get(timeout_seconds > 0, timeout_seconds or None)
        except queue.Empty:
            return None
        self.num_taken += len(batch)
        return batch

    def stop(self, timeout_seconds: float = 10.0) -> bool:
        """Stop the scan. False if it hangs: then the store must not be closed."""
        self._stopped.set()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _scan(self) -> None:
        num_read = 0
        try:
            for batch in self._store.scan():
                num_read += len(batch)
                if not self._give(batch):
                    return
        except Exception:
            log.exception("the scan of %s failed; blocks not read yet are lost", self.tier.name)
            for batch in _empty_batches(num_read, self.num_slots):
                if not self._give(batch):
                    return

    def _give(self, batch: list[Found]) -> bool:
        while not self._stopped.is_set():
            try:
                self._batches.put(batch, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False


def _empty_batches(start: int, end: int) -> Iterator[list[Found]]:
    slots = iter(range(start, end))
    while batch := list(islice(slots, _BATCH_SLOTS)):
        yield [(Slot(slot), None) for slot in batch]
