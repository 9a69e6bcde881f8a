"""TierStack: the books of all tiers together. It plans hops and settles their outcomes.

    save:  DEVICE ─► HOST ─► DISK         the second hop follows by itself, behind the request
    load:  DISK ─► HOST ─► DEVICE         what was loaded from below stays in HOST, if it is used

Pure: no I/O, no threads, no clock; time is an argument. Rules it lives by:

- Lease before claim, or the claim may evict what the load needs.
- A hop holds a lease on its source slots and a claim on its target slots until it is settled, so
  nothing is freed or overwritten under a running copy, whatever becomes of the request.
- A block that is on its way into HOST is joined, not fetched again.
- A failed hop aborts its claims; a block that a tier could not give is dropped from that tier's
  book, so that it can be stored again. The cache may lose; it may not lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from penstock.books import GONE, Books, all_ok
from penstock.errors import BookError
from penstock.events import Event, Usage
from penstock.flights import Flight, Flights, HasRoom
from penstock.ledger import Ledger
from penstock.tickets import Ticket
from penstock.types import (
    BlockKey,
    Direction,
    Done,
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
from penstock.write_down import WriteDown


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the books' queues."""

    max_host_blocks: int = 16  # of one transfer between DEVICE and HOST
    max_lower_blocks: int = 8  # of one transfer to or from a lower tier: loads wait for its end
    # Blocks planned at a time, so that a long ticket's first copies run while its rest is planned.
    max_planned_blocks: int = 256
    # Cut what crosses HOST's link into parts for several threads; where a GPU copies, one is best.
    spread_host: bool = True
    max_pending_loads: int = 1024  # tickets
    max_pending_saves: int = 1024  # blocks on their way into HOST


