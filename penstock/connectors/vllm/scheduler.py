"""The scheduler's side: turns vLLM's calls into loads and saves.

    lookup ─► allocated ─► orders ─► report ─► ... ─► finished
    lookups   loads        saves     dispatch          (the files that do it)

vLLM never waits for a save: it may give a block to another request while the copy is under way.
The step that writes to the block is fenced: it starts only after the save has read it.

The workers are ordered to load blocks as these arrive in DRAM. They report the request as ready
together with the blocks that could not be loaded, and vLLM computes those. No load is part of the
step that computes the rest of its prompt: if steps overlap and a block fails, vLLM discards the
token of that step, but delivers the token of the next one, computed from the same blocks.

A thread keeps the lower tiers going while vLLM is idle. Everything here runs under one lock, and
nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.audits.auditor import Auditor
from penstock.books.sessions import Sessions
from penstock.build import Delegated
from penstock.clock import Clock
from penstock.codecs.names import is_lossy
from penstock.connectors.vllm.auditing import RequestAudits
from penstock.connectors.vllm.awaiting import HANDED_OVER, hands_over
from penstock.connectors.vllm.books_lock import BooksLock
from penstock.connectors.vllm.checkpoints import RequestCheckpoints, States
from penstock.connectors.vllm.dispatch import Dispatch
from penstock.connectors.vllm.identity import Naming
from penstock.connectors.vllm.kv_events import BlockNews
from penstock.connectors.vllm.load_choice import LoadChooser
from penstock.connectors.vllm.loads import RequestLoads
from penstock.connectors.vllm.lookups import RequestLookups
from penstock.connectors.vllm.orders import Orders, Reports
from penstock.connectors.vllm.saves import RequestSaves
from penstock.connectors.vllm.ticker import Ticker
from penstock.connectors.vllm.tracked import Tables, TrackedRequests
from penstock.errors import BookError
from penstock.events import Observer
from penstock.groups.boundaries import Boundaries
from penstock.groups.kinds import Group, Groups, Kind
from penstock.groups.turns import turn_borders
from penstock.keys import Namespace
from penstock.transfer.paged import PartPlace
from penstock.types import Direction, Tier

_CLOSE_SECONDS = 30.0
_CHECKPOINT_SHARE = 0.25  # of DRAM, for checkpoints that only may be used again
_CHECKPOINT_EVERY_TOKENS = 16_384


class Ways(NamedTuple):
    """How this vLLM works, as far as it matters here."""

    has_drafts: bool = False
    has_stages: bool = False  # of a pipeline
    # Its newer runner zeroes blocks and copies states before it calls `handle_preemptions`, where
    # our fence is. Saves must then end within their own step, and nothing is saved later.
    writes_reused_blocks_early: bool = False
    # MLA on a CPU: after a hit, vLLM computes more than one further token wrongly.
    hits_whole_prompts_only: bool = False
    # A load succeeds as a whole, or its request starts again.
    fails_whole: bool = False


_USUAL_WAYS = Ways()


def _num_checkpoint_blocks(groups: Groups, num_tokens: int) -> int:
    return sum(len(group.needed(num_tokens)) for group in groups.partial)


class Scheduled(NamedTuple):
    """A request in a step: its blocks, and how many of its tokens were computed before."""

    request_id: str
    tables: Tables  # all of its blocks, or only those added for this step
    num_computed: int
    has_all: bool


class StepPlan(NamedTuple):
    """What vLLM computes in its next step."""

    scheduled: Sequence[Scheduled]
    num_tokens: Mapping[str, int]
    preempted: Iterable[str] = ()
    # The tables that a request has at this step, None if it is not part of it.
    tables: Callable[[str], Tables | None] = lambda _: None
    states: Mapping[str, States] = MappingProxyType({})  # offered by vLLM, for each request
    written: Sequence[int] = ()  # other blocks that this step zeroes or copies to


class SchedulerSide:
    def __init__(
        self,
        tiers: Delegated,
        namespace: Namespace,
        clock: Clock,
        *,
        block_bytes: int,
        parts: tuple[PartPlace, ...] = (),
        groups: Groups | None = None,
        ways: Ways = _USUAL_WAYS,
        turn_tokens: frozenset[int] = frozenset(),
        may_load: bool = True,
        may_save: bool = True,
        always_load: bool = False,
        observers: Iterable[Observer] = (),
        news: BlockNews | None = None,
        naming: Naming | None = None,
        auditor: Auditor | None = None,
    ) -> None:
        self._offloader = offloader = tiers.offloader
        self._engine = tiers.engine
        self._node = tiers.node
        self._had_session = True
        self._news = news
        self._clock = clock
        self._ways = ways
        self._sessions = Sessions(offloader)
        if groups is None:
            groups = Groups((Group(0, Kind.FULL, namespace.block_tokens),))
        self._groups = groups
        self._requests = requests = TrackedRequests(
            namespace, naming or Naming(), self._sessions, groups, block_bytes
        )
        self._audits = audits = RequestAudits(
            auditor,
            requests,
            may_save=may_save,
            reads_back=not ways.writes_reused_blocks_early,
        )
        self._dispatch = Dispatch(
            tiers.engine,
            tiers.arena,
            parts,
            codec=offloader.codecs[Tier.HOST],
            ends_saves=ways.writes_reused_blocks_early,
            node=tiers.node,
        )
        self._chooser = chooser = LoadChooser(
            block_bytes, groups.align_tokens, always_load=always_load
        )
        self._checkpoints = RequestCheckpoints(
            offloader,
            requests,
            Boundaries(
                groups,
                checkpoint_bytes=lambda end: block_bytes * _num_checkpoint_blocks(groups, end),
                budget_bytes=int(_CHECKPOINT_SHARE * offloader.num_host_blocks * block_bytes),
                every_tokens=_CHECKPOINT_EVERY_TOKENS,
            ),
            may_save,
            audits,
            has_drafts=ways.has_drafts,
            states_lag=ways.has_drafts and ways.has_stages,
            turns=lambda tracked: turn_borders(tracked.request.prompt_token_ids or (), turn_tokens),
        )
        if not groups.all_full:
            offloader.observe(self._checkpoints)
        self._lookups = RequestLookups(
            offloader,
            requests,
            chooser,
            clock,
            block_bytes,
            may_load,
            list(observers),
            self._settle,
            self._checkpoints.planned,
            audits,
            whole_prompts_only=ways.hits_whole_prompts_only,
        )
        self._loads = RequestLoads(
            offloader,
            requests,
            self._dispatch,
            clock,
            block_bytes,
            audits,
            fails_whole=ways.fails_whole or not groups.is_plain,
        )
        self._saves = RequestSaves(offloader, requests, may_save, news, audits)
        self._lock = BooksLock()
        self._ticker = Ticker(self._tick)

    # vLLM's calls for a request, in their order.

    def lookup(self, request: Any, num_computed: int) -> int | None:
        """How many tokens after the first `num_computed` to load. None: ask at the next step."""
        with self._lock:
            num_tokens = self._lookups.num_to_load(self._requests.track(request), num_computed)
            self._wake_ticker()
            return num_tokens

    def allocated(self, request: Any, tables: Tables, num_external: int) -> None:
        """vLLM has allocated blocks for a request, of which `num_external` tokens are loaded."""
        with self._lock:
            tracked = self._requests.track(request)
            offer = self._lookups.accept(tracked, num_external)
            if offer is None:
                return
            # After a reset vLLM may preempt a request and admit it again in the same step.
            self._leave(request.request_id)
            self._dispatch.gather(before=True)
            tracked.tables = [list(table) for table in tables]
            self._loads.start(tracked, offer, num_external, tables)
            if not self._groups.is_plain:
                self._checkpoints.used(tracked, offer.start + num_external)
            self._wake_ticker()

    def orders(self, plan: StepPlan) -> Orders:
        """The orders of a step."""
        with self._lock:
            self._settle()
            for request_id in plan.preempted:
                self._leave(request_id)
            self._dispatch.gather(before=True)
            self._dispatch.fence_loads()  # they may reuse blocks of a request just preempted
            for request in plan.scheduled:
                self._take_over(request)
            self._dispatch.fence(plan.written)
            chunks = []
            has_checkpoints = not self._groups.all_full
            for request_id, count in plan.num_tokens.items():
                if (tracked := self._requests.get(request_id)) is None:
                    continue
                before = tracked.num_computed
                chunks.append((count, before))
                tracked.num_computed += count
                self._saves.save_computed(tracked)
                if has_checkpoints:
                    states = plan.states.get(request_id, {})
                    self._checkpoints.save_computed(tracked, before, plan.tables, states)
            self._dispatch.gather(before=False)
            self._dispatch.fence_loads()  # a node may have asked for more since
            orders = self._dispatch.take()
            orders.is_idle = not plan.num_tokens
            orders.is_timed = self._chooser.expect_time(orders.step, chunks)
            self._lookups.step_started(plan.num_tokens)
            self._wake_ticker()
            return orders

    def report(self, reports: Reports, ready: Iterable[str]) -> None:
        """The workers' reports, and the requests whose load vLLM has seen end."""
        with self._lock:
            tracked = [self._requests.get(request_id) for request_id in ready]
            loadings = [each.loading for each in tracked if each is not None]
            waited = [loading for loading in loadings if loading is not None]
            self._chooser.waited(waited, self._clock.now())
            self._chooser.computed(reports.step_seconds)
            for outcome in reports.outcomes:
                self._dispatch.reported(outcome)
            self._settle()

    def finished(self, request: Any, tables: Tables = ()) -> dict[str, Any] | None:
        """A request has ended or was aborted. Returns what to add to its response.

        `tables` are its blocks, which vLLM may give to others from the next step on.
        """
        with self._lock:
            tracked = self._requests.pop(request.request_id, None)
            self._lookups.finished(request.request_id)
            if tracked is None:
                return None
            if tracked.loading is not None:
                self._offloader.cancel(tracked.loading.ticket)
                self._settle()
            elif not self._ways.writes_reused_blocks_early:
                self._saves.save_rest(tracked)
                if tables and not self._groups.all_full:
                    self._checkpoints.save_last(tracked, tables)
                self._dispatch.gather(before=True)
            self._checkpoints.finished(tracked)
            self._audits.left(tracked)
            self._requests.apply_hints(tracked)
            self._wake_ticker()
            if hands_over(request):
                return dict(HANDED_OVER)  # the decoder gets this, and would take more for hints
            if not tracked.tokens_from:
                return None
            hits = {tier.label: count for tier, count in tracked.tokens_from.items()}
            told: dict[str, Any] = {"loaded_tokens": hits}
            if any(map(is_lossy, self._offloader.codecs.values())):
                # DRAM may have its blocks from the disk, so all that was loaded counts.
                told["lossy_tokens"] = sum(hits.values())
            return {"penstock": told}

    def sources(self, request_id: str) -> dict[Tier, int]:
        """The tokens of a request's last load by the tier they are loaded from."""
        with self._lock:
            tracked = self._requests.get(request_id)
            return {} if tracked is None else dict(tracked.tokens_from)

    # The rest of vLLM's calls.

    @property
    def has_pending_work(self) -> bool:
        """Whether workers have orders or reports outstanding, so vLLM must keep stepping."""
        with self._lock:
            return self._dispatch.has_pending_work

    def reset(self) -> None:
        """Forget all KV. What is saved from now on is for this run only.

        vLLM resets its caches after its weights were replaced in place. They then differ from
        the files that the fingerprint names.
        """
        with self._lock:
            self._audits.void()  # they would compare KV of the old weights with KV of the new
            if self._node is None:  # others use what a node has; it is not asked for any more
                self._offloader.empty_host()
            self._requests.rename_all()

    def close(self) -> bool:
        """Finish the writes to lower tiers. False if one of them hung."""
        self._ticker.stop(wait=True)
        with self._lock:
            self._audits.reset()
            self._engine.give_up()
            # Workers may still write to the DRAM slots of saves that were given up. No load or
            # prefetch may wait for that room: its block would be overwritten, and kept.
            self._offloader.let_go(_CLOSE_SECONDS)
            return self._offloader.close(_CLOSE_SECONDS)

    @property
    def failure(self) -> Exception | None:
        """The first error in a call or in the thread, if any. Later calls raise it again."""
        return self._lock.error

    def abandon(self) -> None:
        """After an error: stop the thread and write nothing more. The books cannot be trusted."""
        self._ticker.stop(wait=False)
        if self._node is not None:
            # The node should not go on talking to somebody who does not listen.
            with self._lock.regardless:
                self._offloader.abandon(_CLOSE_SECONDS)

    def check(self) -> None:
        """Audit the books and the records kept here."""
        with self._lock:
            self._offloader.check()
            self._dispatch.check()
            self._sessions.check()
            requests = self._requests.values()
            waiting = {one.loading.ticket for one in requests if one.loading is not None}
            if not waiting <= set(self._dispatch.loads_under_way):
                raise BookError("a request waits for a load that is not under way")

    def _take_over(self, scheduled: Scheduled) -> None:
        """Take over a request's blocks, and fence those that its step writes to."""
        tracked = self._requests.get(scheduled.request_id)
        for place, group in enumerate(self._groups):
            blocks = scheduled.tables[place]
            written = blocks
            if scheduled.has_all and group.is_full:
                written = blocks[scheduled.num_computed // group.block_tokens :]
            self._dispatch.fence(written)
            if tracked is None or not group.is_full:
                continue
            if scheduled.has_all:
                tracked.tables[place] = list(blocks)
            else:
                tracked.tables[place] += blocks
        if tracked is not None:
            tracked.num_computed = scheduled.num_computed
            if scheduled.has_all and self._ways.hits_whole_prompts_only:
                num_left = tracked.request.num_tokens - scheduled.num_computed
                if scheduled.num_computed and num_left > 1:
                    tracked.keys = None  # what is computed from here on may be wrong
            if scheduled.has_all and not self._groups.all_full:
                self._checkpoints.admitted(tracked, scheduled.num_computed)

    def _leave(self, request_id: str) -> None:
        """vLLM has preempted a request: save its KV before another request overwrites it.

        Only that of full groups: the blocks of its windows and states may have changed hands since
        its last step.
        """
        if (tracked := self._requests.get(request_id)) is None:
            return
        if not self._ways.writes_reused_blocks_early:
            self._saves.save_rest(tracked)
        self._audits.left(tracked)
        tracked.forget_blocks()

    def _settle(self) -> None:
        self._audits.poll()
        if self._node is not None and self._had_session != self._node.has_session:
            self._had_session = not self._had_session
            if self._news is not None and not self._had_session:
                self._news.lose_all()
        for done in self._offloader.step():
            if self._audits.settle(done):
                continue
            if done.direction is Direction.LOAD:
                self._loads.ended(done)
            else:
                self._saves.ended(done)
                self._checkpoints.ended(done)

    def _wake_ticker(self) -> None:
        if self._is_moving:
            self._ticker.wake()

    @property
    def _is_moving(self) -> bool:
        return self._offloader.is_moving or self._audits.is_busy

    def _tick(self) -> bool:
        with self._lock:
            self._settle()
            return self._is_moving
