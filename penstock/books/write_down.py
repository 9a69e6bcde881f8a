"""WriteDown: copies blocks from HOST to the lower tiers, after the save itself is done.

A queued block is leased in HOST until its copy ends, so that it cannot be evicted first. But slow
or hanging tiers may lease only half of HOST this way. Further blocks wait without a lease, and are
written later unless HOST evicts them before.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.books.flights import Flights
from penstock.books.ledgers import Ledgers
from penstock.books.write_gate import WriteGate
from penstock.errors import BookError
from penstock.types import BlockKey, Direction, Slot, Tier, Transfer, Verdict


class _Queued(NamedTuple):
    slot: Slot
    tenant: str
    parent: BlockKey | None


class WriteDown:
    def __init__(
        self,
        ledgers: Ledgers,
        flights: Flights,
        tiers: Iterable[Tier],
        max_pending_blocks: int,
        gates: Mapping[Tier, WriteGate] | None = None,
    ) -> None:
        self.tiers = list(tiers)
        self._ledgers = ledgers
        self._flights = flights
        self._gates = gates or {}
        # Whether a tier must know about every use, even of blocks that are not moved.
        self.counts_uses = any(
            tier in self._gates and self._gates[tier].from_second_use for tier in self.tiers
        )
        self._max_pending_blocks = max_pending_blocks
        self._queued: dict[Tier, OrderedDict[BlockKey, _Queued]] = {
            tier: OrderedDict() for tier in self.tiers
        }
        self._later: dict[Tier, OrderedDict[BlockKey, tuple[str, BlockKey | None]]] = {
            tier: OrderedDict() for tier in self.tiers
        }
        self._num_flying = dict.fromkeys(self.tiers, 0)
        ledgers.on_host_removed.append(self._forget)

    @property
    def _max_leased(self) -> int:
        most = self._ledgers.host.capacity // (2 * max(1, len(self.tiers)))
        return max(1, min(most, self._max_pending_blocks))

    def offer(
        self, keys: Sequence[BlockKey], tenant: str = "", parents: Sequence[BlockKey | None] = ()
    ) -> None:
        """Queue READY blocks of HOST for every lower tier that lacks and accepts them.

        `parents` names each block's parent in its prompt, where it is known.
        """
        parent_of = dict(zip(keys, parents, strict=False))
        for tier in self.tiers:
            ledger, queued, later = self._ledgers.lower[tier], self._queued[tier], self._later[tier]
            wanted = [
                key
                for key in keys
                if not (key in ledger or key in queued or key in later) and ledger.admits(key)
            ]
            wanted = self._let_through(tier, wanted, tenant)
            room = self._room(tier)
            now = wanted[:room]
            leased = zip(now, self._ledgers.host.lease(now), strict=True)
            queued.update((key, _Queued(slot, tenant, parent_of.get(key))) for key, slot in leased)
            later.update((key, (tenant, parent_of.get(key))) for key in wanted[room:])

    @property
    def is_waiting(self) -> bool:
        """Whether there is a block to write, even if its tier has no slot for it."""
        return any(self._queued.values()) or any(self._later.values())

    def can_plan(self, tier: Tier) -> bool:
        """Whether there is a block to write and a slot to write it to."""
        later = self._later[tier] and self._room(tier)
        return bool(self._queued[tier] or later) and self._ledgers.lower[tier].num_claimable > 0

    def plan(self, tier: Tier) -> None:
        """Post one transfer. Call it only if `can_plan`."""
        queued, later = self._queued[tier], self._later[tier]
        max_blocks = self._flights.max_blocks(tier)
        num_more = min(len(later), max_blocks - len(queued), self._room(tier))
        for _ in range(num_more):
            key, (tenant, previous) = later.popitem(last=False)
            (slot,) = self._ledgers.host.lease([key])
            queued[key] = _Queued(slot, tenant, previous)
        num_blocks = min(len(queued), self._ledgers.lower[tier].num_claimable, max_blocks)
        batch = [queued.popitem(last=False) for _ in range(num_blocks)]
        # A lookup may have shown meanwhile that another instance wrote it.
        again = [entry for key, entry in batch if key in self._ledgers.lower[tier]]
        self._ledgers.host.release([entry.slot for entry in again])
        batch = [(key, entry) for key, entry in batch if key not in self._ledgers.lower[tier]]
        keys = [key for key, _ in batch]
        tenants = [entry.tenant for _, entry in batch]
        parents = [entry.parent for _, entry in batch]
        slots = self._ledgers.claim(tier, keys, parents)
        self._num_flying[tier] += len(batch)
        self._flights.post(
            Tier.HOST,
            tier,
            keys,
            [entry.slot for _, entry in batch],
            slots,
            tenants=tenants if any(tenants) else (),
            parents=parents,
        )

    def settle(self, transfer: Transfer, verdicts: Sequence[Verdict]) -> None:
        """Settle a copy from HOST to a lower tier."""
        self._num_flying[transfer.target] -= len(transfer.keys)
        self._ledgers.host.release(transfer.source_slots)
        self._ledgers.conclude(transfer.target, transfer.keys, verdicts)

    def leased_slots(self) -> list[Slot]:
        """HOST slots of the queued blocks, for the audit."""
        return [entry.slot for queued in self._queued.values() for entry in queued.values()]

    def check(self) -> None:
        """Raise BookError if the queues do not add up."""
        for tier, later in self._later.items():
            if not all(map(self._ledgers.host.is_ready, later)):
                raise BookError(f"a block that waits to be written to {tier.name} is not in HOST")
            flying = (f.transfer.keys for f in self._flights if f.transfer.target is tier)
            if sum(map(len, flying)) != self._num_flying[tier]:
                raise BookError(f"the blocks being written to {tier.name} are miscounted")

    def _let_through(self, tier: Tier, keys: list[BlockKey], tenant: str) -> list[BlockKey]:
        gate = self._gates.get(tier)
        if gate is None:
            return keys
        now = self._ledgers.now
        passed: list[BlockKey] = []
        refusals: Counter[str] = Counter()
        for key in keys:
            if not gate.is_worth_it(key):
                continue
            if refusal := gate.refusal(tenant, now):
                refusals[refusal] += 1
            else:
                gate.charge(tenant, now)
                passed.append(key)
        for refusal, num_blocks in refusals.items():
            self._ledgers.lose(Tier.HOST, tier, Verdict.DROPPED, num_blocks, refusal)
        return passed

    def _room(self, tier: Tier) -> int:
        """How many more blocks may be leased for copies to this tier."""
        if self._ledgers.is_resting(tier, Direction.SAVE):
            return 0
        return max(0, self._max_leased - len(self._queued[tier]) - self._num_flying[tier])

    def _forget(self, keys: Sequence[BlockKey]) -> None:
        """Forget blocks that HOST has evicted or dropped before they were written."""
        for tier, later in self._later.items():
            lost = [key for key in keys if key in later]
            for key in lost:
                del later[key]
            if lost:
                self._ledgers.lose(
                    Tier.HOST, tier, Verdict.DROPPED, len(lost), "the tier could not keep up"
                )
