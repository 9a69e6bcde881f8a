"""Offloader: the interface for clients (embedded engine, vLLM connector, simulator).

    match = offloader.match(keys)                       # what could be loaded, and from where
    ticket = offloader.load(keys[:n], into=slots)       # asynchronous; slots of the client's device
    for done in offloader.step(): ...                   # poll, settle, submit; never blocks

Use an Offloader from one thread only. Between `load` and its `Done` the device slots belong to
Penstock: the client must not read or reuse them. Between `save` and its `Done` it must not
overwrite them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.books.audit import audit
from penstock.books.damages import Damages
from penstock.books.prefetches import Prefetches, chains_of
from penstock.books.stack import TierStack
from penstock.clock import Clock
from penstock.codecs.base import BlockCodec
from penstock.codecs.blocks import TierCodecs
from penstock.costs.meters import LinkMeter
from penstock.costs.rates import LinkRate, load_seconds
from penstock.errors import BookError, PenstockError
from penstock.events import (
    CodecsChosen,
    Damaged,
    Event,
    LookedUp,
    Lost,
    Moved,
    Observer,
    Prefetched,
    Recovered,
    TicketDone,
    TierCodec,
    TierEmptied,
    TierRested,
    TierRevived,
    tell,
)
from penstock.stores.base import Incident
from penstock.stores.host import HostArena
from penstock.transfer.base import Transfers
from penstock.transfer.pin_check import PinCheck
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
from penstock.units import counted

log = logging.getLogger(__name__)

_RECOVERY_SECONDS_PER_STEP = 0.005
_LET_COPIES_START_SECONDS = 50e-6


class Offloader:
    """Keeps the KV blocks of one client in the tiers below its device, and moves them."""

    def __init__(
        self,
        stack: TierStack,
        engine: Transfers,
        clock: Clock,
        *,
        block_bytes: int,
        block_tokens: int = 0,
        load_deadline_seconds: float,
        seals: Seals | None = None,
        host: HostArena | None = None,
        codecs: TierCodecs | None = None,
        recovery: Recovery | None = None,
        incidents: Mapping[Tier, Callable[[], list[Incident]]] | None = None,
        observers: Iterable[Observer] = (),
        close_stores: Callable[[], None] = lambda: None,
        copies_here: bool = True,
    ) -> None:
        self._stack = stack
        self._engine = engine
        self._clock = clock
        self._block_bytes = block_bytes
        self._load_deadline_seconds = load_deadline_seconds
        self.host = host  # where pinned blocks are read
        self._codecs = codecs or TierCodecs(BlockCodec.raw(block_bytes))
        self._codecs_chosen = _codecs_chosen(self._codecs, block_tokens)
        self._told_unfit: set[Tier] = set()
        self._pin_check = PinCheck(stack, seals, host)
        self._recovery = recovery  # None once it is complete
        self._num_recovered = 0
        self._incidents = dict(incidents or {})
        self._damages = Damages()
        self._observers = list(observers)
        self._close_stores = close_stores
        self._copies_here = copies_here  # by threads of this process, between device and HOST
        self._meters: dict[Tier, LinkMeter] = {}
        self._kept: list[Done] = []  # ended during `drain` or `recover`, for the next `step`
        self._num_unsettled = 0  # ends of transfers and lookups; above 0 between calls: lost
        self._prefetches = Prefetches(stack)
        self._is_quarantined = False
        self._unwanted: set[BlockKey] = set()  # on their way into HOST at a quarantine
        self._closed = False
        self._tell([self._codecs_chosen])

    def observe(self, observer: Observer) -> None:
        """Call `observer` with every event from now on."""
        self._observers.append(observer)
        tell([observer], [self._codecs_chosen])

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """Find how many leading blocks could be loaded, from where, how fast. Changes nothing."""
        if self._is_quarantined:
            return Match(len(keys))
        match = self._stack.match(keys)
        seconds = load_seconds(match.runs, self._block_bytes, self.rates)
        return match if seconds is None else replace(match, load_seconds=seconds)

    def where(self, keys: Sequence[BlockKey]) -> list[Tier | None]:
        """The fastest tier from which each block could be loaded now, or None. Changes nothing."""
        if self._is_quarantined:
            return [None] * len(keys)
        return self._stack.where(keys)

    @property
    def rates(self) -> dict[Tier, LinkRate]:
        """The rate of each link, as measured by loads so far, in bytes of blocks in HOST."""
        rates = {}
        for tier, meter in self._meters.items():
            if meter.rate is not None:
                share = self._codecs.of(tier).packed_bytes / self._block_bytes
                rates[tier] = meter.rate if share == 1 else meter.rate.per_bytes_of(share)
        return rates

    @property
    def codecs(self) -> Mapping[Tier, str]:
        """The name of each tier's codec."""
        return self._codecs.names

    @property
    def host_codec(self) -> BlockCodec:
        return self._codecs.host

    @property
    def host_block_bytes(self) -> int:
        """The size of a block in HOST: what crosses the link to the device."""
        return self._block_bytes

    def read_host(self, slot: Slot) -> memoryview:
        """The values of a block that is pinned in HOST, unpacked."""
        assert self.host is not None
        return self._codecs.host.values(self.host.view(slot))

    @property
    def is_moving(self) -> bool:
        """Whether anything is under way, including the recovery of a disk index."""
        waiting = self._recovery or len(self._stack.lookups) or self._prefetches
        return bool(waiting) or not self._stack.idle

    @property
    def is_available(self) -> bool:
        """Always, unlike that of a node."""
        return True

    @property
    def num_pinned(self) -> int:
        """How many blocks of HOST are pinned."""
        return len(self._stack.pins)

    @property
    def num_retained(self) -> int:
        """How many blocks of HOST hints protect from eviction."""
        return len(self._stack.retention)

    @property
    def is_prefetching(self) -> bool:
        return bool(self._prefetches)

    @property
    def num_host_blocks(self) -> int:
        return self._stack.host.capacity

    @property
    def num_pinnable_blocks(self) -> int:
        """How many blocks of HOST this client may pin at the same time."""
        return self._stack.host.capacity

    @property
    def num_blocks(self) -> int:
        """How many different blocks the tiers below the device can keep."""
        return self._stack.num_blocks

    def lookup(self, keys: Sequence[BlockKey]) -> LookupId | None:
        """Ask the shared tier for blocks that no tier of this instance has.

        Call it when a request arrives. Returns None if there is nothing to wait for. Otherwise
        `match` may find more once `is_looking_up` returns False: after milliseconds, and at the
        latest when the lookup deadline passes.
        """
        self._require_open()
        if self._is_quarantined:
            return None
        lookup_id = self._stack.lookups.ask(keys, self._clock.now())
        for question in self._stack.lookups.take_questions():
            self._engine.ask(question)
        return lookup_id

    def is_looking_up(self, lookup_id: LookupId) -> bool:
        return self._stack.lookups.is_open(lookup_id)

    look, is_looking = lookup, is_looking_up  # their names until 0.1, kept for one release

    def used(self, keys: Sequence[BlockKey], *, tenant: str = "") -> None:
        """Note that blocks were found on the device, so that lower tiers keep them too."""
        if self._is_quarantined:
            return
        self._stack.used(keys, self._clock.now(), tenant)

    def offer(
        self,
        keys: Sequence[BlockKey],
        *,
        tenant: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> None:
        """Write blocks that are in HOST to the lower tiers, after a save without `write_down`.

        Blocks that are not in HOST, or still on their way into it, are skipped. For `parents` see
        `save`.
        """
        if not self._is_quarantined:
            self._stack.offer(keys, self._clock.now(), tenant, parents)

    def note(self, match: Match) -> None:
        """Count a match in the metrics. Call it once per request, after acting on the match."""
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
        """Load blocks into device slots. Blocks that miss the deadline get the verdict EXPIRED.

        The deadline is `load_deadline_seconds` from the settings, or `deadline_seconds` from now.
        `patience_seconds` shortens it; it starts once earlier loads have finished.

        If a slot is None, the block is loaded into HOST only and pinned there. `Done.pins` names
        its slot, and the client must unpin it later. For `parents` see `save`.
        """
        self._require_open()
        now = self._clock.now()
        seconds = self._load_deadline_seconds if deadline_seconds is None else deadline_seconds
        if patience_seconds is not None:
            seconds = min(seconds, patience_seconds + self._seconds_ahead())
        ticket = self._stack.load(keys, into, now, now + seconds, tenant, parents)
        if self._is_quarantined:  # offered before
            self._stack.cancel(ticket, now)
        self._submit()
        return ticket

    def save(
        self,
        keys: Sequence[BlockKey],
        source: Sequence[Slot],
        *,
        tenant: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
        whole: bool = False,
        write_down: bool = True,
    ) -> TicketId:
        """Copy device slots into HOST, and from there to the lower tiers if `write_down`.

        Blocks that find no room in HOST get the verdict DROPPED. All blocks belong to `tenant`:
        their keys must include it, and it pays for them where tenants have a budget.
        A block's parent is the block before it, except at the positions in `parents` (None means
        that it has no parent or that it is unknown). Chains of blocks are evicted from their ends,
        and stores that prefer large values keep a chain together.

        If `whole`, the blocks are of use only together: either all that HOST lacks get room, or
        all of these are DROPPED. Their order means nothing, so none has a parent unless `parents`
        names one. Without `write_down` they stay in HOST until they are loaded or offered.
        """
        self._require_open()
        write_down = write_down and not self._is_quarantined
        ticket = self._stack.save(
            keys,
            source,
            self._clock.now(),
            tenant,
            parents,
            whole=whole,
            write_down=write_down,
        )
        self._submit()
        return ticket

    def pin(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        """Pin blocks for reading in HOST; returns each one's slot, or None if it is not there."""
        self._require_open()
        slots = self._pin_check.verify(keys, self._stack.pins.pin(keys))
        self._report_lost_pins()
        return slots

    def is_in_host(self, key: BlockKey) -> bool:
        """Whether `pin` would find the block."""
        return self._stack.host.is_ready(key)

    def are_in_host(self, keys: Sequence[BlockKey]) -> bool:
        """Whether all of these blocks are."""
        return self._stack.host.are_ready(keys)

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Remove one pin from each slot."""
        self._stack.pins.unpin(slots)

    def retain(self, keys: Sequence[BlockKey], seconds: float, name: str) -> int:
        """Keep leading blocks in HOST for a time, or until `name` is released; returns how many.

        A later call with the same name adds to its blocks and restarts the time for all of them.
        """
        self._require_open()
        return self._stack.retention.retain(keys, name, self._clock.now() + seconds)

    def release(self, name: str) -> int:
        """Stop retaining the blocks under this name; returns how many there were."""
        return self._stack.retention.release(name)

    def demote(self, keys: Sequence[BlockKey]) -> int:
        """Let HOST evict these blocks first, unless retained; returns how many were demoted."""
        return self._stack.retention.demote(keys)

    def keep_together(self, keys: Sequence[BlockKey]) -> None:
        """Evict these blocks together: if HOST or DISK loses one, it evicts the others next.

        Call it when they are saved, and again when they are used: it does not survive a restart.
        Blocks may belong to several such sets. They should have no parents (see `save`), because
        chains of blocks are evicted from their ends.
        """
        self._stack.checkpoints.keep(keys)

    def supersede(self, keys: Sequence[BlockKey]) -> None:
        """Let HOST and DISK evict a set of `keep_together` first: a later one has replaced it.

        Blocks that another set needs, and those that are retained, are left alone.
        """
        self._stack.checkpoints.supersede(keys)

    def discard(self, keys: Sequence[BlockKey]) -> int:
        """Drop blocks from HOST that are there; returns how many. Lower tiers keep theirs."""
        found = [key for key in keys if self._stack.host.is_ready(key)]
        self._stack.ledgers.drop(Tier.HOST, found)
        return len(found)

    def quarantine(self) -> None:
        """Offer no stored block any more, because an audit has found a wrong one.

        Loads end, matches find nothing, and nothing is written to lower tiers. A client that keeps
        part of its running sequences in HOST can still save there, and pin these blocks.
        """
        self._is_quarantined = True
        self._prefetches.clear()
        for ticket in self._stack.tickets:
            if ticket.direction is Direction.LOAD:
                self._stack.cancel(ticket.id, self._clock.now())
        # What is in HOST must not be found in place of what is computed from now on.
        self._stack.empty_host()
        self._unwanted = self._stack.host.filling_keys()
        self._submit()

    @property
    def is_quarantined(self) -> bool:
        return self._is_quarantined

    def prefetch(
        self,
        keys: Sequence[BlockKey],
        *,
        tenant: str = "",
        retain_seconds: float | None = None,
        name: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> int:
        """Load leading blocks from lower tiers into HOST; returns how many are known to be there.

        With `retain_seconds` the blocks that arrive are retained under `name`. There is no `Done`.
        At the positions in `parents` (see `save`) another chain of blocks begins.
        """
        self._require_open()
        if self._is_quarantined:
            return 0
        now = self._clock.now()
        begun = [self.lookup(chain) for chain in chains_of(keys, parents)]
        num_blocks = self._prefetches.ask(
            keys,
            self._load_deadline_seconds,
            tenant=tenant,
            lookups=[lookup for lookup in begun if lookup is not None],
            retain=None if retain_seconds is None else (name, now + retain_seconds),
            parents=parents,
        )
        if self._prefetches.advance(now):
            self._submit()
        return num_blocks

    def cancel(self, ticket: TicketId) -> None:
        """Give up a ticket. Its `Done` follows once no copy touches its device slots."""
        self._stack.cancel(ticket, self._clock.now())
        self._submit()

    def step(self) -> list[Done]:
        """Poll, settle, submit. Never blocks; call it often."""
        dones, self._kept = self._kept + self._advance(), []
        return dones

    def wait(self, tickets: Collection[TicketId], timeout_seconds: float = 60.0) -> list[Done]:
        """Step until all of `tickets` are done or time is up; returns every Done on the way.

        For scripts and tests. A client that has other work calls `step`.
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
        """Block until a transfer ends or time is up, for a client that has nothing else to do.

        Returns at once if tickets have ended already, as those that needed no transfer.
        """
        if not self._stack.tickets.have_ended:
            self._engine.wait(timeout_seconds)

    def drain(self, timeout_seconds: float = 60.0) -> bool:
        """Wait until nothing is under way, including writes to lower tiers.

        The next `step` returns the tickets that ended meanwhile. Returns False on timeout.
        """
        end = time.monotonic() + timeout_seconds
        while not self._is_drained and time.monotonic() < end:
            self._kept += self._advance()
            self._engine.wait(0.01)
        return self._is_drained

    @property
    def _is_drained(self) -> bool:
        # Slots of a disk can be written to once its index has been read.
        is_held_up = self._recovery is not None and self._stack.write_down.is_waiting
        return self._stack.idle and not is_held_up

    def recover(self, timeout_seconds: float = 600.0) -> bool:
        """Wait until the disk's index has been read. Serving does not need it."""
        end = time.monotonic() + timeout_seconds
        while self._recovery is not None and time.monotonic() < end:
            self._recover(wait_seconds=0.1)
            self._kept += self._advance()
        return self._recovery is None

    def open_host(self, slots: Sequence[Slot]) -> None:
        """Start using slots of HOST that were closed until now."""
        self._stack.host.open(slots)

    def close_host(self, slots: Sequence[Slot]) -> bool:
        """Stop using slots of HOST. Returns False while some are in use: then call it again."""
        self._stack.ledgers.close_host(slots)
        return self._stack.host.are_closed(slots)

    @property
    def num_free_host_blocks(self) -> int:
        return self._stack.host.num_free

    def empty_host(self) -> int:
        """Drop every block in DRAM; returns how many. Lower tiers keep theirs."""
        return self._stack.empty_host()

    def check(self) -> None:
        """Raise BookError if the books do not add up."""
        if self._num_unsettled:
            raise BookError(
                f"{counted(self._num_unsettled, 'end')} of transfers and lookups were lost in an "
                "error: the books wait for them forever"
            )
        audit(self._stack)

    def close(self, timeout_seconds: float = 30.0) -> bool:
        """Finish all saves, stop the threads and close the stores. False if a tier hangs."""
        if self._closed:
            return True
        self._closed = True
        self._prefetches.clear()
        drained = self.drain(timeout_seconds)
        stopped = self._stop(timeout_seconds)
        self._kept += self._advance()
        self._warn(self._damages.rest())
        if stopped:
            self._close_stores()
        return drained and stopped

    def let_go(self, timeout_seconds: float) -> bool:
        """End all loads and saves and remove all pins, because the client has lost its own books.

        No `Done` follows. Returns True once no copy touches a device slot. Blocks in the tiers
        stay, and are still written to the lower tiers.
        """
        self._prefetches.clear()
        for ticket in self._stack.tickets:
            self._stack.cancel(ticket.id, self._clock.now())
        self._submit()
        end = time.monotonic() + timeout_seconds
        while self._stack.tickets:
            if time.monotonic() >= end:
                return False
            self._engine.wait(0.01)
            self._advance()
        self._advance()  # settle the prefetches that ended last
        self._kept = []
        self._stack.pins.clear()
        return True

    def abandon(self, timeout_seconds: float) -> bool:
        """Close without finishing transfers, because the books cannot be trusted.

        Blocks written to lower tiers by then are complete, and verified when read. False if a tier
        hangs.
        """
        self._closed = True
        stopped = self._stop(timeout_seconds)
        if stopped:
            self._close_stores()
        return stopped

    def __enter__(self) -> Offloader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _advance(self) -> list[Done]:
        self._settle()
        self._stack.tick(self._clock.now())
        self._recover()
        if self._unwanted:
            self.discard(list(self._unwanted))
            self._unwanted = set(filter(self._stack.host.is_filling, self._unwanted))
        self._submit()
        dones = [self._pin_check.verify_done(done) for done in self._client_dones()]
        self._report_lost_pins()
        events = self._stack.ledgers.take_events()
        for event in events:
            if isinstance(event, Moved) and event.direction is Direction.LOAD:
                self._meters.setdefault(event.source, LinkMeter()).observe(event)
            elif isinstance(event, TierRested):
                what = f"{event.direction.value}s are paused for {event.seconds:.0f} s"
                log.warning("%s: %s after repeated errors: %s", event.tier.name, what, event.error)
            elif isinstance(event, TierRevived):
                log.warning("%s: %ss work again", event.tier.name, event.direction.value)
            elif isinstance(event, Lost) and event.verdict is Verdict.CORRUPT:
                self._warn_damaged(event.source, event.num_blocks, event.error)
            elif isinstance(event, Lost) and event.verdict is Verdict.UNFIT:
                self._warn_unfit(event.target)
        self._warn(self._damages.tick(self._clock.now()))
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
        """Report what stores found on their own: damaged blocks, or a folder that vanished."""
        for tier, take in self._incidents.items():
            for incident in take():
                if incident.num_damaged:
                    self._warn_damaged(tier, incident.num_damaged, incident.what)
                    self._tell([Damaged(tier, incident.num_damaged, incident.what)])
                if incident.survivors is not None:
                    num_blocks = self._stack.forget(tier, incident.survivors)
                    log.error("%s: %s; %d blocks were lost", tier.name, incident.what, num_blocks)
                    self._tell([TierEmptied(tier, num_blocks, incident.what)])

    def _warn_damaged(self, tier: Tier, num_blocks: int, error: str) -> None:
        self._warn(self._damages.note(tier, num_blocks, error, self._clock.now()))

    def _warn_unfit(self, tier: Tier) -> None:
        """Once for each tier: a model whose blocks do not fit has many of them."""
        if tier not in self._told_unfit:
            self._told_unfit.add(tier)
            log.warning(
                '%s: a block is not kept, because its values do not fit the codec "%s". It will be '
                "computed again. If many blocks are lost this way (penstock_unfit_blocks_total), "
                'set %s.codec to "raw". This is said only once.',
                tier.name,
                self._codecs.of(tier).name,
                tier.label,
            )

    def _warn(self, lines: Iterable[str]) -> None:
        for line in lines:
            log.warning("%s", line)

    def _report_lost_pins(self) -> None:
        counts = self._pin_check.take_lost()
        if num_corrupt := counts[Verdict.CORRUPT]:
            self._warn_damaged(Tier.HOST, num_corrupt, "in DRAM")
        self._tell(
            Lost(Tier.HOST, Tier.DEVICE, Direction.LOAD, verdict, count)
            for verdict, count in counts.items()
        )

    def _client_dones(self) -> list[Done]:
        """The tickets of the client that have ended. Settles and continues prefetches."""
        now = self._clock.now()
        dones: list[Done] = []
        for done in self._stack.tickets.take_dones():
            prefetched = self._prefetches.settle(done, now)
            if prefetched is None:
                dones.append(done)
            else:
                self._tell([Prefetched(*prefetched)])
        if self._prefetches.advance(now):
            self._submit()
        return dones

    def _seconds_ahead(self) -> float:
        """How long the links will be busy with earlier loads."""
        rates = self.rates
        return max(
            (
                rates[tier].seconds(count * self._block_bytes) if tier in rates else 0.0
                for tier, count in self._stack.num_loading.items()
            ),
            default=0.0,
        )

    def _stop(self, timeout_seconds: float) -> bool:
        """Stop the threads. False if one hangs: it still uses the stores, so leave them open."""
        stopped = self._engine.close(timeout_seconds)
        if self._recovery is not None:
            stopped &= self._recovery.stop(timeout_seconds)
        return stopped

    def _require_open(self) -> None:
        if self._closed:
            raise PenstockError("the offloader is closed; build a new one")

    def _submit(self) -> None:
        for transfer_id in self._stack.take_cancels():
            self._engine.cancel(transfer_id)
        while True:
            for transfer in self._stack.next_transfers(self._engine.has_room):
                if not self._engine.submit(transfer):
                    raise RuntimeError(
                        "the transfer engine refused a transfer although it had room"
                    )
            if not self._stack.has_more_to_plan:
                return
            if self._copies_here:
                # Planning holds the interpreter lock. Sleep, so that threads can start copies.
                time.sleep(_LET_COPIES_START_SECONDS)
            self._settle()

    def _settle(self) -> None:
        now = self._clock.now()
        outcomes, answers = self._engine.poll(), self._engine.take_answers()
        # An error on the way loses the rest of them.
        self._num_unsettled += len(outcomes) + len(answers)
        self._take_incidents()  # before the outcomes, because incidents explain them
        for outcome in outcomes:
            self._stack.settle(outcome, now)
            self._num_unsettled -= 1
        for answer in answers:
            self._stack.lookups.settle(answer, now)
            self._num_unsettled -= 1

    def _recover(self, wait_seconds: float = 0.0) -> None:
        """Enter blocks found on disk, for a few milliseconds at most."""
        recovery = self._recovery
        if recovery is None:
            return
        end = self._clock.now() + _RECOVERY_SECONDS_PER_STEP
        taken = False
        while (batch := recovery.take(wait_seconds)) is not None:
            self._num_recovered += self._stack.ledgers.adopt(recovery.tier, batch)
            taken = True
            if recovery.complete or self._clock.now() >= end:
                break
        if taken:
            progress = Recovered(
                recovery.tier, recovery.num_taken, recovery.num_slots, self._num_recovered
            )
            self._tell([progress])
        if recovery.complete:
            self._recovery = None

    def _tell(self, events: Iterable[Event]) -> None:
        tell(self._observers, events)


def _codecs_chosen(codecs: TierCodecs, block_tokens: int) -> CodecsChosen:
    chosen = tuple(
        TierCodec(tier, name, codecs.of(tier).packed_bytes) for tier, name in codecs.names.items()
    )
    return CodecsChosen(chosen, codecs.host.raw_bytes, block_tokens)
