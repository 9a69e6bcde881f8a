"""Finds device blocks for sequences, and moves blocks between the device and HOST while they run.

A complete block has been saved, so HOST has a copy. Leaving the device then costs nothing: the
block is pinned in HOST and read there from the next step on, and its device slot is free. Returning
is a copy that runs beside the computation; until it ends, the block is read from HOST.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.engine.admit import DeviceRoom
from penstock.engine.blocks import BlockPool
from penstock.engine.request import Request
from penstock.engine.residency import ResidencyPolicy
from penstock.engine.table import shared_places
from penstock.engine.tiers import EngineTiers
from penstock.errors import BookError
from penstock.events import Migrated
from penstock.types import BlockKey, Done, Slot, TicketId, Verdict

_MAX_UNFIT = 1 << 16  # keys that are remembered
_MAX_RETURNING = 64  # blocks returning at a time, so that other loads are not held up


class _Unsaved(NamedTuple):
    """A complete block that HOST has no copy of."""

    slot: Slot
    tenant: str
    parent: BlockKey | None


class Placement(DeviceRoom[Request]):
    def __init__(
        self,
        pool: BlockPool,
        residency: ResidencyPolicy | None = None,
        tiers: EngineTiers | None = None,
        on_returned: Callable[[Slot], None] = lambda slot: None,
    ) -> None:
        """Without a residency or without tiers, all blocks of a sequence are on the device.

        `on_returned` is called with each slot into which a block was copied from HOST.
        """
        super().__init__(pool)
        self._on_returned = on_returned
        self._tiers = tiers
        self._residency = residency if tiers is not None else None
        self._running: Collection[Request] = ()
        self._saving: dict[TicketId, list[Slot]] = {}
        self._being_saved: set[BlockKey] = set()
        # Blocks that do not fit HOST's codec. They stay on the device, and are not saved again.
        self._unfit: dict[BlockKey, None] = {}
        self._returning: dict[TicketId, dict[BlockKey, tuple[int, Slot]]] = {}
        self.num_left = 0  # blocks that left the device while in use
        self.num_returned = 0
        self._reported = (0, 0)  # num_left and num_returned at the last `take_migrated`

    @property
    def is_moving(self) -> bool:
        """Whether device blocks are held for saves or for blocks that return."""
        return bool(self._saving or self._returning)

    @property
    def num_cold(self) -> int:
        return sum(request.table.num_cold for request in self._running)

    def take_migrated(self) -> Migrated | None:
        """How many blocks have moved since the last call; None if none have."""
        moved = (self.num_left - self._reported[0], self.num_returned - self._reported[1])
        self._reported = (self.num_left, self.num_returned)
        return Migrated(*moved) if any(moved) else None

    def resident_shares(self) -> tuple[float, float]:
        """The share of KV on the device: the lowest of any running sequence, and overall."""
        tables = [request.table for request in self._running if len(request.table)]
        if not tables:
            return 1.0, 1.0
        lowest = min(table.num_resident / len(table) for table in tables)
        return lowest, sum(t.num_resident for t in tables) / sum(map(len, tables))

    def follow(self, running: Collection[Request]) -> None:
        """Set the sequences whose blocks may be moved. The collection is live."""
        self._running = running

    def may_be_cold(self, request: Request) -> bool:
        return self._residency is not None and self._residency.may_be_cold(request)

    # Room on the device.

    def take(self, count: int, request: Request) -> list[Slot] | None:
        """Hold device blocks. If needed, blocks in use leave for HOST."""
        count = max(0, count)
        slots = self._pool.take(count)
        if slots is None:
            self._leave(count - self._pool.num_available, request)
            slots = self._pool.take(count)
        return slots

    def can_wait(self) -> bool:
        """Whether a save is running, after which more blocks can leave the device."""
        return self._residency is not None and bool(self._saving)

    def arrange(
        self, request: Request, start: int, num_loads: int, slots: list[Slot]
    ) -> list[Slot | None] | None:
        keep = num_loads
        if self._residency is not None and self.may_be_cold(request):
            budget = self._residency.budget_blocks(request)
            if budget is not None:
                keep = min(keep, max(1, budget - start))
        more = self.take(keep - len(slots), request)
        if more is None and self.may_be_cold(request):
            more = self._pool.take(min(keep - len(slots), self._pool.num_available))
        if more is None:
            self._pool.release(slots)
            return None
        slots = slots + more
        num_cold = max(0, num_loads - len(slots))
        cold = self._cold_of_load(request, start, num_loads, num_cold)
        if cold is None:
            self._pool.release(slots)
            return None
        spare = len(slots) - (num_loads - num_cold)
        if spare:
            self._pool.release(slots[-spare:])
        source = iter(slots)
        return [None if index in cold else next(source) for index in range(num_loads)]

    def drop(self, request: Request) -> None:
        """Release all blocks of a sequence."""
        slots, pins = request.table.take_all()
        self._pool.release(slots)
        if pins:
            assert self._tiers is not None
            self._tiers.unpin(pins)

    def release_load(self, into: Sequence[Slot | None], pins: Sequence[Slot | None]) -> None:
        """Release blocks of a load that failed or are not needed."""
        self._pool.release([slot for slot in into if slot is not None])
        held = [pin for pin in pins if pin is not None]
        if held:
            assert self._tiers is not None
            self._tiers.unpin(held)

    # Saves.

    def save(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[Slot],
        *,
        tenant: str,
        parents: Mapping[int, BlockKey | None],
    ) -> None:
        """Copy complete blocks to HOST. They are held until the copy ends.

        `parents`: see `Offloader.save`.
        """
        if self._tiers is None or not keys:
            return
        self._pool.hold(slots)
        self._being_saved.update(keys)
        self._saving[self._tiers.save(keys, slots, tenant=tenant, parents=parents)] = list(slots)

    def settle(self, done: Done) -> bool:
        """Finish a save or a migration. False if it was neither, but a sequence's load."""
        if (saved := self._saving.pop(done.ticket, None)) is not None:
            self._pool.release(saved)
            self._being_saved.difference_update(done.keys)
            for key, verdict in zip(done.keys, done.verdicts, strict=True):
                if verdict is Verdict.UNFIT:
                    self._unfit[key] = None
            while len(self._unfit) > _MAX_UNFIT:
                del self._unfit[next(iter(self._unfit))]
            return True
        if (returning := self._returning.pop(done.ticket, None)) is not None:
            self._returned(done, returning)
            return True
        return False

    def distrust(self) -> None:
        """Use no block that is returning from HOST now."""
        for ticket, targets in self._returning.items():
            self._saving[ticket] = [slot for _, slot in targets.values()]  # only to be released
        self._returning = {}

    # Migration.

    def balance(self) -> None:
        """Make room above the high watermark; use room below the low one."""
        if self._residency is None:
            return
        num_used = self._pool.num_blocks - self._pool.num_available
        if leaving := self._residency.num_to_leave(num_used):
            self._leave(leaving, None)
        elif room := self._residency.num_to_return(num_used):
            flying = sum(map(len, self._returning.values()))
            if self.num_cold:
                self._return(min(room, _MAX_RETURNING - flying))

    def _leave(self, count: int, wanted_by: Request | None) -> None:
        """Let up to `count` blocks leave the device."""
        if self._residency is None or count <= 0:
            return
        running = list(self._running)
        if wanted_by is not None and wanted_by not in running and wanted_by.table:
            running.append(wanted_by)
        unsaved: dict[BlockKey, _Unsaved] = {}
        seen: set[Slot] = set()  # a shared block is offered once by each of its sequences

        def can_leave(request: Request, index: int) -> bool:
            assert self._tiers is not None
            key, slot = request.chain.keys[index], request.table.slot(index)
            if slot in seen:
                return False
            seen.add(slot)
            holders = self._holders(running, index, slot)
            if len(holders) < self._pool.num_holds(slot):
                return False  # a save or a load also holds it
            if self._residency is None or not all(map(self._residency.may_be_cold, holders)):
                return False
            if self._tiers.is_in_host(key):
                return True
            if key in self._unfit:
                return False
            if key not in self._being_saved and len(unsaved) < count:
                unsaved[key] = _Unsaved(slot, request.tenant, request.chain.key_before(index))
            return False

        victims = self._residency.victims(
            running,
            count,
            self.num_cold,
            lambda request, index: self._pool.num_holds(request.table.slot(index)) > 1,
            can_leave,
        )
        self._chill(running, victims)
        if len(victims) < count:  # HOST evicted some, or had no room for them
            self._save_again(unsaved)

    def _save_again(self, unsaved: Mapping[BlockKey, _Unsaved]) -> None:
        """Save each block for its own tenant: it counts against that tenant's budget."""
        for tenant in dict.fromkeys(block.tenant for block in unsaved.values()):
            mine = {key: block for key, block in unsaved.items() if block.tenant == tenant}
            parents = {position: block.parent for position, block in enumerate(mine.values())}
            slots = [block.slot for block in mine.values()]
            self.save(list(mine), slots, tenant=tenant, parents=parents)

    def _chill(self, running: Sequence[Request], victims: Sequence[tuple[Request, int]]) -> None:
        """Read these blocks in HOST. They are pinned by one call, which may cross to a node."""
        if not victims:
            return
        assert self._tiers is not None
        holders = [
            self._holders(running, index, request.table.slot(index)) for request, index in victims
        ]
        keys = [
            request.chain.keys[index]
            for (request, index), each in zip(victims, holders, strict=True)
            for _ in each
        ]
        pins = iter(self._tiers.pin(keys))
        for (_, index), each in zip(victims, holders, strict=True):
            held = [pin for _, pin in zip(each, pins, strict=False) if pin is not None]
            if len(held) < len(each):  # HOST's copy did not match its seal
                self._tiers.unpin(held)
                continue
            for holder, pin in zip(each, held, strict=True):
                self._pool.release([holder.table.chill(index, pin)])
            self.num_left += 1

    def _return(self, count: int) -> None:
        assert self._tiers is not None
        assert self._residency is not None
        seen = {key for keys in self._returning.values() for key in keys}
        wanted: dict[str, dict[BlockKey, tuple[int, Slot]]] = {}  # by tenant
        parent_of: dict[BlockKey, BlockKey | None] = {}
        shared = shared_places([request.table for request in self._running])
        for request, index in self._residency.returning(
            self._running, count, lambda r, i: int(r.table.places[i]) in shared
        ):
            key = request.chain.keys[index]
            if key in seen:
                continue
            seen.add(key)
            if found := self._pool.share([key]):  # it left recently and has not been overwritten
                self._warm(index, key, found[0])
            elif taken := self._pool.take(1):
                wanted.setdefault(request.tenant, {})[key] = (index, taken[0])
                parent_of[key] = request.chain.key_before(index)
        for tenant, targets in wanted.items():
            slots = [slot for _, slot in targets.values()]
            parents = {position: parent_of[key] for position, key in enumerate(targets)}
            ticket = self._tiers.load(list(targets), slots, tenant=tenant, parents=parents)
            self._returning[ticket] = targets

    def _returned(self, done: Done, targets: dict[BlockKey, tuple[int, Slot]]) -> None:
        for key, verdict in zip(done.keys, done.verdicts, strict=True):
            index, slot = targets[key]
            if verdict is Verdict.OK:
                self._pool.name(slot, key)
                self._on_returned(slot)
                self._warm(index, key, slot)
            else:
                self._pool.release([slot])

    def _warm(self, index: int, key: BlockKey, slot: Slot) -> None:
        """All sequences that read this block from HOST now read it from `slot`."""
        assert self._tiers is not None
        for request in self._running:
            table = request.table
            is_cold = len(table) > index and table.places[index] < 0
            if is_cold and request.chain.keys[index] == key:
                self._pool.hold([slot])
                self._tiers.unpin([table.warm(index, slot)])
        self._pool.release([slot])
        self.num_returned += 1

    def _cold_of_load(
        self, request: Request, start: int, num_loads: int, num_cold: int
    ) -> Collection[int] | None:
        """Which blocks of a load stay in HOST, counted from `start`; None if too many would."""
        if not num_cold:
            return ()
        assert self._residency is not None
        if not self._residency.admits(num_cold, self.num_cold, bool(self._running)):
            return None
        zones = self._residency.zones(request)
        order = [
            *range(max(zones.prefix_end, start), start + num_loads),
            *reversed(range(start, min(zones.prefix_end, start + num_loads))),
        ]
        return {index - start for index in order[:num_cold]}

    @staticmethod
    def _holders(running: Sequence[Request], index: int, slot: Slot) -> list[Request]:
        """The sequences that use a slot. A shared block has the same index in all of them."""
        return [r for r in running if len(r.table) > index and r.table.places[index] == slot]

    def check(self) -> None:
        for request in self._running:
            cold = request.table.cold()
            if cold and cold[-1] >= request.num_named:
                raise BookError("an incomplete block is cold")
