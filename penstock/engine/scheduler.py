"""Decides what runs next and on which blocks, and what is preempted, saved and loaded.

The scheduler keeps the device's books and computes nothing. For every step it hands out chunks of
tokens within a budget: a prompt's next piece, or one token of a sequence that decodes. When the
pool is full, blocks of running sequences leave it and are read from HOST (see `residency` and
`placement`). If they may not, the least urgent sequence is preempted. Its complete blocks have been
saved already, so it resumes by loading them instead of computing them again. Sequences can also
take turns on the device (see `rotation`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.costs.choose import LoadChoice
from penstock.engine.admission import Admission
from penstock.engine.admit import AdmissionPlan, Choose, plan_admission
from penstock.engine.announcer import Announcer
from penstock.engine.anywhere.fills import Fills, make_fill
from penstock.engine.anywhere.loads import SegmentLoads
from penstock.engine.anywhere.looks import LookPart
from penstock.engine.anywhere.placing import Placing
from penstock.engine.auditing import EngineAudits
from penstock.engine.awaited_prefills import AwaitedPrefills, ComputeSeconds
from penstock.engine.blocks import BlockPool, CompletedBlocks
from penstock.engine.brought_loads import BroughtLoads
from penstock.engine.fairness import FairQueue
from penstock.engine.lossy import LossyBlocks
from penstock.engine.placement import Placement
from penstock.engine.request import Request, RequestPhase
from penstock.engine.residency import ColdReadBudget, ResidencyPolicy
from penstock.engine.rotation import Rotation
from penstock.engine.table import Places
from penstock.engine.tiers import EngineTiers
from penstock.engine.two_ended_loads import TwoEndedLoads
from penstock.errors import PenstockError
from penstock.events import Decided, Event, Preempted, TurnEnded
from penstock.types import BlockKey, Done, Match, Slot, TicketId, Tier, Verdict

_MAX_STALLS = 200  # steps
_RETRY_SECONDS = 0.02  # until a request that found no room is tried again


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `num_tokens` of a request from `start` on. After its last token, one is sampled.

    They are consecutive, unless tokens between them were placed (see `anywhere`).

    If a whole prompt was found, its last token is still computed, for its logits. Its KV is
    present and may be shared, so it is not written again.
    """

    request: Request
    start: int
    num_tokens: int
    num_present: int = 0  # how many of them, from the first, have their KV on the device
    # Of its tokens, in order; None if they are consecutive.
    positions: Places | None = field(default=None, compare=False)

    @property
    def end(self) -> int:
        """The position after its last token."""
        if self.positions is None:
            return self.start + self.num_tokens
        return int(self.positions[-1]) + 1

    @property
    def samples(self) -> bool:
        return self.end == len(self.request.tokens) and not self.request.is_fill


