"""TierStack: the books of all tiers together. It plans hops and settles their outcomes.

    save:  DEVICE ─► HOST ─► DISK, REMOTE   the second hop follows by itself, behind the request
    load:  DISK, REMOTE ─► HOST ─► DEVICE   what was loaded from below stays in HOST, if it is used

Pure: no I/O, no threads, no clock; time is an argument. `loads`, `saves`, `write_down`, `pins` and
`looks` do its work. Rules all of them live by:

- A hop holds a lease on its source slots and a claim on its target slots until it is settled, so
  nothing is freed or overwritten under a running copy, whatever becomes of the request.
- A failed hop aborts its claims; a block that a tier could not give is dropped from that tier's
  book, so that it can be stored again. The cache may lose; it may not lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.books.flights import Flights, HasRoom
from penstock.books.ledger import Ledger
from penstock.books.ledgers import Ledgers
from penstock.books.loads import Loads
from penstock.books.lookups import Lookups
from penstock.books.pins import Pins
from penstock.books.retention import Demotions, Retention
from penstock.books.saves import Saves
from penstock.books.tickets import Ticket, Tickets
from penstock.books.write_down import WriteDown
from penstock.books.write_gate import WriteGate
from penstock.errors import BookError
from penstock.events import Event, Retained, TierUsage
from penstock.types import (
    NO_PARENTS,
    Answer,
    BlockKey,
    Direction,
    Done,
    LookupId,
    Match,
    Outcome,
    Question,
    Run,
    Slot,
    TicketId,
    Tier,
    Transfer,
    TransferId,
    Verdict,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the books' queues."""

    max_host_blocks: int = 16  # of one transfer between DEVICE and HOST
    max_lower_blocks: int = 8  # of one transfer to or from a lower tier: loads wait for its end
    max_remote_blocks: int | None = None  # where REMOTE likes more, or less, than the others
    # Blocks planned at a time, so that a long ticket's first copies run while its rest is planned.
    max_planned_blocks: int = 256
    # Cut what crosses HOST's link into parts for several threads; where a GPU copies, one is best.
    spread_host: bool = True
    max_pending_loads: int = 1024  # tickets
    max_pending_saves: int = 1024  # blocks on their way into HOST
    lookup_deadline_seconds: float = 0.25  # for which an answer of REMOTE is waited for
    retain_share: float = 0.25  # of HOST, which hints may keep from being evicted


_Held = Container[BlockKey]


