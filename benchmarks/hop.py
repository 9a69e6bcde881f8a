"""One tier's lane alone: engine, mover and store, without books or device."""

from __future__ import annotations

from benchmarks.harness import fresh_keys, seconds_of, slots_up_to
from penstock.books.flights import cut
from penstock.clock import SystemClock
from penstock.config import TransferConfig
from penstock.stores.base import Store
from penstock.stores.host import HostArena
from penstock.transfer.engine import TransferEngine
from penstock.transfer.io import StoreMover
from penstock.transfer.lanes import LaneSpec
from penstock.transfer.seals import Seals
from penstock.types import Tier, Transfer, TransferId, Verdict


class Hop:
    """One hop, including checksums, headers or records, and verification."""

    def __init__(
        self,
        store: Store,
        host: HostArena,
        tier: Tier,
        num_threads: int,
        batch_bytes: int | None = None,
    ) -> None:
        self._store = store
        self._tier = tier
        seals = Seals(host)
        self.keys, self._slots = fresh_keys(host.num_slots, 0), slots_up_to(host.num_slots)
        seals.seal(self.keys, self._slots)
        mover = StoreMover(host, store, seals)
        self._spreads = batch_bytes is None
        batch_bytes = batch_bytes or TransferConfig().batch_bytes // 2
        self._step = max(1, batch_bytes // host.block_bytes)
        self._engine = TransferEngine({tier: LaneSpec(mover, num_threads)}, SystemClock())

    def __enter__(self) -> Hop:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self._store.close()

    def save(self) -> float:
        return seconds_of(lambda: self._run(Tier.HOST, self._tier))

    def load(self) -> float:
        return seconds_of(lambda: self._run(self._tier, Tier.HOST))

    def _run(self, source: Tier, target: Tier) -> None:
        spread = self._spreads and target is Tier.HOST  # as the books split loads
        parts = list(cut(len(self.keys), self._step, spread))
        for number, part in enumerate(parts):
            keys, slots = tuple(self.keys[part]), tuple(self._slots[part])
            parents = (None, *keys[:-1])  # like the blocks of a prompt
            transfer = Transfer(
                TransferId(number), source, target, keys, slots, slots, parents=parents
            )
            assert self._engine.submit(transfer)
        num_open = len(parts)
        while num_open:
            self._engine.wait(1.0)
            for outcome in self._engine.poll():
                assert set(outcome.verdicts) == {Verdict.OK}, outcome.error
                num_open -= 1
