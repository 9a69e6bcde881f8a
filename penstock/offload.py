"""Offloader: the façade. Every host (engine, vLLM connector, simulator) is a tenant of this.

    match = offloader.match(keys)                       # pure: what could be loaded, from where
    ticket = offloader.load(keys[:n], into=slots)       # asynchronous; slots are the host's own
    for done in offloader.step(): ...                   # poll, settle, submit; never blocks

One thread owns an Offloader. Between `load` and its `Done` the device slots belong to Penstock:
the host neither reads nor reuses them. Between `save` and its `Done` it must not overwrite them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.books.damages import Damages
from penstock.books.ledgers import all_ok
from penstock.books.prefetches import Prefetches
from penstock.books.stack import TierStack
from penstock.clock import Clock
from penstock.costs.meters import LinkMeter
from penstock.costs.rates import LinkRate, load_seconds
from penstock.errors import PenstockError
from penstock.events import (
    Damaged,
    Event,
    LookedUp,
    Lost,
    Moved,
    Observer,
    Prefetched,
    Recovered,
    TicketDone,
    TierEmptied,
    TierRested,
    TierRevived,
    tell,
)
from penstock.stores.base import Incident
from penstock.stores.host import HostArena
from penstock.transfer.base import Transfers
from penstock.transfer.recovery import Recovery
from penstock.transfer.seals import Seals
from penstock.types import (
    NO_PARENTS,
    BlockKey,
    Direction,
    Done,
    LookupId,
    Match,
    Slot,
    TicketId,
    Tier,
    Verdict,
)

log = logging.getLogger(__name__)

_RECOVERY_SECONDS_PER_STEP = 0.005
_LET_COPIES_START_SECONDS = 50e-6


class Offloader:
    def __init__(
        self,
        stack: TierStack,
        engine: Transfers,
        clock: Clock,
        *,
        block_bytes: int,
        load_deadline_seconds: float,
        seals: Seals | None = None,
        host: HostArena | None = None,
        recoveries: Sequence[Recovery] = (),
        incidents: Mapping[Tier, Callable[[], list[Incident]]] | None = None,
        observers: Iterable[Observer] = (),
        close_stores: Callable[[], None] = lambda: None,
    ) -> None:
        self._stack = stack
        self._engine = engine
        self._clock = clock
        self._block_bytes = block_bytes
        self._load_deadline_seconds = load_deadline_seconds
        self._seals = seals
        self.host = host  # where blocks that are pinned can be read
        self._recoveries = list(recoveries)
        self._num_recovered = 0
        self._incidents = dict(incidents or {})
        self._damages = Damages()
        self._observers = list(observers)
        self._close_stores = close_stores
        self._meters: dict[Tier, LinkMeter] = {}
        self._kept: list[Done] = []  # met while draining, for the next `step`
        self._prefetches = Prefetches(stack)
        self._closed = False

    def observe(self, observer: Observer) -> None:
        """Let `observer` be told of every event from now on."""
        self._observers.append(observer)

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """How many leading blocks could be loaded, from where, at what cost. Changes nothing."""
        match = self._stack.match(keys)
        seconds = load_seconds(match.runs, self._block_bytes, self.rates)
        return match if seconds is None else replace(match, load_seconds=seconds)

    @property
    def rates(self) -> dict[Tier, LinkRate]:
        """What loads over each link have shown so far."""
        return {tier: meter.rate for tier, meter in self._meters.items() if meter.rate is not None}

    @property
    def is_moving(self) -> bool:
        """Whether something is under way, an index that is still being read included."""
        is_waiting = self._recoveries or self._stack.num_lookups or self._prefetches
        return bool(is_waiting) or not self._stack.idle

    @property
    def num_pinned(self) -> int:
        """Blocks of HOST that are read where they lie."""
        return self._stack.num_pinned

    @property
    def num_retained(self) -> int:
        """Blocks of HOST that hints keep from being evicted."""
        return self._stack.num_retained

    @property
    def is_prefetching(self) -> bool:
        return bool(self._prefetches)

    @property
    def num_host_blocks(self) -> int:
        return self._stack.num_host_blocks

    @property
    def num_blocks(self) -> int:
        """Different blocks that the tiers below the device can keep."""
        return self._stack.num_blocks

    def lookup(self, keys: Sequence[BlockKey]) -> LookupId | None:
        """Ask the tier that instances share for blocks that no tier of this one has.

        Call it when a request comes. None: there is nothing to wait for. Else `match` may know
        more once `is_looking_up` says no, which is a matter of milliseconds, or of the deadline.
        """
        self._require_open()
        lookup_id = self._stack.lookup(keys, self._clock.now())
        for question in self._stack.take_questions():
            self._engine.ask(question)
        return lookup_id

    def is_looking_up(self, lookup_id: LookupId) -> bool:
        return self._stack.is_looking_up(lookup_id)

    def used(self, keys: Sequence[BlockKey], *, tenant: str = "") -> None:
        """Blocks were found on the device: what is used there is worth keeping below, too."""
        self._stack.used(keys, self._clock.now(), tenant)

    def note(self, match: Match) -> None:
        """Count a match as one request's lookup: call it once, when the host has acted on it."""
        hits = {run.tier: match.num_from(run.tier) for run in match.runs}
        self._tell([LookedUp(match.num_asked, tuple(hits.items()))])

    def load(
        self,
        keys: Sequence[BlockKey],
        into: Sequence[Slot | None],
        *,
        deadline_seconds: float | None = None,
        patience_seconds: float | None = None,
        tenant: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> TicketId:
        """Bring blocks to device slots. Past the deadline, what has not arrived is given up.

        The deadline is that of the settings, or `deadline_seconds`; whoever has less patience
        says so, and waits so long once its turn has come: others may have asked before.

        None in place of a slot brings a block as far as HOST and pins it there; `Done.pins` says
        where, and whoever takes the `Done` has to unpin it some day. `parents`: see `save`.
        """
        self._require_open()
        now = self._clock.now()
        seconds = self._load_deadline_seconds if deadline_seconds is None else deadline_seconds
        if patience_seconds is not None:
            seconds = min(seconds, patience_seconds + self._seconds_ahead())
        ticket = self._stack.load(keys, into, now, now + seconds, tenant, parents)
        self._submit()
        return ticket

    def save(
        self,
        keys: Sequence[BlockKey],
        source: Sequence[Slot],
        *,
        tenant: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> TicketId:
        """Copy device slots into HOST, and from there down. What finds no room is dropped.

        All blocks of a `tenant` are in its name: it is part of their keys, and its budget theirs.
        Each block's parent is the block before it, except at the positions in `parents`, which
        name theirs (None: no parent, or unknown). Chains are evicted from their ends, and kept
        together where a store prefers large values.
        """
        self._require_open()
        ticket = self._stack.save(keys, source, self._clock.now(), tenant, parents)
        self._submit()
        return ticket

    def pin(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        """Where in HOST these blocks can be read until unpinned; None for what is not there."""
        self._require_open()
        return self._verified(keys, self._stack.pin(keys))

    def is_in_host(self, key: BlockKey) -> bool:
        """Whether `pin` would find it."""
        return self._stack.is_in_host(key)

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Take back one pin on each."""
        self._stack.unpin(slots)

    def retain(self, keys: Sequence[BlockKey], seconds: float, name: str) -> int:
        """Keep leading blocks in HOST for a time, or until `name` is released; returns how many.

        A later call under the same name adds to it, and sets the time for all of it anew.
        """
        self._require_open()
        return self._stack.retain(keys, name, self._clock.now() + seconds)

    def release(self, name: str) -> int:
        """Retain no more under this name; returns how many blocks that were."""
        return self._stack.release(name)

    def demote(self, keys: Sequence[BlockKey]) -> int:
        """Somebody knows that these will not be used soon: HOST lets them go first."""
        return self._stack.demote(keys)

    def prefetch(
        self,
        keys: Sequence[BlockKey],
        *,
        tenant: str = "",
        retain_seconds: float | None = None,
        name: str = "",
    ) -> int:
        """Bring leading blocks from lower tiers up to HOST; returns how many are known there.

        With `retain_seconds` what has come is retained under `name`. No `Done` tells of it.
        """
        self._require_open()
        now = self._clock.now()
        num_blocks = self._prefetches.ask(
            keys,
            self._load_deadline_seconds,
            tenant=tenant,
            lookup=self.lookup(keys),
            retain=None if retain_seconds is None else (name, now + retain_seconds),
        )
        if self._prefetches.advance(now):
            self._submit()
        return num_blocks

    def cancel(self, ticket: TicketId) -> None:
        """Give a ticket up. Its `Done` still comes, once its device slots are left alone."""
        self._stack.cancel(ticket, self._clock.now())
        self._submit()

    def step(self) -> list[Done]:
        """Poll, settle, submit. Never blocks; call it often."""
        dones, self._kept = self._kept + self._advance(), []
        return dones

    def _advance(self) -> list[Done]:
        self._settle()
        self._stack.tick(self._clock.now())
        self._recover()
        self._submit()
        dones = [self._checked(done) for done in self._own_dones()]
        events = self._stack.take_events()
        for event in events:
            if isinstance(event, Moved) and event.direction is Direction.LOAD:
                self._meters.setdefault(event.source, LinkMeter()).observe(event)
            elif isinstance(event, TierRested):
                what = f"{event.direction.value}s, for {event.seconds:.0f} s"
                log.warning("%s is left alone with %s: %s", event.tier.name, what, event.error)
            elif isinstance(event, TierRevived):
                log.warning("%s serves %ss again", event.tier.name, event.direction.value)
            elif isinstance(event, Lost) and event.verdict is Verdict.CORRUPT:
                self._say_damaged(event.source, event.num_blocks, event.error)
        for line in self._damages.tick(self._clock.now()):
            log.warning("%s", line)
        if self._observers:
            events += self._stack.take_usage(self._engine.depth)
            events += [
                TicketDone(
                    done.direction, len(done.keys), done.verdicts.count(Verdict.OK), done.seconds
                )
                for done in dones
            ]
            self._tell(events)
        return dones

    def _take_incidents(self) -> None:
        """What befell the stores by themselves."""
        for tier, take in self._incidents.items():
            for incident in take():
                if incident.num_damaged:
                    self._say_damaged(tier, incident.num_damaged, incident.what)
                    self._tell([Damaged(tier, incident.num_damaged, incident.what)])
                if incident.survivors is not None:
                    num_blocks = self._stack.forget(tier, incident.survivors)
                    log.error("%s: %s; %d blocks were lost", tier.name, incident.what, num_blocks)
                    self._tell([TierEmptied(tier, num_blocks, incident.what)])

    def _say_damaged(self, tier: Tier, num_blocks: int, error: str) -> None:
        for line in self._damages.note(tier, num_blocks, error, self._clock.now()):
            log.warning("%s", line)

    def _own_dones(self) -> list[Done]:
        """Those that the host waits for; prefetches are settled, and go on."""
        now = self._clock.now()
        dones: list[Done] = []
        for done in self._stack.take_dones():
            prefetched = self._prefetches.settle(done, now)
            if prefetched is None:
                dones.append(done)
            else:
                self._tell([Prefetched(*prefetched)])
        if self._prefetches.advance(now):
            self._submit()
        return dones

    def wait(self, tickets: Collection[TicketId], timeout_seconds: float = 60.0) -> list[Done]:
        """Step until all of `tickets` are done, or time is up; returns every Done met on the way.

        For scripts and tests: a host that has other work calls `step`.
        """
        missing = set(tickets)
        dones: list[Done] = []
        end = time.monotonic() + timeout_seconds
        while True:
            arrived = self.step()
            dones.extend(arrived)
            missing.difference_update(done.ticket for done in arrived)
            if not missing or time.monotonic() >= end:
                return dones
            self._engine.wait(0.01)

    def pause(self, timeout_seconds: float) -> None:
        """Block until a transfer has ended, or time is up: for a host with nothing else to do."""
        self._engine.wait(timeout_seconds)

    def drain(self, timeout_seconds: float = 60.0) -> bool:
        """Wait until nothing is under way, writes to lower tiers included.

        Tickets that end meanwhile are told by the next `step`.
        """
        end = time.monotonic() + timeout_seconds
        while not self._stack.idle and time.monotonic() < end:
            self._kept += self._advance()
            self._engine.wait(0.01)
        return self._stack.idle

    def recover(self, timeout_seconds: float = 600.0) -> bool:
        """Wait until every lower tier's index has been read. Not needed to serve."""
        end = time.monotonic() + timeout_seconds
        while self._recoveries and time.monotonic() < end:
            self._recover(wait_seconds=0.1)
            self._kept += self._advance()
        return not self._recoveries

    def empty_host(self) -> int:
        """Forget every block in DRAM; lower tiers keep theirs."""
        return self._stack.empty_host()

    def check(self) -> None:
        """Audit the books; raises BookError if anything does not add up."""
        self._stack.check()

    def close(self, timeout_seconds: float = 30.0) -> bool:
        """Finish the saves, stop the threads, close the stores. False if a tier hung."""
        if self._closed:
            return True
        self._closed = True
        self._prefetches.clear()
        drained = self.drain(timeout_seconds)
        stopped = self._engine.close(timeout_seconds)
        for recovery in self._recoveries:
            stopped &= recovery.stop(timeout_seconds)
        self._kept += self._advance()
        for line in self._damages.rest():
            log.warning("%s", line)
        if stopped:  # a hanging thread still uses the store's files: leave them open
            self._close_stores()
        return drained and stopped

    def let_go(self, timeout_seconds: float) -> bool:
        """The host has lost its books: end its loads and saves, take back its pins, tell nothing.

        True once no copy touches a device slot any more. What the tiers hold stays, and goes on
        its way to those below.
        """
        self._prefetches.clear()
        for ticket in self._stack.open_tickets():
            self._stack.cancel(ticket, self._clock.now())
        self._submit()
        end = time.monotonic() + timeout_seconds
        while self._stack.open_tickets():
            if time.monotonic() >= end:
                return False
            self._engine.wait(0.01)
            self._advance()
        self._advance()  # what ended last has been told to prefetches, too
        self._kept = []
        self._stack.unpin_all()
        return True

    def abandon(self, timeout_seconds: float) -> bool:
        """Close without finishing what is under way: the books cannot be trusted.

        What lower tiers hold by then is whole, and verified when it is read. False if a tier hung.
        """
        self._closed = True
        stopped = self._engine.close(timeout_seconds)
        for recovery in self._recoveries:
            stopped &= recovery.stop(timeout_seconds)
        if stopped:  # a hanging thread still uses the store's files: leave them open
            self._close_stores()
        return stopped

    def __enter__(self) -> Offloader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _seconds_ahead(self) -> float:
        """How long the links are busy with loads that were asked for before."""
        rates = self.rates
        return max(
            (
                rates[tier].seconds(count * self._block_bytes) if tier in rates else 0.0
                for tier, count in self._stack.num_loading.items()
            ),
            default=0.0,
        )

    def _checked(self, done: Done) -> Done:
        """What was pinned on arrival is looked at here: nobody else copies it."""
        if not done.pins:
            return done
        pins = tuple(self._verified(done.keys, done.pins))
        lost = [new is None and old is not None for old, new in zip(done.pins, pins, strict=True)]
        verdicts = tuple(
            Verdict.MISSING if gone else verdict
            for gone, verdict in zip(lost, done.verdicts, strict=True)
        )
        return replace(done, pins=pins, verdicts=verdicts)

    def _verified(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot | None]
    ) -> list[Slot | None]:
        """As every block below the device, one that is read in place is verified before."""
        if self.host is not None and self.host.num_for_device < self.host.num_slots:
            reach = self.host.num_for_device
            self._stack.unpin([slot for slot in slots if slot is not None and slot >= reach])
            slots = [None if slot is not None and slot >= reach else slot for slot in slots]
        pairs = [(key, slot) for key, slot in zip(keys, slots, strict=True) if slot is not None]
        if self._seals is None or not pairs:
            return list(slots)
        verdicts = self._seals.verdicts([key for key, _ in pairs], [slot for _, slot in pairs])
        if all_ok(verdicts):
            return list(slots)
        bad = {slot: key for (key, slot), v in zip(pairs, verdicts, strict=True) if v}
        self._stack.unpin([slot for _, slot in pairs if slot in bad])
        self._stack.drop(list(bad.values()))
        counts = Counter(verdict for verdict in verdicts if verdict)
        if num_corrupt := counts[Verdict.CORRUPT]:
            self._say_damaged(Tier.HOST, num_corrupt, "in DRAM")
        self._tell(
            Lost(Tier.HOST, Tier.DEVICE, Direction.LOAD, verdict, count)
            for verdict, count in counts.items()
        )
        return [None if slot in bad else slot for slot in slots]

    def _require_open(self) -> None:
        if self._closed:
            raise PenstockError("the offloader is closed; build another one")

    def _submit(self) -> None:
        for transfer_id in self._stack.take_cancels():
            self._engine.cancel(transfer_id)
        while True:
            for transfer in self._stack.next_transfers(self._engine.has_room):
                if not self._engine.submit(transfer):
                    raise RuntimeError("the transfer engine refused what it had room for")
            if not self._stack.has_more_to_plan:
                return
            # The threads cannot start a copy while this one plans: it holds the interpreter.
            time.sleep(_LET_COPIES_START_SECONDS)
            self._settle()

    def _settle(self) -> None:
        now = self._clock.now()
        outcomes = self._engine.poll()
        self._take_incidents()  # those of which the outcomes tell: they come first
        for outcome in outcomes:
            self._stack.settle(outcome, now)
        for answer in self._engine.take_answers():
            self._stack.answer(answer, now)

    def _recover(self, wait_seconds: float = 0.0) -> None:
        if not self._recoveries:
            return
        recovery = self._recoveries[0]
        end = self._clock.now() + _RECOVERY_SECONDS_PER_STEP
        taken = False
        while (batch := recovery.take(wait_seconds)) is not None:
            self._num_recovered += self._stack.adopt(recovery.tier, batch)
            taken = True
            if recovery.complete or self._clock.now() >= end:
                break
        if taken:
            progress = Recovered(
                recovery.tier, recovery.num_taken, recovery.num_slots, self._num_recovered
            )
            self._tell([progress])
        if recovery.complete:
            self._recoveries.pop(0)
            self._num_recovered = 0

    def _tell(self, events: Iterable[Event]) -> None:
        tell(self._observers, events)
