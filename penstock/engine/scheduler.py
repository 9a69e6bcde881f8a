"""What runs next, on which blocks; what is preempted, saved, and loaded again.

The scheduler decides and keeps the device's book; it computes nothing. Every step it hands out
chunks of tokens (a prompt's next piece, or one token of a sequence that decodes) within a budget.
When the pool is full, blocks of running sequences leave it and are read from HOST (see `residency`
and `placement`). Where that may not be, the least urgent sequence is preempted: its complete blocks
have been saved as they were filled, so it resumes by loading them instead of computing them again.
Where one waits for room that others have had for a while, they take turns (see `rotation`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.costs.choose import LoadChoice
from penstock.engine.admission import Admission
from penstock.engine.admit import AdmissionPlan, Choose, plan_admission
from penstock.engine.blocks import BlockPool, CompletedBlocks
from penstock.engine.fairness import FairQueue
from penstock.engine.placement import Placement
from penstock.engine.request import Request, RequestPhase
from penstock.engine.residency import ColdReadBudget, ResidencyPolicy
from penstock.engine.rotation import Rotation
from penstock.engine.tiers import EngineTiers
from penstock.engine.two_ended_loads import TwoEndedLoads
from penstock.errors import PenstockError
from penstock.events import Decided, Event, Preempted, TurnEnded
from penstock.types import Done, Slot, TicketId, Tier, Verdict

_MAX_STALLS = 200  # steps
_RETRY_SECONDS = 0.02  # for one that found no room, while nobody has left


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `num_tokens` of a request from `start` on. The last one of its tokens is sampled.

    Of a prompt that was found whole the last token is computed all the same, for its logits. Its
    KV is present, maybe shared by others, and is not written again.
    """

    request: Request
    start: int
    num_tokens: int
    num_present: int = 0  # the first so many of them have their KV on the device

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == len(self.request.tokens)