class _Refusal(NamedTuple):
    """A request that found no room, and when."""

    request: Request | None
    num_available: int  # blocks
    at: float


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        *,
        admission: Admission,
        tiers: EngineTiers | None = None,
        choose: Choose = lambda match, num_past: LoadChoice(match.num_blocks),
        max_num_batched_tokens: int,
        max_num_seqs: int,
        residency: ResidencyPolicy | None = None,
        cold_reads: ColdReadBudget | None = None,
        rotation: Rotation | None = None,
        audits: EngineAudits | None = None,
        lossy: LossyBlocks | None = None,
        announcer: Announcer | None = None,
        looks_per_token: int = 1,
        max_brought: Callable[[], int] = lambda: 0,
        takes_apart: Callable[[int, int], bool] = lambda num_tokens, end: True,
        compute_seconds: ComputeSeconds = lambda num_tokens, num_past: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_brought`: how many blocks a step may bring now (see `brought_loads`).

        `takes_apart`: see `Runner`.
        """
        self._pool = pool
        self._block_tokens = block_tokens
        self._admission = admission
        self._tiers = tiers
        self._choose = choose
        self._max_num_batched_tokens = max_num_batched_tokens
        self._takes_apart = takes_apart
        self._max_num_seqs = max_num_seqs
        self._fair = FairQueue()
        self._waiting: list[Request] = []  # most urgent first
        self._running: list[Request] = []
        self._loading: dict[TicketId, Request] = {}
        self._distrusted: set[TicketId] = set()  # loads whose blocks must not be used
        self._lossy = lossy or LossyBlocks(block_tokens)
        self.placement = Placement(pool, residency, tiers, self._lossy.returned)
        self.placement.follow(self._running)
        self._two_ended_loads = TwoEndedLoads(
            pool, tiers, block_tokens, max(block_tokens, max_num_batched_tokens // 4), announcer
        )
        self.brought_loads = BroughtLoads(pool, tiers, announcer, max_brought)
        self._awaited = AwaitedPrefills(pool, tiers, block_tokens, compute_seconds, announcer)
        self._segments: SegmentLoads[Request] = SegmentLoads(
            pool,
            tiers,
            block_tokens,
            self.placement.take,
            self._choose_one_ended,
            self._lossy,
            looks_per_token,
        )
        self._fills: Fills[Request] = Fills(self._segments.num_missing, make_fill)
        self._cold_reads = cold_reads
        self._rotation = rotation or Rotation(None)
        self._audits = audits
        self._announcer = announcer
        self._clock = clock
        self._short: Request | None = None  # found no room in the last step
        self._refused = _Refusal(None, 0, 0.0)
        self._stuck: dict[Request, None] = {}  # see `take_stuck`
        self._events: list[Event] = []
        self._entered: list[tuple[Request, RequestPhase]] = []
        self.num_preemptions = 0
        self.num_turns = 0  # that have ended

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return sum(not (each.num_preemptions or each.is_fill) for each in self._waiting)

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._loading)

    @property
    def idle(self) -> bool:
        return self._is_still and not self.has_work

    def add(self, request: Request) -> None:
        """Queue a request that has passed `Admission.check`."""
        request.place = self._fair.join(request.tenant, request.max_total_tokens)
        request.charged_place = request.place
        if self._tiers is not None:
            keys = [request.chain.keys, *(segment.keys for segment in request.segments)]
            begun = [self._tiers.lookup(each) for each in keys]
            request.lookups = [lookup for lookup in begun if lookup is not None]
        if self._announcer is not None:
            self._announcer.arrived(request)
        self._enqueue(request)

    def __iter__(self) -> Iterator[Request]:
        """All requests: first running, then loading, then waiting ones, each group in order."""
        yield from self._running
        yield from self._loading.values()
        yield from self._waiting

    def remove(self, request: Request) -> None:
        """Remove a request that has ended or is aborted, in any phase.

        Blocks that a load still writes to are freed when the load ends.
        """
        for fill in self._fills.leave(request):
            self._end_fill(fill)
        if request.phase is RequestPhase.LOADING:
            assert self._tiers is not None
            assert request.ticket is not None
            self._tiers.cancel(request.ticket)
        elif request.phase is RequestPhase.RUNNING:
            self._drop_blocks(request)
            self._running.remove(request)
        elif request.phase is RequestPhase.WAITING:
            self._waiting.remove(request)
            self._rotation.wake(request)
        request.phase = RequestPhase.FINISHED
        for place in {request.place, request.charged_place}:
            self._fair.ended(place, request.max_computed)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, most urgent first, within the token budget."""
        budget = self._max_num_batched_tokens
        chunks: list[Chunk] = []
        preempted = False
        self._segments.release_read()
        self._end_turn()
        self.placement.balance()
        for request in self._two_ended_loads:
            self._join_two_ended_load(request)
        self._awaited.advance(self._clock())
        if self._fair.refresh():
            self._waiting.sort(key=lambda r: r.order)
        running = sorted((r for r in self._running if r.is_ready()), key=lambda r: r.order)
        if self._cold_reads is not None:
            running = self._cold_reads.pick(running)
        for request in running:
            if request.phase is not RequestPhase.RUNNING or not budget:
                continue  # preempted for a more urgent one
            if self._awaited.holds(request) or request.is_ending:
                continue
            num_tokens = min(request.num_uncomputed, budget)
            work = None
            if request.segments:
                work = self._segments.next_work(request, num_tokens)
                if work is None:
                    continue  # it waits for its segments
                end = work.end
            else:
                num_tokens = self._two_ended_loads.end_of_chunk(request, num_tokens)
                end = request.num_computed + num_tokens
            while not self._make_room(request, end):
                if any(each.is_ending for each in self._running):
                    break  # its blocks are free in the next step
                if self._stays_in_host(request):
                    continue
                if self._gets_room_soon(request) or self._stalls(request):
                    break
                victim = max(self._running, key=lambda r: r.order)
                # With the token that is not read yet, it may end.
                if self._is_still and len(self._running) == 1 and not request.num_expected:
                    self._stuck[request] = None
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                request.num_stalls = 0
                if work is None:
                    chunks.append(_chunk(request, num_tokens))
                else:
                    num_tokens = work.num_charged
                    if work.places:
                        self._segments.place(request)
                    if work.num_looked:
                        self._segments.look(request, work.num_looked)
                    if len(work.positions):
                        chunks.append(_scattered_chunk(request, work.positions))
                budget -= num_tokens
        while budget and not preempted and self._has_seat:
            waiting = self._next_waiting()
            if waiting is None or (chunks and self._is_hopeless(waiting)):
                break
            if not self._admit(waiting, budget):
                break
            if waiting.phase is RequestPhase.RUNNING and not self._is_held(waiting):
                num_tokens = min(waiting.num_uncomputed, budget)
                num_tokens = self._two_ended_loads.end_of_chunk(waiting, num_tokens)
                chunks.append(_chunk(waiting, num_tokens))
                budget -= num_tokens
        return chunks

    @property
    def is_looking(self) -> bool:
        """Whether the step looks at tokens, to choose which are mended."""
        return self._segments.is_looking

    def take_placings(self) -> tuple[list[Placing], list[LookPart[Request]]]:
        """What must be done before the chunks are computed.

        First KV is copied, whose sources are held until the next step. Then tokens are looked at,
        to choose which are mended (see `looks`).
        """
        return self._segments.take_placings()

    def _is_held(self, request: Request) -> bool:
        """Whether a request that starts computes nothing in this step."""
        return bool(request.segments) or self._awaited.holds(request) or not request.is_ready()

    def queued(self, chunks: Sequence[Chunk]) -> None:
        """A step is queued on the device: whatever is queued later waits for it there."""
        for chunk in chunks:
            self.brought_loads.queued(chunk.request)

    def computed(self, chunks: Sequence[Chunk]) -> None:
        """The chunks' KV is on the device: name and save the blocks that are now complete."""
        complete: dict[str, CompletedBlocks] = {}  # by tenant
        for chunk in chunks:
            request = chunk.request
            if request.phase is not RequestPhase.RUNNING:
                continue
            request.num_computed = chunk.end
            if request.segments:
                request.num_computed = self._segments.skip(request)
            request.num_present = request.num_computed
            again = min(request.num_computed, request.max_computed) - chunk.start
            request.num_recomputed_tokens += max(0, again)
            request.max_computed = max(request.max_computed, request.num_computed)
            start, end = request.num_named, request.num_computed // self._block_tokens
            keys, slots = request.chain.keys[start:end], request.table.slots(start, end)
            if self._announcer is not None:
                self._announcer.completes(request, range(start, end))
            completed = complete.setdefault(request.tenant, CompletedBlocks(self._pool))
            completed.add(request.chain.key_before(start), keys, slots)
            self._lossy.computed(request, slots)
            request.num_named = end
            if self._audits is not None:
                self._audits.computed(request, keys, slots)
        for tenant, blocks in complete.items():
            if self._audits is not None:
                blocks = blocks.without(self._audits.keeps_from_tiers)
            self.placement.save(blocks.keys, blocks.slots, tenant=tenant, parents=blocks.parents)
        for request in {chunk.request: None for chunk in chunks}:
            has_ended = request.num_computed == len(request.tokens)
            if request.is_fill and has_ended and request.phase is RequestPhase.RUNNING:
                self._end_fill(request)

    def _end_fill(self, fill: Request) -> None:
        """A segment is computed, or is not needed any more."""
        self._fills.ended(fill)
        self._admission.end(fill.id, self._clock())
        self.remove(fill)

    def settle(self, done: Done) -> Request | None:
        """Finish a load or a save. Returns the request that was waiting for the load, if any."""
        if self._audits is not None and self._audits.settle(done):
            return None
        if self.placement.settle(done) or self._two_ended_loads.settle(done):
            return None
        if self._segments.settle(done):
            return None
        if (came := self._awaited.settle(done, self._clock())) is not None:
            self._take_awaited(*came, done)
            return None
        request = self._loading.pop(done.ticket)
        request.ticket = None
        into, request.into = request.into, []
        pins: Sequence[Slot | None] = done.pins or (None,) * len(into)
        if request.phase is RequestPhase.FINISHED:  # aborted during the load
            self.placement.release_load(into, pins)
            self._drop_blocks(request)
            return None
        if done.ticket in self._distrusted:
            self._distrusted.remove(done.ticket)
            self.placement.release_load(into, pins)
            self._drop_blocks(request)
            request.num_preemptions += 1
            self._enqueue(request)
            return None
        num_arrived = done.num_leading_ok
        start = len(request.table)
        if request.is_brought:
            self.brought_loads.arrive(request, into[:num_arrived], pins[:num_arrived])
            request.num_named = start  # until the step that brings them is queued
        else:
            self._enter_loaded(request, done.keys[:num_arrived], into, pins)
            request.num_named = len(request.table)
        self.placement.release_load(into[num_arrived:], pins[num_arrived:])
        arrived = len(request.table)
        if self._audits is not None:
            self._audits.loaded(request, start, into[:num_arrived], done.sources[:num_arrived])
        self._set_present(request, arrived * self._block_tokens)
        request.max_computed = max(request.max_computed, request.num_computed)
        request.num_loaded_tokens += num_arrived * self._block_tokens
        self._lossy.loaded(request, num_arrived, into[:num_arrived])
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed
            request.found.update(tier for tier in done.sources[:num_arrived] if tier is not None)
            request.lost.update(verdict for verdict in done.verdicts if verdict is not Verdict.OK)
        self._run(request, arrived)
        return request

    def _enter_loaded(
        self,
        request: Request,
        keys: Sequence[BlockKey],
        into: Sequence[Slot | None],
        pins: Sequence[Slot | None],
    ) -> None:
        """Append blocks that were loaded to a request's table, and name those on the device."""
        if self._announcer is not None:
            first = len(request.table)
            on_device = [n for n, slot in enumerate(into[: len(keys)], first) if slot is not None]
            self._announcer.completes(request, on_device)
        places = []
        for key, slot, pin in zip(keys, into, pins, strict=False):
            if slot is not None:
                self._pool.name(slot, key)
                places.append(int(slot))
            elif pin is not None:
                places.append(~pin)
        request.table.extend_places(places)

    def distrust(self) -> None:
        """Compute everything again: KV that was loaded turned out to be wrong."""
        for request in list(self._running):
            self._preempt(request)
        self._distrusted.update(self._loading)
        for request in self._loading.values():
            self._segments.leave(request)
        self.placement.distrust()
        self._pool.distrust()

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def take_stuck(self) -> list[Request]:
        """Requests that will never find room: they were alone, and nothing was about to change.

        Their blocks that do not fit HOST's codec cannot leave the device.
        """
        stuck, self._stuck = self._stuck, {}
        waiting = [request for request in stuck if request.phase is RequestPhase.WAITING]
        for request in waiting:
            if request.is_fill:  # those who wait for it compute its segment themselves
                self._end_fill(request)
        return [request for request in waiting if not request.is_fill]

    def take_entered(self) -> list[tuple[Request, RequestPhase]]:
        """The requests that have entered a phase since the last call, in order."""
        entered, self._entered = self._entered, []
        return entered

    def check(self) -> None:
        self._pool.check()
        self.placement.check()
        held = [request for request in self._running if request.phase is not RequestPhase.RUNNING]
        if held or any(len(request.table) for request in self._waiting):
            raise PenstockError("a request is in the wrong queue or holds blocks while it waits")

    @property
    def _is_still(self) -> bool:
        """Whether no load or save is under way: only running requests can free blocks."""
        is_auditing = self._audits is not None and self._audits.is_moving
        is_moving = self.placement.is_moving or len(self._two_ended_loads) or is_auditing
        is_moving = is_moving or len(self._segments)
        return not (self._loading or is_moving or len(self._awaited))

    @property
    def _has_seat(self) -> bool:
        num_running = sum(not request.is_ending for request in self._running)
        return num_running + len(self._loading) < self._max_num_seqs

    def _enter(self, request: Request, phase: RequestPhase) -> None:
        request.phase = phase
        self._entered.append((request, phase))

    def _enqueue(self, request: Request) -> None:
        self._enter(request, RequestPhase.WAITING)
        self._waiting.append(request)
        self._waiting.sort(key=lambda r: r.order)

    def _next_waiting(self) -> Request | None:
        """The most urgent waiting request whose lookups in the remote tier have ended, or a fill
        that it needs."""
        for request in list(self._waiting):
            if request.lookups and self._tiers is not None:
                if any(map(self._tiers.is_looking_up, request.lookups)):
                    continue
                request.lookups = []
            if request.num_expected:
                return None  # preempted a moment ago: its last token is read first
            if not (request.segments and self._waits_for_fills(request)):
                return request
            if (fill := self._fills.next_for(request)) is not None:  # it may be new in the queue
                return fill
        return None

    def _waits_for_fills(self, request: Request) -> bool:
        """Whether segments of a waiting request are computed first."""
        if request.params.awaits_prefill and not request.has_stopped_waiting:
            return False  # another server computes them
        if not request.has_filled:
            wanted = self._segments.wanted(request)
            for fill in self._fills.start(request, wanted, self._clock()):
                # As urgent as the request. Its work is not charged again: it is part of the prompt.
                fill.place = fill.charged_place = replace(request.place)
                self._enqueue(fill)
            self._waiting.sort(key=lambda r: r.order)  # one that was there may be more urgent now
        return bool(request.fills)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        need = -(-num_tokens // self._block_tokens) - len(request.table)
        if need <= 0:
            return True
        slots = self.placement.take(need, request)
        if slots is None:
            return False
        request.table.extend(slots)
        return True

    def _stays_in_host(self, request: Request) -> bool:
        """Whether blocks that would arrive on the device have given up their room."""
        may_be_cold = self.placement.may_be_cold(request)
        return may_be_cold and self.brought_loads.stay_in_host(request)

    def _stalls(self, request: Request) -> bool:
        """Whether a sequence should wait for running saves instead of preempting another."""
        request.num_stalls += 1
        return self.placement.can_wait() and request.num_stalls < _MAX_STALLS

    def _admit(self, request: Request, budget: int) -> bool:
        """Start a waiting request. If False, it has to wait and nothing has changed."""
        plan = self._plan(request, budget)
        if plan is None:
            return False
        self._start(request, plan, budget)
        return True

    def _plan(self, request: Request, budget: int) -> AdmissionPlan | None:
        if not request.num_preemptions and not self._admission.fits(request.max_total_tokens):
            return None
        keys = request.chain.keys[: len(request.tokens) // self._block_tokens]
        request.table.extend(self._pool.share(keys))
        if request.segments and not self._segments.has_room(request):
            self._refuse(request)
            return None
        choose = self._choose_one_ended if request.segments else self._choose
        if request.params.awaits_prefill and not request.has_stopped_waiting:
            choose = _all_of_it
        if self._audits is not None:
            choose = self._audits.choosing(request, choose)
        plan = plan_admission(
            request,
            keys,
            len(request.table),
            len(request.tokens),
            budget=budget,
            block_tokens=self._block_tokens,
            room=self.placement,
            tiers=self._tiers,
            choose=choose,
        )
        if plan is None:
            self._refuse(request)
        return plan

    def _choose_one_ended(self, match: Match, num_past: int) -> LoadChoice:
        """For prompts with segments, which are not computed from their front meanwhile."""
        return self._choose(match, num_past).one_ended

    def _start(self, request: Request, plan: AdmissionPlan, budget: int) -> None:
        """Carry out a plan: the request loads, or runs its first chunk."""
        match, choice, num_shared = plan.match, plan.choice, plan.num_shared
        self._waiting.remove(request)
        self._admission.start(request.id, request.max_total_tokens)
        self._fair.started(request.place)
        if match is not None and match.num_blocks:
            seconds = (choice.load_seconds, choice.compute_seconds)
            num_wanted = choice.num_blocks + choice.num_two_ended
            self._events.append(Decided(match.num_blocks, num_wanted, *seconds))
        self._set_present(request, num_shared * self._block_tokens)
        request.num_named = num_shared
        self._lossy.shared(request, request.table.slots(0, num_shared))
        if choice.num_two_ended:
            request.two_ended_end = num_shared + choice.num_blocks + choice.num_two_ended
        if not request.num_preemptions:
            if self._tiers is not None:
                plan.count_hits(self._tiers, tenant=request.tenant)
            request.num_cached_tokens = request.num_computed
            request.found[Tier.DEVICE] = request.matched[Tier.DEVICE] = num_shared
            if match is not None:
                request.matched.update({tier: match.num_from(tier) for tier in Tier})
                request.estimate = (choice.load_seconds, choice.compute_seconds)
        if request.segments:
            self._segments.begin(request, (num_shared + len(plan.into)) * self._block_tokens)
        if plan.into:
            assert self._tiers is not None
            self._enter(request, RequestPhase.LOADING)
            request.into = plan.into
            parent = request.chain.key_before(num_shared)
            request.is_brought = self._brings(request, plan, budget)
            if request.is_brought:  # until the step, they only need to stay in HOST
                plan = plan._replace(into=[None] * len(plan.into))
            request.ticket = plan.load(self._tiers, parent, tenant=request.tenant)
            self._loading[request.ticket] = request
        else:
            if self._audits is not None:
                self._audits.start(request, num_shared)
            self._run(request, num_shared)
            # Keep only the slots of the first chunk: a two-ended load fills those after it.
            num_tokens = min(request.num_uncomputed, budget)
            end = request.num_computed + self._two_ended_loads.end_of_chunk(request, num_tokens)
            num_first = max(0, -(-end // self._block_tokens) - num_shared)
            if self._is_held(request):
                num_first = 0
            request.table.extend(plan.first_slots[:num_first])
            self._pool.release(plan.first_slots[num_first:])
        self._rotation.wake(request)

    def _brings(self, request: Request, plan: AdmissionPlan, budget: int) -> bool:
        """Whether the step that computes the rest of a prompt brings what is loaded for it.

        Only if nothing else runs or waits: everything in that step waits for the link.
        """
        if self._running or self._loading or self._waiting or self._audits is not None:
            return False
        if request.segments or request.params.awaits_prefill:
            return False
        num_present = (plan.num_shared + len(plan.into)) * self._block_tokens
        num_tokens = min(len(request.tokens), num_present + budget)
        num_blocks = -(-num_tokens // self._block_tokens)
        is_short = self._takes_apart(max(1, num_tokens - num_present), num_tokens)
        return self.brought_loads.suits(plan, num_blocks, is_short=is_short)

    def _run(self, request: Request, num_there: int) -> None:
        """Run a request with `num_there` blocks, and begin its two-ended load if it has one."""
        self._enter(request, RequestPhase.RUNNING)
        self._running.append(request)
        self._rotation.begin(request, self._clock())
        end, request.two_ended_end = request.two_ended_end, 0
        self._awaited.begin(request, self._clock())
        if end > num_there:
            self._two_ended_loads.begin(request, num_there, end)

    def _take_awaited(self, request: Request, num_arrived: int, done: Done) -> None:
        """Enter blocks that another server has computed."""
        if not num_arrived:
            return
        start, request.num_named = request.num_named, len(request.table)
        slots = request.table.slots(start, request.num_named)
        self._lossy.loaded(request, num_arrived, slots)
        if self._audits is not None:
            self._audits.loaded(request, start, slots, done.sources[:num_arrived])
        self._set_present(request, request.num_named * self._block_tokens)
        request.max_computed = max(request.max_computed, request.num_computed)
        request.num_loaded_tokens += num_arrived * self._block_tokens
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed
            request.found.update(tier for tier in done.sources[:num_arrived] if tier is not None)

    def _join_two_ended_load(self, request: Request) -> None:
        num_computed = request.num_computed
        if self._two_ended_loads.try_to_join(request):
            request.num_named = len(request.table)
            first = num_computed // self._block_tokens
            joined = request.table.slots(first, request.num_named)
            self._lossy.loaded(request, request.num_named - first, joined)
            if self._audits is not None:
                start = num_computed // self._block_tokens
                slots = request.table.slots(start, request.num_named)
                self._audits.loaded(request, start, slots, ())
            self._set_present(request, request.num_named * self._block_tokens)
            request.max_computed = max(request.max_computed, request.num_computed)
            if not request.num_preemptions:
                request.num_cached_tokens += request.num_computed - num_computed

    @staticmethod
    def _set_present(request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens have their KV on the device."""
        request.num_present = num_tokens
        # The last token is always computed, because sampling needs its logits.
        request.num_computed = min(num_tokens, len(request.tokens) - 1)

    def _refuse(self, request: Request) -> None:
        """Release what a request held while it was planned: there is no room for it now."""
        self._drop_blocks(request)
        if self._is_still and not self._running:
            self._stuck[request] = None
        self._short = request
        self._refused = _Refusal(request, self._pool.num_available, self._clock())

    def _is_hopeless(self, request: Request) -> bool:
        """Whether it found no room a moment ago and none was freed since: planning takes time."""
        refused = self._refused
        if refused.request is not request or self._pool.num_available > refused.num_available:
            return False
        self._short = request
        return self._clock() - refused.at < _RETRY_SECONDS

    def _gets_room_soon(self, request: Request) -> bool:
        """Whether another sequence's turn is over, so that the next step begins by ending it."""
        if self._rotation.over(self._running, request, self._clock()) is None:
            return False
        self._short = request
        return True

    def _end_turn(self) -> None:
        """End one turn, if a request found no room in the last step."""
        short, self._short = self._short, None
        if short is None or short.phase is RequestPhase.FINISHED:
            return
        is_one_returning = any(request.num_preemptions for request in self._loading.values())
        if short.phase is RequestPhase.WAITING and is_one_returning:
            return  # one sequence returns at a time, so that the others keep running
        now = self._clock()
        request = self._rotation.over(self._running, short, now)
        if request is not None and self._rotation.rest(request, now):
            self.num_turns += 1
            self._events.append(TurnEnded(request.num_computed))
            request.place = self._fair.join(request.tenant, 0.0)
            self._requeue(request)

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._events.append(Preempted(request.num_computed))
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Move a running sequence back to the queue."""
        self._drop_blocks(request)
        self._running.remove(request)
        request.num_stalls = 0
        request.num_preemptions += 1
        self._enqueue(request)

    def _drop_blocks(self, request: Request) -> None:
        self._two_ended_loads.leave(request)
        self._awaited.leave(request)
        self._segments.leave(request)
        if self._audits is not None:
            self._audits.left(request)
        self.placement.drop(request)
        request.num_computed = request.num_named = request.num_present = 0


def _all_of_it(match: Match, num_past: int) -> LoadChoice:
    """For a prompt that another server computes: to compute it here is what must not happen."""
    return LoadChoice(match.num_blocks)


def _chunk(request: Request, num_tokens: int) -> Chunk:
    start = request.num_computed
    return Chunk(request, start, num_tokens, request.num_present - start)


def _scattered_chunk(request: Request, positions: Places) -> Chunk:
    start, num_tokens = int(positions[0]), len(positions)
    num_present = max(0, request.num_present - start)
    is_consecutive = positions[-1] - start == num_tokens - 1
    return Chunk(request, start, num_tokens, num_present, None if is_consecutive else positions)