class TierStack:
    def __init__(
        self,
        block_bytes: int,
        host: Ledger,
        lower: Mapping[Tier, Ledger] | None = None,
        limits: Limits | None = None,
        *,
        read_only: frozenset[Tier] = frozenset(),
    ) -> None:
        self._limits = limits or Limits()
        self._books = Books(block_bytes, host, lower or {})
        self._host = host
        self._flights = Flights(
            self._limits.max_host_blocks,
            self._limits.max_lower_blocks,
            spread_host=self._limits.spread_host,
        )
        self._write_down = WriteDown(
            self._books,
            self._flights,
            [tier for tier in self._books.lower if tier not in read_only],
            self._limits.max_lower_blocks,
            self._limits.max_pending_saves,
        )
        self._tickets: dict[TicketId, Ticket] = {}
        self._ticket_ids = count(1)
        self._joiners: dict[BlockKey, list[tuple[Ticket, int]]] = {}
        self._num_saving = 0
        self._pins: Counter[Slot] = Counter()  # of HOST: blocks that are read where they lie
        self._dones: list[Done] = []
        self._cancels: list[TransferId] = []
        self._usage: dict[Tier, Usage] = {}

    # What a host asks for.

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """How many leading blocks could be loaded, and from where. Changes nothing."""
        nothing: Container[BlockKey] = ()
        tiers = [(Tier.HOST, self._host.held, nothing)]
        tiers += [(tier, ledger.held, self._host.held) for tier, ledger in self._books.readable()]
        runs: list[Run] = []
        num_matched = 0
        while num_matched < len(keys):
            for tier, held, faster in tiers:
                end = _leading_end(keys, num_matched, held, faster)
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
    ) -> TicketId:
        """Start bringing blocks to device slots; each ends with a verdict of its own.

        None in place of a slot brings a block as far as HOST and pins it there.
        """
        self._books.now = now
        num_loads = sum(ticket.direction is Direction.LOAD for ticket in self._tickets.values())
        ticket = self._open(Direction.LOAD, keys, into, deadline)
        if num_loads >= self._limits.max_pending_loads:
            ticket.num_planned = len(keys)
            ticket.judge(range(len(keys)), Verdict.DROPPED)
            self._books.lose(Tier.HOST, Tier.DEVICE, Verdict.DROPPED, len(keys), "too many loads")
        self._plan(ticket)
        return ticket.id

    def save(self, keys: Sequence[BlockKey], source: Sequence[Slot], now: float) -> TicketId:
        """Start copying device slots into HOST. What is there, or coming, is not copied again."""
        self._books.now = now
        ticket = self._open(Direction.SAVE, keys, source, None)
        self._plan(ticket)
        return ticket.id

    def cancel(self, ticket_id: TicketId, now: float) -> None:
        """Give up a ticket. It is done as soon as no running copy touches its device slots."""
        self._books.now = now
        ticket = self._tickets.get(ticket_id)
        if ticket is not None and ticket.given_up is None:
            self._give_up(ticket, Verdict.CANCELLED)

    def pin(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        """Where in HOST these blocks can be read until unpinned; None for what is not there."""
        slots = self._host.use_ready(keys)
        self._pins.update(slot for slot in slots if slot is not None)
        return slots

    def is_in_host(self, key: BlockKey) -> bool:
        return self._host.is_ready(key)

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Take back one pin on each."""
        for slot in slots:
            self._pins[slot] -= 1
            if self._pins[slot] < 0:
                raise BookError(f"slot {slot} of HOST is unpinned more often than pinned")
            if not self._pins[slot]:
                del self._pins[slot]
        self._host.release(slots)

    @property
    def num_pinned(self) -> int:
        """Blocks of HOST that are read where they lie."""
        return len(self._pins)

    @property
    def num_host_blocks(self) -> int:
        return self._host.capacity

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Forget blocks of HOST that turned out wrong."""
        self._books.drop(Tier.HOST, [key for key in keys if self._host.is_ready(key)])

    def empty_host(self) -> int:
        """Drop every READY block from HOST; running copies keep their slots until they end."""
        keys = self._host.ready_keys()
        self._books.drop(Tier.HOST, keys)
        return len(keys)

    # What the transfers ask for and report.

    def next_transfers(self, has_room: HasRoom) -> Iterator[Transfer]:
        """Hand out transfers while their link has room. Each must be settled exactly once.

        Long tickets are planned a stretch at a time: call again while `has_more_to_plan`.
        """
        for ticket in list(self._tickets.values()):
            self._plan(ticket)
        yield from self._flights.hand_out(has_room)
        for tier in self._write_down.tiers:
            while self._write_down.can_plan(tier) and has_room(tier, Direction.SAVE):
                self._write_down.plan(tier)
                yield from self._flights.hand_out(has_room)

    def settle(self, outcome: Outcome, now: float) -> None:
        """Enter what became of a transfer."""
        self._books.now = now
        flight = self._flights.land(outcome.transfer_id)
        transfer = flight.transfer
        if len(outcome.verdicts) != len(transfer.keys):
            raise BookError(f"transfer {transfer.id} has a verdict too few or too many")
        self._books.report(transfer, outcome)
        if transfer.target is Tier.DEVICE:
            self._settle_arrival(flight, outcome.verdicts)
        elif transfer.source is Tier.DEVICE:
            self._settle_save(flight, outcome.verdicts)
        elif transfer.target is Tier.HOST:
            self._settle_fill(transfer, outcome.verdicts)
        else:
            self._write_down.settle(transfer, outcome.verdicts)
        if flight.ticket is not None:
            self._close_if_over(flight.ticket)

    def tick(self, now: float) -> None:
        """Let time pass: end rests of failing tiers, give up loads past their deadline."""
        self._books.now = now
        self._books.tick()
        for ticket in list(self._tickets.values()):
            late = ticket.deadline is not None and now >= ticket.deadline
            if late and ticket.given_up is None:
                for tier in self._owing(ticket):
                    self._books.fault(tier, Direction.LOAD, "a load passed its deadline")
                self._give_up(ticket, Verdict.EXPIRED)

    def adopt(self, tier: Tier, found: Sequence[tuple[Slot, BlockKey | None]]) -> int:
        """Enter what a restart found on a lower tier; returns how many blocks are new."""
        return self._books.adopt(tier, found)

    # What observers ask for.

    def take_dones(self) -> list[Done]:
        dones, self._dones = self._dones, []
        return dones

    def take_cancels(self) -> list[TransferId]:
        """Handed-out transfers that nobody waits for any more: cancelling them is a courtesy."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        return self._books.take_events()

    def take_usage(self, depth: Callable[[Tier, Direction], int]) -> list[Event]:
        """The tiers whose usage changed. `depth` tells how much the transfers have queued."""
        changed: list[Event] = []
        for tier, ledger in self._books:
            usage = Usage(
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
        return changed

    @property
    def num_blocks(self) -> int:
        """Different blocks that can be kept: a lower tier also holds what lies above it."""
        return max(ledger.capacity for _, ledger in self._books)

    @property
    def has_more_to_plan(self) -> bool:
        return not all(ticket.planned for ticket in self._tickets.values())

    @property
    def idle(self) -> bool:
        """Nothing is under way, and nothing is left to write to a tier that takes it."""
        can_write = any(map(self._write_down.can_plan, self._write_down.tiers))
        return not (self._tickets or self._flights or can_write)

    def is_resting(self, tier: Tier, direction: Direction) -> bool:
        return self._books.is_resting(tier, direction)

    def check(self) -> None:
        """Audit all books: every lease and claim belongs to something that is under way."""
        leases: dict[Tier, Counter[Slot]] = {tier: Counter() for tier, _ in self._books}
        filling: dict[Tier, list[BlockKey]] = {tier: [] for tier, _ in self._books}
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
        leases[Tier.HOST].update(self._pins)
        self._write_down.check()
        for ticket in self._tickets.values():
            if ticket.over or ticket.leased or num_flying[ticket.id] != ticket.num_flying:
                raise BookError(f"ticket {ticket.id} is over, idle or miscounted")
        for tier, ledger in self._books:
            ledger.check()
            if ledger.leases() != dict(leases[tier]):
                raise BookError(f"{tier.name} has leases that nothing under way holds")
            if sorted(ledger.filling_keys()) != sorted(filling[tier]):
                raise BookError(f"{tier.name} has claims that nothing under way fills")
        if num_saving != self._num_saving:
            raise BookError("the blocks being saved are miscounted")
        if not self._joiners.keys() <= set(filling[Tier.HOST]):
            raise BookError("a ticket waits for a block that nobody brings")

    # Loads.

    def _plan(self, ticket: Ticket) -> None:
        """Plan the next stretch of a ticket, or try once more what found no room."""
        if not ticket.planned:
            stretch = range(ticket.num_planned, len(ticket.keys))[: self._limits.max_planned_blocks]
            ticket.num_planned = stretch.stop
            if ticket.direction is Direction.LOAD:
                self._plan_load(ticket, stretch)
            else:
                self._plan_save(ticket, stretch)
        elif ticket.waiting and self._host.num_claimable:
            # With little room, look only at what could be started now.
            window = self._host.num_claimable + self._limits.max_lower_blocks
            stretch_again, ticket.waiting = ticket.waiting[:window], ticket.waiting[window:]
            self._plan_load(ticket, stretch_again)
        self._close_if_over(ticket)

    def _plan_load(self, ticket: Ticket, positions: Sequence[int]) -> None:
        """Lease, join or fetch each block; what finds no room in HOST waits in the ticket."""
        below: dict[Tier, list[int]] = {}
        num_missing = 0
        found = self._host.use_ready([ticket.keys[position] for position in positions])
        if None in found and not ticket.planned:
            # Lease before claim: what is in HOST further on must be held before others need room.
            rest = range(ticket.num_planned, len(ticket.keys))
            ticket.num_planned = len(ticket.keys)
            found += self._host.use_ready([ticket.keys[position] for position in rest])
            positions = [*positions, *rest]
        lower = self._books.readable()
        for position, slot in zip(positions, found, strict=True):
            key = ticket.keys[position]
            if slot is not None:
                ticket.leased.append((position, slot))
                continue
            if self._host.is_filling(key):
                self._joiners.setdefault(key, []).append((ticket, position))
                continue
            for tier, ledger in lower:
                if ledger.is_ready(key):
                    below.setdefault(tier, []).append(position)
                    break
            else:
                ticket.judge([position], Verdict.MISSING)
                num_missing += 1
        self._write_down.offer([ticket.keys[position] for position, _ in ticket.leased])
        for tier, wanted in below.items():
            room = self._host.num_claimable
            self._fetch(tier, ticket, wanted[:room])
            ticket.waiting.extend(wanted[room:])
        ticket.waiting.sort()
        self._send_leased(ticket, spread=ticket.planned)
        if num_missing:
            self._books.lose(Tier.HOST, Tier.DEVICE, Verdict.MISSING, num_missing, "")

    def _fetch(self, tier: Tier, ticket: Ticket, positions: Sequence[int]) -> None:
        keys = [ticket.keys[position] for position in positions]
        source_slots = self._books.lower[tier].lease(keys)
        for key in keys:
            self._books.lower[tier].touch(key)
        target_slots = self._books.claim(Tier.HOST, keys)
        for position, key in zip(positions, keys, strict=True):
            ticket.comes_from(position, tier)
            self._joiners.setdefault(key, []).append((ticket, position))
        self._flights.post(
            tier,
            Tier.HOST,
            keys,
            source_slots,
            target_slots,
            spread=True,
            deadline=ticket.deadline,
        )

    def _send_leased(self, ticket: Ticket, *, spread: bool = False) -> None:
        leased, ticket.leased = ticket.leased, []
        keys: list[BlockKey] = []
        sources: list[Slot] = []
        targets: list[Slot] = []
        positions: list[int] = []
        for position, slot in leased:
            target = ticket.device_slots[position]
            if target is None:
                self._pins[slot] += 1
                ticket.pins[position] = slot
                ticket.judge([position], Verdict.OK)
                continue
            keys.append(ticket.keys[position])
            sources.append(slot)
            targets.append(target)
            positions.append(position)
        self._flights.post(
            Tier.HOST,
            Tier.DEVICE,
            keys,
            sources,
            targets,
            spread=spread,
            deadline=ticket.deadline,
            ticket=ticket,
            positions=positions,
        )

    def _settle_arrival(self, flight: Flight, verdicts: Sequence[Verdict]) -> None:
        ticket, transfer = flight.ticket, flight.transfer
        assert ticket is not None
        self._host.release(transfer.source_slots)
        self._books.drop_gone(transfer, verdicts)
        if all_ok(verdicts):
            ticket.judge(flight.positions, Verdict.OK)
            return
        for position, verdict in zip(flight.positions, verdicts, strict=True):
            if verdict is Verdict.CANCELLED and ticket.given_up is not None:
                verdict = ticket.given_up
            ticket.judge([position], verdict)

    def _settle_fill(self, transfer: Transfer, verdicts: Sequence[Verdict]) -> None:
        self._books.lower[transfer.source].release(transfer.source_slots)
        self._books.drop_gone(transfer, verdicts)
        self._arrive(transfer.keys, verdicts)

    def _arrive(self, keys: Sequence[BlockKey], verdicts: Sequence[Verdict]) -> None:
        """Blocks came into HOST or did not: tell the books and the tickets that joined them."""
        self._books.conclude(Tier.HOST, keys, verdicts)
        if not self._joiners:
            return
        joined: dict[TicketId, Ticket] = {}
        arrived: list[tuple[Ticket, int]] = []
        for key, verdict in zip(keys, verdicts, strict=True):
            for ticket, position in self._joiners.pop(key, ()):
                joined[ticket.id] = ticket
                if verdict is Verdict.OK:
                    arrived.append((ticket, position))
                elif verdict in GONE:
                    ticket.judge([position], verdict)
                else:
                    ticket.waiting.append(position)  # given up for another ticket's reasons
        slots = self._host.lease([ticket.keys[position] for ticket, position in arrived])
        for (ticket, position), slot in zip(arrived, slots, strict=True):
            ticket.leased.append((position, slot))
        for ticket in joined.values():
            self._send_leased(ticket)
            self._close_if_over(ticket)

    # Saves, and the copies below that follow them.

    def _plan_save(self, ticket: Ticket, positions: Sequence[int]) -> None:
        held = self._host.held
        fresh = [position for position in positions if ticket.keys[position] not in held]
        if len(fresh) < len(positions):
            there = [position for position in positions if ticket.keys[position] in held]
            ticket.judge(there, Verdict.OK)
            ready = [key for p in there if self._host.is_ready(key := ticket.keys[p])]
            for key in ready:
                self._host.touch(key)
            self._write_down.offer(ready)
        room = min(self._host.num_claimable, self._limits.max_pending_saves - self._num_saving)
        taken, refused = fresh[:room], fresh[room:]  # leading blocks are worth more
        if refused:
            ticket.judge(refused, Verdict.DROPPED)
            self._books.lose(
                Tier.DEVICE, Tier.HOST, Verdict.DROPPED, len(refused), "no room in HOST"
            )
        if taken:
            keys = [ticket.keys[position] for position in taken]
            slots = self._books.claim(Tier.HOST, keys)
            self._num_saving += len(taken)
            self._flights.post(
                Tier.DEVICE,
                Tier.HOST,
                keys,
                [slot for p in taken if (slot := ticket.device_slots[p]) is not None],
                slots,
                spread=ticket.planned,
                ticket=ticket,
                positions=taken,
            )

    def _settle_save(self, flight: Flight, verdicts: Sequence[Verdict]) -> None:
        ticket, keys = flight.ticket, flight.transfer.keys
        assert ticket is not None
        self._num_saving -= len(keys)
        for position, verdict in zip(flight.positions, verdicts, strict=True):
            ticket.judge([position], verdict)
        self._arrive(keys, verdicts)
        self._write_down.offer(
            [key for key, verdict in zip(keys, verdicts, strict=True) if verdict is Verdict.OK]
        )

    # Tickets.

    def _open(
        self,
        direction: Direction,
        keys: Sequence[BlockKey],
        device_slots: Sequence[Slot | None],
        deadline: float | None,
    ) -> Ticket:
        if len(keys) != len(device_slots):
            raise BookError(f"{len(keys)} blocks were named for {len(device_slots)} device slots")
        if len(set(keys)) != len(keys):
            raise BookError(f"a {direction.value} names a block twice")
        ticket_id = TicketId(next(self._ticket_ids))
        ticket = Ticket(
            ticket_id, direction, tuple(keys), tuple(device_slots), self._books.now, deadline
        )
        self._tickets[ticket_id] = ticket
        return ticket

    def _close_if_over(self, ticket: Ticket) -> None:
        if ticket.over and self._tickets.pop(ticket.id, None) is not None:
            self._dones.append(ticket.done(self._books.now))

    def _give_up(self, ticket: Ticket, verdict: Verdict) -> None:
        """Let go of all that is not flying, and call back what flies."""
        ticket.given_up = verdict
        ticket.num_planned = len(ticket.keys)
        ticket.waiting = []
        for position, key in enumerate(ticket.keys):
            joiners = self._joiners.get(key, [])
            if (ticket, position) in joiners:
                joiners.remove((ticket, position))
                if not joiners:
                    del self._joiners[key]
        flying: set[int] = set()
        unwanted: list[Transfer] = []
        for flight in self._flights:
            if flight.ticket is ticket:
                flying.update(flight.positions)
                unwanted.append(flight.transfer)
            elif self._is_orphan(flight):
                unwanted.append(flight.transfer)
        stranded = [p for p in ticket.open_positions() if p not in flying]
        ticket.judge(stranded, verdict)
        if stranded:
            ends = (Tier.HOST, Tier.DEVICE)
            source, target = ends if ticket.direction is Direction.LOAD else ends[::-1]
            self._books.lose(source, target, verdict, len(stranded), "")
        for transfer in unwanted:
            if self._flights.withdraw(transfer):
                verdicts = (Verdict.CANCELLED,) * len(transfer.keys)
                self.settle(Outcome(transfer.id, verdicts), self._books.now)
            else:
                self._cancels.append(transfer.id)
        self._close_if_over(ticket)

    def _is_orphan(self, flight: Flight) -> bool:
        """A fetch from below that no ticket waits for any more."""
        transfer = flight.transfer
        fetches = transfer.target is Tier.HOST and transfer.source is not Tier.DEVICE
        return fetches and not any(key in self._joiners for key in transfer.keys)

    def _owing(self, ticket: Ticket) -> set[Tier]:
        """The lower tiers that still owe this load a block."""
        owed = {
            key
            for position, key in enumerate(ticket.keys)
            if (ticket, position) in self._joiners.get(key, ())
        }
        return {
            flight.transfer.source
            for flight in self._flights
            if flight.transfer.source in self._books.lower
            and owed.intersection(flight.transfer.keys)
        }


def _leading_end(
    keys: Sequence[BlockKey],
    start: int,
    held: Container[BlockKey],
    faster: Container[BlockKey],
) -> int:
    """The first position from `start` on whose block is not held, or is held by a faster tier."""
    for position in range(start, len(keys)):
        key = keys[position]
        if key not in held or key in faster:
            return position
    return len(keys)
