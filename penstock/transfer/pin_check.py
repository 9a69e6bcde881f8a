"""PinCheck: verifies blocks of HOST that are to be read in place, as a copy would verify them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from penstock.books.ledgers import all_ok
from penstock.books.stack import TierStack
from penstock.stores.host import HostArena
from penstock.transfer.seals import Seals
from penstock.types import BlockKey, Done, Slot, Tier, Verdict


class PinCheck:
    """Without seals (in the simulator) every block passes."""

    def __init__(self, stack: TierStack, seals: Seals | None, host: HostArena | None) -> None:
        self._stack = stack
        self._seals = seals
        self._host = host
        self._lost: Counter[Verdict] = Counter()

    def verify(self, keys: Sequence[BlockKey], slots: Sequence[Slot | None]) -> list[Slot | None]:
        """Unpin and drop blocks that fail verification; returns None in place of their slots."""
        if self._host is not None and self._host.num_for_device < self._host.num_slots:
            reach = self._host.num_for_device  # the device cannot address slots beyond it
            self._stack.pins.unpin([slot for slot in slots if slot is not None and slot >= reach])
            slots = [None if slot is not None and slot >= reach else slot for slot in slots]
        pairs = [(key, slot) for key, slot in zip(keys, slots, strict=True) if slot is not None]
        if self._seals is None or not pairs:
            return list(slots)
        verdicts = self._seals.verdicts([key for key, _ in pairs], [slot for _, slot in pairs])
        if all_ok(verdicts):
            return list(slots)
        bad = {slot: key for (key, slot), v in zip(pairs, verdicts, strict=True) if v}
        self._stack.pins.unpin([slot for _, slot in pairs if slot in bad])
        host = self._stack.host
        self._stack.ledgers.drop(Tier.HOST, [key for key in bad.values() if host.is_ready(key)])
        self._lost.update(verdict for verdict in verdicts if verdict)
        return [None if slot in bad else slot for slot in slots]

    def verify_done(self, done: Done) -> Done:
        """Verify the blocks that a load has pinned; those that fail become MISSING."""
        if not done.pins:
            return done
        pins = tuple(self.verify(done.keys, done.pins))
        lost = [new is None and old is not None for old, new in zip(done.pins, pins, strict=True)]
        verdicts = tuple(
            Verdict.MISSING if gone else verdict
            for gone, verdict in zip(lost, done.verdicts, strict=True)
        )
        return replace(done, pins=pins, verdicts=verdicts)

    def take_lost(self) -> Counter[Verdict]:
        """How many blocks failed since the last call, by verdict."""
        lost, self._lost = self._lost, Counter()
        return lost
