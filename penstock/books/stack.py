"""TierStack: the books of all tiers. It plans hops between them and settles their outcomes.

    save:  DEVICE ─► HOST ─► DISK, REMOTE   the second hop runs after the save is done
    load:  DISK, REMOTE ─► HOST ─► DEVICE   a loaded block stays in HOST for later requests

Pure: no I/O, no threads, no clock; time is an argument. Its parts do the work, and clients use
those that are public directly, for example `stack.pins.pin(keys)`. Rules that all parts follow:

- A hop holds a lease on its source slots and a claim on its target slots until it is settled, so
  nothing is freed or overwritten during a copy, even if the request is cancelled.
- A failed hop aborts its claims. A block that a tier failed to deliver is dropped from that tier's
  ledger, so that it can be stored again. The cache may lose a block, but never returns a wrong one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.books.arrivals import Arrivals
from penstock.books.checkpoints import Checkpoints
from penstock.books.flights import Flights, HasRoom
from penstock.books.ledger import Ledger
from penstock.books.ledgers import Ledgers
from penstock.books.loads import Loads
from penstock.books.lookups import Lookups
from penstock.books.pins import Pins
from penstock.books.retention import Retention
from penstock.books.saves import Saves
from penstock.books.tickets import Ticket, Tickets
from penstock.books.write_down import WriteDown
from penstock.books.write_gate import WriteGate
from penstock.events import Event, Retained, TierUsage
from penstock.types import (
    NO_PARENTS,
    BlockKey,
    Direction,
    Match,
    Outcome,
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
    """Bounds of the queues in the books."""

    max_host_blocks: int = 16  # per transfer between DEVICE and HOST
    max_lower_blocks: int = 8  # per transfer to or from a lower tier; a load waits for all of it
    max_remote_blocks: int | None = None  # the same for REMOTE, if it prefers another size
    # Plan this many blocks at a time, so that a long ticket's first copies run meanwhile.
    max_planned_blocks: int = 256
    # Cut copies between DEVICE and HOST into parts for several threads. A GPU needs only one.
    spread_host: bool = True
    max_pending_loads: int = 1024  # tickets
    max_pending_saves: int = 1024  # blocks on their way into HOST
    lookup_deadline_seconds: float = 0.25  # how long a client waits for an answer from REMOTE
    retain_share: float = 0.25  # share of HOST that hints may protect from eviction


_Held = Container[BlockKey]


class TierStack:
    """Knows where every block is and what happens next. Public attributes are its parts."""

    def __init__(
        self,
        block_bytes: int,
        host: Ledger,
        lower: Mapping[Tier, Ledger] | None = None,
        limits: Limits | None = None,
        *,
        read_only: frozenset[Tier] = frozenset(),
        gates: Mapping[Tier, WriteGate] | None = None,
        lower_bytes: Mapping[Tier, int] | None = None,
    ) -> None:
        """`lower_bytes`: the size of a block in lower tiers, where it differs from HOST's."""
        self._limits = limits = limits or Limits()
        self.host = host
        self.ledgers = ledgers = Ledgers(block_bytes, host, lower or {}, lower_bytes)
        self.flights = Flights(
            limits.max_host_blocks,
            limits.max_lower_blocks,
            limits.max_remote_blocks,
            spread_host=limits.spread_host,
        )
        self.tickets = Tickets()
        self.lookups = Lookups(ledgers, limits.lookup_deadline_seconds)
        self.pins = Pins(host)
        self.arrivals = Arrivals(ledgers, self.flights, self.tickets, self.pins)
        writable = [tier for tier in ledgers.lower if tier not in read_only]
        max_saves = limits.max_pending_saves
        self.write_down = WriteDown(ledgers, self.flights, writable, max_saves, gates)
        self.retention = Retention(host, limits.retain_share)
        ledgers.on_host_stored.append(self.retention.arrived)
        ledgers.on_host_removed.append(self.retention.removed)
        self.checkpoints = Checkpoints(ledgers, self.retention)
        self.saves = Saves(ledgers, self.flights, self.write_down, self.arrivals, max_saves)
        self._loads = Loads(ledgers, self.flights, self.write_down, self.arrivals)
        self._cancels: list[TransferId] = []
        self._last_usage: list[Event] = []

    # For clients.

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """Find how many leading blocks could be loaded, and from where. Changes nothing."""
        tiers: list[tuple[Tier, _Held, tuple[_Held, ...]]] = []
        faster: tuple[_Held, ...] = ()
        for tier, ledger in [(Tier.HOST, self.host), *self.ledgers.readable()]:
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
        if self.host.num_filling:
            num_pending = sum(map(self.host.is_filling, keys[:num_matched]))
        return Match(len(keys), tuple(runs), num_pending)

    def where(self, keys: Sequence[BlockKey]) -> list[Tier | None]:
        """The fastest tier from which each block could be loaded, or None. Changes nothing."""
        held = self.host.held
        found: list[Tier | None] = [Tier.HOST if key in held else None for key in keys]
        for tier, ledger in self.ledgers.readable():
            if None not in found:
                break
            held = ledger.held
            found = [
                tier if place is None and key in held else place
                for key, place in zip(keys, found, strict=True)
            ]
        return found

    def load(
        self,
        keys: Sequence[BlockKey],
        into: Sequence[Slot | None],
        now: float,
        deadline: float | None = None,
        tenant: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> TicketId:
        """Start loading blocks into device slots. Each block gets its own verdict.

        If a slot is None, the block is loaded into HOST only and pinned there. A block's parent is
        the one before it, except at the positions in `parents`.
        """
        self.ledgers.now = now
        num_loads = self.tickets.num_open(Direction.LOAD)
        ticket = self.tickets.open(Direction.LOAD, keys, into, now, deadline, tenant, parents)
        if num_loads >= self._limits.max_pending_loads:
            ticket.num_planned = len(keys)
            ticket.judge(range(len(keys)), Verdict.DROPPED)
            self.ledgers.lose(Tier.HOST, Tier.DEVICE, Verdict.DROPPED, len(keys), "too many loads")
        self._plan(ticket)
        return ticket.id

    def save(
        self,
        keys: Sequence[BlockKey],
        source: Sequence[Slot],
        now: float,
        tenant: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
        *,
        whole: bool = False,
        write_down: bool = True,
    ) -> TicketId:
        """Start copying device slots into HOST. Blocks that are there, or arriving, are skipped.

        If `whole`, all blocks that HOST lacks get room, or none.
        """
        self.ledgers.now = now
        ticket = self.tickets.open(
            Direction.SAVE,
            keys,
            source,
            now,
            None,
            tenant,
            parents,
            whole=whole,
            write_down=write_down,
        )
        self._plan(ticket)
        return ticket.id

    def cancel(self, ticket_id: TicketId, now: float) -> None:
        """Give up a ticket. It is done once no running copy touches its device slots."""
        self.ledgers.now = now
        ticket = self.tickets.get(ticket_id)
        if ticket is not None and ticket.given_up is None:
            self._give_up(ticket, Verdict.CANCELLED)

    def used(self, keys: Sequence[BlockKey], now: float, tenant: str = "") -> None:
        """Note that blocks were used on the device, and offer them to the lower tiers.

        If no lower tier needs to know (there is no REMOTE, and none counts uses), only the last
        block in HOST is touched. That saves time, and policies that know prompts derive the rest.
        """
        self.ledgers.now = now
        if Tier.REMOTE not in self.ledgers.lower and not self.write_down.counts_uses:
            last = next((key for key in reversed(keys) if self.host.is_ready(key)), None)
            if last is not None:
                self.host.touch(last)
            return
        positions = [place for place, key in enumerate(keys) if self.host.is_ready(key)]
        ready = [keys[position] for position in positions]
        for key in ready:
            self.host.touch(key)
        parents = [keys[position - 1] if position else None for position in positions]
        self.write_down.offer(ready, tenant, parents)

    def offer(
        self,
        keys: Sequence[BlockKey],
        now: float,
        tenant: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> None:
        """Offer those blocks that are READY in HOST to the lower tiers. Not a use of them."""
        self.ledgers.now = now
        if not self.write_down.tiers:
            return
        ready = [place for place, key in enumerate(keys) if self.host.is_ready(key)]
        self.write_down.offer(
            [keys[place] for place in ready],
            tenant,
            [
                parents[place] if place in parents else keys[place - 1] if place else None
                for place in ready
            ],
        )

    def empty_host(self) -> int:
        """Drop every READY block from HOST; returns how many. Running copies keep their slots."""
        self.retention.clear()
        return self.forget(Tier.HOST)

    def forget(self, tier: Tier, survivors: Container[BlockKey] = ()) -> int:
        """Drop every READY block except the survivors from a tier's ledger; returns how many."""
        keys = [key for key in self.ledgers.of(tier).ready_keys() if key not in survivors]
        self.ledgers.drop(tier, keys)
        return len(keys)

    # For the transfers.

    def next_transfers(self, has_room: HasRoom) -> Iterator[Transfer]:
        """Hand out transfers while their link has room. Each must be settled exactly once.

        Long tickets are planned in stretches: call again while `has_more_to_plan`.
        """
        for ticket in self.tickets:
            self._plan(ticket)
        yield from self.flights.hand_out(has_room)
        for tier in self.write_down.tiers:
            while self.write_down.can_plan(tier) and has_room(tier, Direction.SAVE):
                self.write_down.plan(tier)
                yield from self.flights.hand_out(has_room)

    def settle(self, outcome: Outcome, now: float) -> None:
        """Enter the outcome of a transfer."""
        self.ledgers.now = now
        flight = self.flights.land(outcome)
        transfer = flight.transfer
        self.ledgers.report(transfer, outcome)
        if transfer.target is Tier.DEVICE:
            self._loads.settle_copy(flight, outcome.verdicts)
        elif transfer.source is Tier.DEVICE:
            self.saves.settle(flight, outcome.verdicts)
        elif transfer.target is Tier.HOST:
            self._loads.settle_fetch(transfer, outcome.verdicts)
        else:
            self.write_down.settle(transfer, outcome.verdicts)
        if flight.ticket is not None:
            self.tickets.close_if_over(flight.ticket, now)

    def take_cancels(self) -> list[TransferId]:
        """Transfers that were handed out and are no longer needed. Cancelling them is optional."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def tick(self, now: float) -> None:
        """Let time pass: end rests, retentions and lookups, and give up loads past a deadline."""
        self.ledgers.now = now
        self.ledgers.tick()
        self.retention.tick(now, len(self.pins))
        self.lookups.tick()
        for ticket in self.tickets:
            late = ticket.deadline is not None and now >= ticket.deadline
            if late and ticket.given_up is None:
                for tier in self.arrivals.owing(ticket):
                    self.ledgers.fault(tier, Direction.LOAD, "a load passed its deadline")
                self._give_up(ticket, Verdict.EXPIRED)

    # For observers.

    @property
    def num_loading(self) -> dict[Tier, int]:
        """How many blocks loads have yet to move over each link."""
        counts: Counter[Tier] = Counter()
        for flight in self.flights:
            if flight.transfer.direction is Direction.LOAD:
                counts[flight.transfer.link] += len(flight.transfer.keys)
        for ticket in self.tickets:
            if ticket.direction is Direction.LOAD:
                counts[Tier.HOST] += len(ticket.keys) - ticket.num_planned + len(ticket.waiting)
        return counts

    def take_usage(self, depth: Callable[[Tier, Direction], int]) -> list[Event]:
        """Usage that changed since the last call. `depth` counts the transfers queued on a link."""
        usage: list[Event] = [
            TierUsage(
                tier,
                ledger.num_used,
                ledger.capacity,
                ledger.num_leased,
                depth(tier, Direction.LOAD) + self.flights.num_queued(tier, Direction.LOAD),
                depth(tier, Direction.SAVE) + self.flights.num_queued(tier, Direction.SAVE),
            )
            for tier, ledger in self.ledgers
        ]
        usage.append(Retained(len(self.retention), self.retention.max_blocks))
        changed = [event for event in usage if event not in self._last_usage]
        self._last_usage = usage
        return changed

    @property
    def num_blocks(self) -> int:
        """How many different blocks this instance can keep. DISK holds copies of HOST's blocks."""
        return max(ledger.capacity for tier, ledger in self.ledgers if tier is not Tier.REMOTE)

    @property
    def has_more_to_plan(self) -> bool:
        return not self.tickets.all_planned

    @property
    def idle(self) -> bool:
        """Whether nothing is under way and nothing is waiting for a tier that accepts writes."""
        can_write = any(map(self.write_down.can_plan, self.write_down.tiers))
        return not (self.tickets or self.flights or can_write)

    def _plan(self, ticket: Ticket) -> None:
        """Plan the next stretch of a ticket, or retry the blocks that found no room in HOST."""
        if not ticket.planned:
            stretch = range(ticket.num_planned, len(ticket.keys))
            if not ticket.whole:
                stretch = stretch[: self._limits.max_planned_blocks]
            ticket.num_planned = stretch.stop
            if ticket.direction is Direction.LOAD:
                self._loads.plan(ticket, stretch)
            else:
                self.saves.plan(ticket, stretch)
        elif ticket.waiting and self.host.num_claimable:
            # Retry only as many as could start now: with little room, most would wait again.
            window = self.host.num_claimable + self._limits.max_lower_blocks
            stretch_again, ticket.waiting = ticket.waiting[:window], ticket.waiting[window:]
            self._loads.plan(ticket, stretch_again)
        self.tickets.close_if_over(ticket, self.ledgers.now)

    def _give_up(self, ticket: Ticket, verdict: Verdict) -> None:
        """End a ticket's waiting blocks at once, and cancel its transfers."""
        ticket.given_up = verdict
        ticket.num_planned = len(ticket.keys)
        self.arrivals.leave(ticket)
        flying: set[int] = set()
        unwanted: list[Transfer] = []
        for flight in self.flights:
            if flight.ticket is ticket:
                flying.update(flight.positions)
                unwanted.append(flight.transfer)
            elif self.arrivals.is_orphan(flight):
                unwanted.append(flight.transfer)
        stranded = [p for p in ticket.open_positions() if p not in flying]
        ticket.judge(stranded, verdict)
        if stranded:
            ends = (Tier.HOST, Tier.DEVICE)
            source, target = ends if ticket.direction is Direction.LOAD else ends[::-1]
            self.ledgers.lose(source, target, verdict, len(stranded), "")
        for transfer in unwanted:
            if self.flights.withdraw(transfer):
                verdicts = (Verdict.CANCELLED,) * len(transfer.keys)
                self.settle(Outcome(transfer.id, verdicts), self.ledgers.now)
            else:
                self._cancels.append(transfer.id)
        self.tickets.close_if_over(ticket, self.ledgers.now)


def _leading_end(
    keys: Sequence[BlockKey],
    start: int,
    held: _Held,
    faster: Sequence[_Held],
) -> int:
    """The first position at or after `start` whose block is not held, or is in a faster tier."""
    for position in range(start, len(keys)):
        key = keys[position]
        if key not in held:
            return position
        for other in faster:
            if key in other:
                return position
    return len(keys)