class TierStack:
    def __init__(
        self,
        block_bytes: int,
        host: Ledger,
        lower: Mapping[Tier, Ledger] | None = None,
        limits: Limits | None = None,
        *,
        read_only: frozenset[Tier] = frozenset(),
        gates: Mapping[Tier, WriteGate] | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._ledgers = Ledgers(block_bytes, host, lower or {})
        self._host = host
        self._flights = Flights(
            self._limits.max_host_blocks,
            self._limits.max_lower_blocks,
            self._limits.max_remote_blocks,
            spread_host=self._limits.spread_host,
        )
        self._write_down = WriteDown(
            self._ledgers,
            self._flights,
            [tier for tier in self._ledgers.lower if tier not in read_only],
            self._limits.max_pending_saves,
            gates,
        )
        self._tickets = Tickets()
        self._pins = Pins(host)
        self._retention = Retention(host, self._limits.retain_share)
        self._demotions = Demotions(host, self._retention)
        self._ledgers.on_host_stored += [self._retention.arrived, self._demotions.arrived]
        self._ledgers.on_host_removed.append(self._retention.removed)
        self._loads = Loads(
            self._ledgers, self._flights, self._tickets, self._write_down, self._pins
        )
        self._saves = Saves(
            self._ledgers,
            self._flights,
            self._write_down,
            self._loads.arrive,
            self._limits.max_pending_saves,
        )
        self._lookups: Lookups | None = None
        if Tier.REMOTE in self._ledgers.lower:
            self._lookups = Lookups(
                self._ledgers, Tier.REMOTE, self._limits.lookup_deadline_seconds
            )
        self._cancels: list[TransferId] = []
        self._usage: dict[Tier, TierUsage] = {}
        self._retained: Retained | None = None  # as it was last told

    # What a host asks for.

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """How many leading blocks could be loaded, and from where. Changes nothing."""
        tiers: list[tuple[Tier, _Held, tuple[_Held, ...]]] = []
        faster: tuple[_Held, ...] = ()
        for tier, ledger in [(Tier.HOST, self._host), *self._ledgers.readable()]:
            tiers.append((tier, ledger.held, faster))
            faster = (*faster, ledger.held)
        runs: list[Run] = []
        num_matched = 0
        while num_matched < len(keys):
            for tier, held, above in tiers:
                end = _leading_end(keys, num_matched, held, above)
                if end > num_matched:
                    runs.append(Run(tier, end - num_matched))
                    num_matched = end
                    break
            else:
                break
        num_pending = 0
        if self._host.num_filling:
            num_pending = sum(map(self._host.is_filling, keys[:num_matched]))
        return Match(len(keys), tuple(runs), num_pending)

    def load(
        self,
        keys: Sequence[BlockKey],
        into: Sequence[Slot | None],
        now: float,
        deadline: float | None = None,
        tenant: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> TicketId:
        """Start bringing blocks to device slots; each ends with a verdict of its own.

        None in place of a slot brings a block as far as HOST and pins it there. `parents` names by
        position the blocks that do not follow the one before them, with what they do follow.
        """
        self._ledgers.now = now
        num_loads = self._tickets.num_open(Direction.LOAD)
        ticket = self._tickets.open(Direction.LOAD, keys, into, now, deadline, tenant, parents)
        if num_loads >= self._limits.max_pending_loads:
            ticket.num_planned = len(keys)
            ticket.judge(range(len(keys)), Verdict.DROPPED)
            self._ledgers.lose(Tier.HOST, Tier.DEVICE, Verdict.DROPPED, len(keys), "too many loads")
        self._plan(ticket)
        return ticket.id

    def save(
        self,
        keys: Sequence[BlockKey],
        source: Sequence[Slot],
        now: float,
        tenant: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> TicketId:
        """Start copying device slots into HOST. What is there, or coming, is not copied again."""
        self._ledgers.now = now
        ticket = self._tickets.open(Direction.SAVE, keys, source, now, None, tenant, parents)
        self._plan(ticket)
        return ticket.id

    def open_tickets(self) -> list[TicketId]:
        return [ticket.id for ticket in self._tickets]

    def cancel(self, ticket_id: TicketId, now: float) -> None:
        """Give up a ticket. It is done as soon as no running copy touches its device slots."""
        self._ledgers.now = now
        ticket = self._tickets.get(ticket_id)
        if ticket is not None and ticket.given_up is None:
            self._give_up(ticket, Verdict.CANCELLED)

    def lookup(self, keys: Sequence[BlockKey], now: float) -> LookupId | None:
        """Ask REMOTE what it holds of the blocks that no tier above has.

        None where there is nothing to ask; else `match` knows more once it is no longer open.
        """
        self._ledgers.now = now
        return None if self._lookups is None else self._lookups.ask(keys)

    def is_looking_up(self, lookup_id: LookupId) -> bool:
        return self._lookups is not None and self._lookups.is_open(lookup_id)

    @property
    def num_lookups(self) -> int:
        return 0 if self._lookups is None else len(self._lookups)

    def used(self, keys: Sequence[BlockKey], now: float, tenant: str = "") -> None:
        """Blocks were used where they lie on the device: what others would use should be shared.

        Without a shared tier, or one that counts uses before it takes a block, only the last one in
        HOST is noted, since it is in the way of a request: who knows prompts knows of the others.
        """
        self._ledgers.now = now
        if self._lookups is None and not self._write_down.counts_uses:
            last = next((key for key in reversed(keys) if self._host.is_ready(key)), None)
            if last is not None:
                self._host.touch(last)
            return
        positions = [place for place, key in enumerate(keys) if self._host.is_ready(key)]
        ready = [keys[position] for position in positions]
        for key in ready:
            self._host.touch(key)
        parents = [keys[position - 1] if position else None for position in positions]
        self._write_down.offer(ready, tenant, parents)

    def pin(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        """Where in HOST these blocks can be read until unpinned; None for what is not there."""
        return self._pins.pin(keys)

    def unpin_all(self) -> None:
        """Whoever pinned them has forgotten."""
        for slot, count in list(self._pins.counts.items()):
            self._pins.unpin([slot] * count)

    def is_in_host(self, key: BlockKey) -> bool:
        return self._host.is_ready(key)

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Take back one pin on each."""
        self._pins.unpin(slots)

    @property
    def num_pinned(self) -> int:
        """Blocks of HOST that are read where they lie."""
        return len(self._pins)

    def retain(self, keys: Sequence[BlockKey], name: str, until: float) -> int:
        """Keep leading blocks in HOST until a time, or until `name` is released: see `Retention`.

        Returns how many; those that are still being saved are kept from when they arrive.
        """
        return self._retention.retain(keys, name, until)

    def release(self, name: str) -> int:
        """Retain no more under this name; returns how many blocks that were."""
        return self._retention.release(name)

    @property
    def num_retained(self) -> int:
        return len(self._retention)

    def demote(self, keys: Sequence[BlockKey]) -> int:
        """Let these go from HOST first; those that somebody has retained are left alone."""
        return self._demotions.demote(keys)

    @property
    def num_host_blocks(self) -> int:
        return self._host.capacity

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Forget blocks of HOST that turned out wrong."""
        self._ledgers.drop(Tier.HOST, [key for key in keys if self._host.is_ready(key)])

    def empty_host(self) -> int:
        """Drop every READY block from HOST; running copies keep their slots until they end."""
        self._retention.clear()
        return self.forget(Tier.HOST)

    def forget(self, tier: Tier, survivors: Container[BlockKey] = ()) -> int:
        """Drop every READY block but the survivors from a tier's book; returns how many."""
        keys = [key for key in self._ledgers.of(tier).ready_keys() if key not in survivors]
        self._ledgers.drop(tier, keys)
        return len(keys)

    # What the transfers ask for and report.

    def next_transfers(self, has_room: HasRoom) -> Iterator[Transfer]:
        """Hand out transfers while their link has room. Each must be settled exactly once.

        Long tickets are planned a stretch at a time: call again while `has_more_to_plan`.
        """
        for ticket in self._tickets:
            self._plan(ticket)
        yield from self._flights.hand_out(has_room)
        for tier in self._write_down.tiers:
            while self._write_down.can_plan(tier) and has_room(tier, Direction.SAVE):
                self._write_down.plan(tier)
                yield from self._flights.hand_out(has_room)

    def settle(self, outcome: Outcome, now: float) -> None:
        """Enter what became of a transfer."""
        self._ledgers.now = now
        flight = self._flights.land(outcome.transfer_id)
        transfer = flight.transfer
        if len(outcome.verdicts) != len(transfer.keys):
            raise BookError(f"transfer {transfer.id} has a verdict too few or too many")
        self._ledgers.report(transfer, outcome)
        if transfer.target is Tier.DEVICE:
            self._loads.settle_arrival(flight, outcome.verdicts)
        elif transfer.source is Tier.DEVICE:
            self._saves.settle(flight, outcome.verdicts)
        elif transfer.target is Tier.HOST:
            self._loads.settle_fill(transfer, outcome.verdicts)
        else:
            self._write_down.settle(transfer, outcome.verdicts)
        if flight.ticket is not None:
            self._tickets.close_if_over(flight.ticket, now)

    def take_questions(self) -> list[Question]:
        """What REMOTE is to be asked. Each must be answered exactly once."""
        return [] if self._lookups is None else self._lookups.take_questions()

    def answer(self, answer: Answer, now: float) -> None:
        """Enter what REMOTE said."""
        self._ledgers.now = now
        assert self._lookups is not None
        self._lookups.settle(answer)

    def tick(self, now: float) -> None:
        """Let time pass: end rests and retentions, give up loads past their deadline."""
        self._ledgers.now = now
        self._ledgers.tick()
        self._retention.tick(now, len(self._pins))
        if self._lookups is not None:
            self._lookups.tick()
        for ticket in self._tickets:
            late = ticket.deadline is not None and now >= ticket.deadline
            if late and ticket.given_up is None:
                for tier in self._loads.owing(ticket):
                    self._ledgers.fault(tier, Direction.LOAD, "a load passed its deadline")
                self._give_up(ticket, Verdict.EXPIRED)

    def adopt(self, tier: Tier, found: Sequence[tuple[Slot, BlockKey | None]]) -> int:
        """Enter what a restart found on a lower tier; returns how many blocks are new."""
        return self._ledgers.adopt(tier, found)

    @property
    def num_loading(self) -> dict[Tier, int]:
        """Blocks that loads still have to bring over each link."""
        counts: Counter[Tier] = Counter()
        for flight in self._flights:
            if flight.transfer.direction is Direction.LOAD:
                counts[flight.transfer.link] += len(flight.transfer.keys)
        for ticket in self._tickets:
            if ticket.direction is Direction.LOAD:
                counts[Tier.HOST] += len(ticket.keys) - ticket.num_planned + len(ticket.waiting)
        return counts

    # What observers ask for.

    def take_dones(self) -> list[Done]:
        return self._tickets.take_dones()

    def take_cancels(self) -> list[TransferId]:
        """Handed-out transfers that nobody waits for any more: cancelling them is a courtesy."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        return self._ledgers.take_events()

    def take_usage(self, depth: Callable[[Tier, Direction], int]) -> list[Event]:
        """What has changed of the tiers' usage. `depth` tells how much the transfers queue."""
        changed: list[Event] = []
        for tier, ledger in self._ledgers:
            usage = TierUsage(
                tier,
                ledger.num_used,
                ledger.capacity,
                ledger.num_leased,
                depth(tier, Direction.LOAD) + self._flights.num_queued(tier, Direction.LOAD),
                depth(tier, Direction.SAVE) + self._flights.num_queued(tier, Direction.SAVE),
            )
            if self._usage.get(tier) != usage:
                self._usage[tier] = usage
                changed.append(usage)
        retained = Retained(len(self._retention), self._retention.max_blocks)
        if retained != self._retained:
            self._retained = retained
            changed.append(retained)
        return changed

    @property
    def num_blocks(self) -> int:
        """Different blocks that this instance can keep: DISK also holds what lies above it."""
        return max(ledger.capacity for tier, ledger in self._ledgers if tier is not Tier.REMOTE)

    @property
    def has_more_to_plan(self) -> bool:
        return not self._tickets.all_planned

    @property
    def idle(self) -> bool:
        """Nothing is under way, and nothing is left to write to a tier that takes it."""
        can_write = any(map(self._write_down.can_plan, self._write_down.tiers))
        return not (self._tickets or self._flights or can_write)

    def is_resting(self, tier: Tier, direction: Direction) -> bool:
        return self._ledgers.is_resting(tier, direction)

    def check(self) -> None:
        """Audit all books: every lease and claim belongs to something that is under way."""
        leases: dict[Tier, Counter[Slot]] = {tier: Counter() for tier, _ in self._ledgers}
        filling: dict[Tier, list[BlockKey]] = {tier: [] for tier, _ in self._ledgers}
        num_flying: Counter[TicketId] = Counter()
        num_saving = 0
        for flight in self._flights:
            transfer = flight.transfer
            if transfer.source is Tier.DEVICE:
                num_saving += len(transfer.keys)
            else:
                leases[transfer.source].update(transfer.source_slots)
            if transfer.target is not Tier.DEVICE:
                filling[transfer.target].extend(transfer.keys)
            if flight.ticket is not None:
                num_flying[flight.ticket.id] += len(transfer.keys)
        leases[Tier.HOST].update(self._write_down.leased_slots())
        leases[Tier.HOST].update(self._pins.counts)
        leases[Tier.HOST].update(self._retention.slots)
        self._write_down.check()
        self._retention.check()
        for ticket in self._tickets:
            if ticket.over or num_flying[ticket.id] != ticket.num_flying:
                raise BookError(f"ticket {ticket.id} is over, idle or miscounted")
        for tier, ledger in self._ledgers:
            ledger.check()
            if ledger.leases() != dict(leases[tier]):
                raise BookError(f"{tier.name} has leases that nothing under way holds")
            if sorted(ledger.filling_keys()) != sorted(filling[tier]):
                raise BookError(f"{tier.name} has claims that nothing under way fills")
        if num_saving != self._saves.num_pending:
            raise BookError("the blocks being saved are miscounted")
        if not set(filling[Tier.HOST]).issuperset(self._loads.awaited):
            raise BookError("a ticket waits for a block that nobody brings")

    def _plan(self, ticket: Ticket) -> None:
        """Plan the next stretch of a ticket, or try once more what found no room."""
        if not ticket.planned:
            stretch = range(ticket.num_planned, len(ticket.keys))[: self._limits.max_planned_blocks]
            ticket.num_planned = stretch.stop
            if ticket.direction is Direction.LOAD:
                self._loads.plan(ticket, stretch)
            else:
                self._saves.plan(ticket, stretch)
        elif ticket.waiting and self._host.num_claimable:
            # With little room, look only at what could be started now.
            window = self._host.num_claimable + self._limits.max_lower_blocks
            stretch_again, ticket.waiting = ticket.waiting[:window], ticket.waiting[window:]
            self._loads.plan(ticket, stretch_again)
        self._tickets.close_if_over(ticket, self._ledgers.now)

    def _give_up(self, ticket: Ticket, verdict: Verdict) -> None:
        """Let go of all that is not flying, and call back what flies."""
        ticket.given_up = verdict
        ticket.num_planned = len(ticket.keys)
        self._loads.leave(ticket)
        flying: set[int] = set()
        unwanted: list[Transfer] = []
        for flight in self._flights:
            if flight.ticket is ticket:
                flying.update(flight.positions)
                unwanted.append(flight.transfer)
            elif self._loads.is_orphan(flight):
                unwanted.append(flight.transfer)
        stranded = [p for p in ticket.open_positions() if p not in flying]
        ticket.judge(stranded, verdict)
        if stranded:
            ends = (Tier.HOST, Tier.DEVICE)
            source, target = ends if ticket.direction is Direction.LOAD else ends[::-1]
            self._ledgers.lose(source, target, verdict, len(stranded), "")
        for transfer in unwanted:
            if self._flights.withdraw(transfer):
                verdicts = (Verdict.CANCELLED,) * len(transfer.keys)
                self.settle(Outcome(transfer.id, verdicts), self._ledgers.now)
            else:
                self._cancels.append(transfer.id)
        self._tickets.close_if_over(ticket, self._ledgers.now)


def _leading_end(
    keys: Sequence[BlockKey],
    start: int,
    held: _Held,
    faster: Sequence[_Held],
) -> int:
    """The first position from `start` on whose block is not held, or is held by a faster tier."""
    for position in range(start, len(keys)):
        key = keys[position]
        if key not in held:
            return position
        for other in faster:
            if key in other:
                return position
    return len(keys)