class _Refusal(NamedTuple):
    """One that found no room."""

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._admission = admission
        self._tiers = tiers
        self._choose = choose
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._fair = FairQueue()
        self._waiting: list[Request] = []  # most urgent first
        self._running: list[Request] = []
        self._loading: dict[TicketId, Request] = {}
        self.placement = Placement(pool, residency, tiers)
        self.placement.follow(self._running)
        self._two_ended_loads = TwoEndedLoads(
            pool, tiers, block_tokens, max(block_tokens, max_num_batched_tokens // 4)
        )
        self._cold_reads = cold_reads
        self._rotation = rotation or Rotation(None)
        self._clock = clock
        self._short: Request | None = None  # lacked room in the last step
        self._refused = _Refusal(None, 0, 0.0)
        self._events: list[Event] = []
        self._entered: list[tuple[Request, RequestPhase]] = []
        self.num_preemptions = 0
        self.num_turns = 0  # that ended

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return sum(not request.num_preemptions for request in self._waiting)

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
        return not (self.has_work or self.placement.is_moving or len(self._two_ended_loads))

    def add(self, request: Request) -> None:
        """Queue a request that `Admission.check` let pass."""
        request.turn = self._fair.join(request.tenant, request.max_total_tokens)
        request.charged = request.turn
        if self._tiers is not None:
            request.lookup = self._tiers.lookup(request.chain.keys)
        self._enqueue(request)

    def __iter__(self) -> Iterator[Request]:
        """All requests: those that run, load and wait, each kind in its order."""
        yield from self._running
        yield from self._loading.values()
        yield from self._waiting

    def remove(self, request: Request) -> None:
        """Take out a request, ended or given up, at any moment.

        Blocks that a load still writes are freed at its end.
        """
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
        for turn in {request.turn, request.charged}:
            self._fair.ended(turn, request.max_computed)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, most urgent first; together within the token budget."""
        budget = self._max_num_batched_tokens
        chunks: list[Chunk] = []
        preempted = False
        self._end_a_turn()
        self.placement.balance()
        for request in self._two_ended_loads:
            self._meet(request)
        if self._fair.refresh():
            self._waiting.sort(key=lambda r: r.order)
        running = sorted(self._running, key=lambda r: r.order)
        if self._cold_reads is not None:
            running = self._cold_reads.pick(running)
        for request in running:
            if request.phase is not RequestPhase.RUNNING or not budget:
                continue  # preempted for one before it
            num_tokens = min(request.num_uncomputed, budget)
            num_tokens = self._two_ended_loads.end_of_chunk(request, num_tokens)
            while not self._make_room(request, request.num_computed + num_tokens):
                if self._is_soon_given_room(request) or self._stalls(request):
                    break
                victim = max(self._running, key=lambda r: r.order)
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                request.num_stalls = 0
                chunks.append(_chunk(request, num_tokens))
                budget -= num_tokens
        while budget and not preempted and self._has_seat:
            waiting = self._next_waiting()
            if waiting is None or (chunks and self._is_hopeless(waiting)):
                break
            if not self._admit(waiting, budget):
                break
            if waiting.phase is RequestPhase.RUNNING:
                num_tokens = min(waiting.num_uncomputed, budget)
                num_tokens = self._two_ended_loads.end_of_chunk(waiting, num_tokens)
                chunks.append(_chunk(waiting, num_tokens))
                budget -= num_tokens
        return chunks

    def computed(self, chunks: Sequence[Chunk]) -> None:
        """The chunks' KV is on the device: name and save the blocks that became complete."""
        complete: dict[str, CompletedBlocks] = {}  # by tenant
        for chunk in chunks:
            request = chunk.request
            if request.phase is not RequestPhase.RUNNING:
                continue
            request.num_computed = request.num_present = chunk.start + chunk.num_tokens
            again = min(request.num_computed, request.max_computed) - chunk.start
            request.num_recomputed_tokens += max(0, again)
            request.max_computed = max(request.max_computed, request.num_computed)
            start, end = request.num_named, request.num_computed // self._block_tokens
            complete.setdefault(request.tenant, CompletedBlocks(self._pool)).add(
                request.chain.key_before(start),
                request.chain.keys[start:end],
                request.table.slots(start, end),
            )
            request.num_named = end
        for tenant, blocks in complete.items():
            self.placement.save(blocks.keys, blocks.slots, tenant=tenant, parents=blocks.parents)

    def settle(self, done: Done) -> Request | None:
        """A load or save has ended; of a load, the request that goes on."""
        if self.placement.settle(done) or self._two_ended_loads.settle(done):
            return None
        request = self._loading.pop(done.ticket)
        request.ticket = None
        into, request.into = request.into, []
        pins: Sequence[Slot | None] = done.pins or (None,) * len(into)
        if request.phase is RequestPhase.FINISHED:  # aborted meanwhile
            self.placement.release_load(into, pins)
            self._drop_blocks(request)
            return None
        num_arrived = done.num_leading_ok
        places = []
        for key, slot, pin in zip(done.keys[:num_arrived], into, pins, strict=False):
            if slot is not None:
                self._pool.name(slot, key)
                places.append(int(slot))
            elif pin is not None:
                places.append(~pin)
        request.table.extend_places(places)
        self.placement.release_load(into[num_arrived:], pins[num_arrived:])
        arrived = len(request.table)
        request.num_named = arrived
        self._have(request, arrived * self._block_tokens)
        request.max_computed = max(request.max_computed, request.num_computed)
        request.num_loaded_tokens += num_arrived * self._block_tokens
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed
            request.found.update(tier for tier in done.sources[:num_arrived] if tier is not None)
            request.lost.update(verdict for verdict in done.verdicts if verdict is not Verdict.OK)
        self._run(request, arrived)
        return request

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def take_entered(self) -> list[tuple[Request, RequestPhase]]:
        """Who has entered which phase since the last call, in order."""
        entered, self._entered = self._entered, []
        return entered

    def check(self) -> None:
        self._pool.check()
        self.placement.check()
        held = [request for request in self._running if request.phase is not RequestPhase.RUNNING]
        if held or any(len(request.table) for request in self._waiting):
            raise PenstockError("a request is in the wrong queue, or holds blocks while it waits")

    @property
    def _has_seat(self) -> bool:
        return len(self._running) + len(self._loading) < self._max_num_seqs

    def _enter(self, request: Request, phase: RequestPhase) -> None:
        request.phase = phase
        self._entered.append((request, phase))

    def _enqueue(self, request: Request) -> None:
        self._enter(request, RequestPhase.WAITING)
        self._waiting.append(request)
        self._waiting.sort(key=lambda r: r.order)

    def _next_waiting(self) -> Request | None:
        """The most urgent of those that wait for no answer of the tier that instances share."""
        for request in self._waiting:
            if request.lookup is not None and self._tiers is not None:
                if self._tiers.is_looking_up(request.lookup):
                    continue
                request.lookup = None
            return request
        return None

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        need = -(-num_tokens // self._block_tokens) - len(request.table)
        if need <= 0:
            return True
        slots = self.placement.take(need, request)
        if slots is None:
            return False
        request.table.extend(slots)
        return True

    def _stalls(self, request: Request) -> bool:
        """Whether a sequence does better to wait a moment for room than to preempt for it."""
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
        plan = plan_admission(
            request,
            keys,
            len(request.table),
            len(request.tokens),
            budget=budget,
            block_tokens=self._block_tokens,
            room=self.placement,
            tiers=self._tiers,
            choose=self._choose,
        )
        if plan is None:
            self._refuse(request)
        return plan

    def _start(self, request: Request, plan: AdmissionPlan, budget: int) -> None:
        """Carry out a plan: the request loads, or runs its first chunk."""
        match, choice, num_shared = plan.match, plan.choice, plan.num_shared
        self._waiting.remove(request)
        self._admission.start(request.id, request.max_total_tokens)
        self._fair.started(request.turn)
        if match is not None and match.num_blocks:
            seconds = (choice.load_seconds, choice.compute_seconds)
            num_wanted = choice.num_blocks + choice.num_two_ended
            self._events.append(Decided(match.num_blocks, num_wanted, *seconds))
        self._have(request, num_shared * self._block_tokens)
        request.num_named = num_shared
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
        if plan.into:
            assert self._tiers is not None
            self._enter(request, RequestPhase.LOADING)
            request.into = plan.into
            parent = request.chain.key_before(num_shared)
            request.ticket = plan.load(self._tiers, parent, tenant=request.tenant)
            self._loading[request.ticket] = request
        else:
            self._run(request, num_shared)
            # Keep only the slots of the first chunk: a two-ended load fills those after it.
            num_tokens = min(request.num_uncomputed, budget)
            end = request.num_computed + self._two_ended_loads.end_of_chunk(request, num_tokens)
            num_first = max(0, -(-end // self._block_tokens) - num_shared)
            request.table.extend(plan.first_slots[:num_first])
            self._pool.release(plan.first_slots[num_first:])
        self._rotation.wake(request)

    def _run(self, request: Request, num_there: int) -> None:
        """So many of its blocks are there, and others may come from the back."""
        self._enter(request, RequestPhase.RUNNING)
        self._running.append(request)
        self._rotation.begin(request, self._clock())
        end, request.two_ended_end = request.two_ended_end, 0
        if end > num_there:
            self._two_ended_loads.begin(request, num_there, end)

    def _meet(self, request: Request) -> None:
        num_computed = request.num_computed
        if self._two_ended_loads.try_to_meet(request):
            request.num_named = len(request.table)
            self._have(request, request.num_named * self._block_tokens)
            request.max_computed = max(request.max_computed, request.num_computed)
            if not request.num_preemptions:
                request.num_cached_tokens += request.num_computed - num_computed

    @staticmethod
    def _have(request: Request, num_tokens: int) -> None:
        """So many leading tokens have their KV on the device."""
        request.num_present = num_tokens
        # At least the last token is computed: its logits are what the request came for.
        request.num_computed = min(num_tokens, len(request.tokens) - 1)

    def _refuse(self, request: Request) -> None:
        """There is no room for it now."""
        self._drop_blocks(request)
        self._short = request
        self._refused = _Refusal(request, self._pool.num_available, self._clock())

    def _is_hopeless(self, request: Request) -> bool:
        """Whether it found no room a moment ago, and there is no more now: to look takes time."""
        refused = self._refused
        if refused.request is not request or self._pool.num_available > refused.num_available:
            return False
        self._short = request
        return self._clock() - refused.at < _RETRY_SECONDS

    def _is_soon_given_room(self, request: Request) -> bool:
        """Whether somebody's turn is over: the next step begins with ending it."""
        if self._rotation.over(self._running, request, self._clock()) is None:
            return False
        self._short = request
        return True

    def _end_a_turn(self) -> None:
        """Whoever has had its turn makes room for one that lacked it in the last step."""
        short, self._short = self._short, None
        if short is None or short.phase is RequestPhase.FINISHED:
            return
        is_one_coming_back = any(request.num_preemptions for request in self._loading.values())
        if short.phase is RequestPhase.WAITING and is_one_coming_back:
            return  # one at a time, so that the others go on meanwhile
        now = self._clock()
        request = self._rotation.over(self._running, short, now)
        if request is not None and self._rotation.rest(request, now):
            self.num_turns += 1
            self._events.append(TurnEnded(request.num_computed))
            request.turn = self._fair.join(request.tenant, 0.0)
            self._give_up(request)

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._events.append(Preempted(request.num_computed))
        self._give_up(request)

    def _give_up(self, request: Request) -> None:
        """A running sequence leaves the device, and waits."""
        self._drop_blocks(request)
        self._running.remove(request)
        request.num_stalls = 0
        request.num_preemptions += 1
        self._enqueue(request)

    def _drop_blocks(self, request: Request) -> None:
        self._two_ended_loads.leave(request)
        self.placement.drop(request)
        request.num_computed = request.num_named = request.num_present = 0


def _chunk(request: Request, num_tokens: int) -> Chunk:
    start = request.num_computed
    return Chunk(request, start, num_tokens, request.num_present - start)
