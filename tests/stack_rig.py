"""A TierStack whose transfers the test settles by hand."""

from __future__ import annotations

from penstock.books.audit import audit
from penstock.books.ledger import Ledger
from penstock.books.stack import Limits, TierStack
from penstock.policies import LRU
from penstock.types import (
    BlockKey,
    Done,
    Outcome,
    Slot,
    Tier,
    Transfer,
    Verdict,
)

K = [BlockKey(bytes([i]) * 32) for i in range(12)]
OK = Verdict.OK


class Rig:
    """A stack whose transfers the test settles by hand."""

    def __init__(self, num_host: int = 4, num_disk: int = 8, limits: Limits | None = None) -> None:
        self.host = Ledger(num_host, LRU(num_host))
        self.disk = Ledger(num_disk, LRU(num_disk))
        limits = limits or Limits(64, 64)
        self.stack = TierStack(100, self.host, {Tier.DISK: self.disk}, limits)
        self.now = 0.0

    def transfers(self) -> list[Transfer]:
        return list(self.stack.next_transfers(lambda link, direction: True))

    def settle(self, transfer: Transfer, *verdicts: Verdict, error: str = "") -> None:
        all_of_them = verdicts or (OK,) * len(transfer.keys)
        if len(all_of_them) == 1:
            all_of_them *= len(transfer.keys)
        self.stack.settle(Outcome(transfer.id, all_of_them, 0.5, error), self.now)
        audit(self.stack)

    def run(self) -> list[Done]:
        """Carry out everything until nothing is left to do."""
        while transfers := self.transfers():
            for transfer in transfers:
                self.settle(transfer)
        return self.stack.tickets.take_dones()

    def save(self, *keys: BlockKey) -> None:
        self.stack.save(keys, slots(len(keys)), self.now)

    def load(self, *keys: BlockKey, deadline: float | None = None) -> None:
        self.stack.load(keys, slots(len(keys)), self.now, deadline)

    def events(self) -> list[object]:
        return list(self.stack.ledgers.take_events())


def slots(count: int) -> list[Slot]:
    return [Slot(i) for i in range(count)]
