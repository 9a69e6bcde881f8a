"""The scheduler's side: what vLLM asks and tells, turned into loads and saves of the books.

    lookup ─► allocated ─► orders ─► report ─► ... ─► finished
                │            │
                load         blocks that become complete are saved

vLLM never waits for a save: it may give a block to another request while the copy is under way.
The step that writes to it is held back by its fence, so no block is overwritten before it is saved.
A load is told to the workers as its blocks arrive in DRAM; they report the request ready, together
with the blocks that could not be brought, and vLLM computes those. No load is part of the step that
computes the rest of its prompt: where steps overlap, vLLM throws away what the step sampled after
a block failed, and delivers what the next one sampled from the same blocks.

A thread keeps the lower tiers going while vLLM has nothing to do. Everything here runs under one
lock, and nothing here waits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.books.sessions import Sessions
from penstock.build import Delegated
from penstock.clock import Clock
from penstock.connectors.vllm.dispatch import Dispatch
from penstock.connectors.vllm.identity import Naming
from penstock.connectors.vllm.kv_events import BlockNews
from penstock.connectors.vllm.offers import Offers
from penstock.connectors.vllm.orders import Orders, Reports
from penstock.connectors.vllm.request_hints import TransferParamHints
from penstock.connectors.vllm.ticker import Ticker
from penstock.connectors.vllm.tracked import Loading, Offer, Tracked
from penstock.costs.choose import LoadChoice
from penstock.errors import BookError
from penstock.events import Decided, Observer, tell
from penstock.hints import NO_HINTS
from penstock.keys import Namespace
from penstock.types import (
    Direction,
    Done,
    Match,
    Slot,
    TicketId,
    Tier,
    Verdict,
)
from penstock.units import GiB

_BARRED_SECONDS = 30.0
_SAME_ANSWER_SECONDS = 0.02  # a request that waits for room is looked up at every step
_CLOSE_SECONDS = 30.0
_MAX_TIMED_STEPS = 64
# Copies begin when a step does. Where many requests come at once, the first are not to wait until
# all of them have been looked up: so much is enough to keep the link busy until the next step.
_ENOUGH_BYTES = 2 * GiB


class Scheduled(NamedTuple):
    """A request of a step: blocks, and how many of its tokens were computed before."""

    request_id: str
    block_ids: Sequence[int]  # all it has, or only those it was given for this step
    num_computed: int
    has_all: bool


class SchedulerSide:
    def __init__(
        self,
        tiers: Delegated,
        namespace: Namespace,
        clock: Clock,
        *,
        block_bytes: int,
        may_load: bool = True,
        may_save: bool = True,
        always_load: bool = False,
        observers: Iterable[Observer] = (),
        news: BlockNews | None = None,
        naming: Naming | None = None,
    ) -> None:
        self._news = news
        self._naming = naming or Naming()
        self._offloader = tiers.offloader
        self._engine = tiers.engine
        self._dispatch = Dispatch(tiers.engine, tiers.arena)
        self._namespace = namespace
        self._block_tokens = namespace.block_tokens
        self._block_bytes = block_bytes
        self._clock = clock
        self._may_load, self._may_save = may_load, may_save
        self._observers = list(observers)
        self._offers = Offers(block_bytes, namespace.block_tokens, always_load=always_load)
        self._num_bytes_begun = 0  # of loads that begin with the next step
        self._will_compute = False  # whether the next step has something to compute
        self._computing: set[str] = set()  # the requests of the last step
        self._tracked: dict[str, Tracked] = {}
        self._hints = TransferParamHints()
        self._sessions = Sessions(tiers.offloader)
        self._loadings: dict[TicketId, Loading] = {}
        self._timed: dict[int, list[tuple[int, int]]] = {}
        self._lock = threading.RLock()
        self._ticker = Ticker(self._tick)

    # What vLLM's scheduler asks, in the order in which it does.

    def lookup(self, request: Any, num_computed: int) -> int | None:
        """How many tokens beyond `num_computed` are worth loading: whole blocks of them.

        None: ask again at the next step. The tier that instances share has not answered yet, or
        the loads of others are to begin first.
        """
        with self._lock:
            tracked = self._track(request)
            if (
                not self._is_named(tracked)
                or not self._may_load
                or self._clock.now() < tracked.barred_until
                or num_computed % self._block_tokens
                or getattr(request, "skip_reading_prefix_cache", False)
            ):
                self._will_compute = True
                return 0
            start = num_computed // self._block_tokens
            if self._is_time_to_begin or self._is_looking_up(tracked, request, start):
                return None
            offer = self._offer(tracked, request, start)
            self._will_compute |= offer.num_tokens == 0
            return offer.num_tokens

    @property
    def _is_time_to_begin(self) -> bool:
        """The next step has enough to load and nothing to compute: it is over in a moment."""
        will_compute = self._will_compute or bool(self._computing)
        return self._num_bytes_begun >= _ENOUGH_BYTES and not will_compute

    def _offer(self, tracked: Tracked, request: Any, start: int) -> Offer:
        assert tracked.keys is not None
        now, offer = self._clock.now(), tracked.offer
        is_old = offer is not None and now - offer.at > _SAME_ANSWER_SECONDS
        if offer is None or offer.start != start or is_old:
            match = self._offloader.match(tracked.keys.first(request.num_tokens)[start:])
            offer = tracked.offer = self._offers.make(start, match, now)
        return offer

    def _is_looking_up(self, tracked: Tracked, request: Any, start: int) -> bool:
        """Ask once for what a request has beyond vLLM's own cache; then wait for the answer."""
        assert tracked.keys is not None
        if not tracked.has_looked_up:
            tracked.has_looked_up = True
            keys = tracked.keys.first(request.num_tokens)
            self._offloader.used(keys[:start], tenant=tracked.tenant)
            tracked.lookup = self._offloader.lookup(keys[start:])
            if tracked.lookup is not None:
                self._ticker.wake()
        if tracked.lookup is not None:
            self._settle()
            if self._offloader.is_looking_up(tracked.lookup):
                return True
            tracked.lookup = None
        return False

    def allocated(self, request: Any, block_ids: Sequence[int], num_external: int) -> None:
        """vLLM has taken blocks for a request; so many of its tokens are to be loaded."""
        with self._lock:
            tracked = self._track(request)
            offer, tracked.offer = tracked.offer, None
            if offer is not None:
                if tracked.num_found is None:
                    tracked.num_found = offer.start + offer.match.num_blocks
                self._offloader.note(offer.match)
                if offer.match.num_blocks:
                    self._tell_choice(offer.match.num_blocks, offer.choice)
            if num_external == 0:
                return
            num_blocks = -(-num_external // self._block_tokens)
            if offer is None or num_external > offer.num_tokens:
                raise BookError(f"{num_external} tokens are to be loaded that nobody offered")
            # A reset may preempt a request that the very next step lets in again.
            self._leave(request.request_id)
            self._dispatch.gather(before=True)
            tracked.block_ids = list(block_ids)
            self._num_bytes_begun += num_blocks * self._block_bytes
            self._load(request.request_id, tracked, offer, num_blocks)

    def orders(
        self,
        scheduled: Iterable[Scheduled],
        num_tokens: Mapping[str, int],
        preempted: Iterable[str],
    ) -> Orders:
        """The orders of one step, which computes `num_tokens` of each request named there."""
        with self._lock:
            self._settle()
            for request_id in preempted:
                self._leave(request_id)
            self._dispatch.gather(before=True)
            self._dispatch.fence_loads()  # what was just preempted may lie there
            for request in scheduled:
                self._follow(request)
            chunks = []
            for request_id, count in num_tokens.items():
                if (tracked := self._tracked.get(request_id)) is None:
                    continue
                chunks.append((count, tracked.num_computed))
                tracked.num_computed += count
                # Where steps overlap, what the last one sampled is not known yet.
                self._save(tracked, min(tracked.num_computed, len(tracked.request.all_token_ids)))
            self._dispatch.gather(before=False)
            orders = self._dispatch.take()
            orders.is_idle = not num_tokens
            self._computing = set(num_tokens)
            self._num_bytes_begun = 0
            self._will_compute = False
            if chunks and all(count > 1 for count, _ in chunks):
                orders.is_timed = True
                self._timed[orders.step] = chunks
                while len(self._timed) > _MAX_TIMED_STEPS:
                    del self._timed[next(iter(self._timed))]
            return orders

    def report(self, reports: Reports, ready: Iterable[str]) -> None:
        """What the workers had to say, and the requests whose load vLLM has seen end."""
        with self._lock:
            now = self._clock.now()
            tracked = [self._tracked.get(request_id) for request_id in ready]
            loadings = [each.loading for each in tracked if each is not None]
            self._offers.waited([each for each in loadings if each is not None], now)
            for step, seconds in reports.step_seconds.items():
                if (chunks := self._timed.pop(step, None)) is not None:
                    self._offers.computed(chunks, seconds)
            for transfer_id, report in reports.transfers.items():
                self._dispatch.reported(transfer_id, report)
            self._settle()

    def finished(self, request: Any) -> dict[str, Any] | None:
        """A request has ended, in whatever way; returns what its answer may tell of it."""
        with self._lock:
            tracked = self._tracked.pop(request.request_id, None)
            self._computing.discard(request.request_id)
            if tracked is None:
                return None
            if tracked.loading is not None:
                self._offloader.cancel(tracked.loading.ticket)
                self._settle()
            else:
                self._save_rest(tracked)
                self._dispatch.gather(before=True)
            self._follow_hints(tracked)
            if not tracked.tokens_from:
                return None
            hits = {tier.label: count for tier, count in tracked.tokens_from.items()}
            return {"penstock": {"loaded_tokens": hits}}

    def sources(self, request_id: str) -> dict[Tier, int]:
        """Tokens that a request's last load brings, by the tier they come from."""
        with self._lock:
            tracked = self._tracked.get(request_id)
            return {} if tracked is None else dict(tracked.tokens_from)

    @property
    def has_pending_work(self) -> bool:
        """Whether workers have something to be told or to report, so that steps must go on."""
        with self._lock:
            return self._dispatch.has_pending_work

    def reset(self) -> None:
        """Forget all KV. What is saved from now on is for this run alone.

        vLLM is reset like this when its weights are replaced in place: they are no longer those
        that the fingerprint names.
        """
        with self._lock:
            self._namespace = replace(self._namespace, tenant=f"reset {time.time_ns()}")
            self._offloader.empty_host()
            self._sessions.clear()
            for tracked in self._tracked.values():
                tracked.keys = None
                tracked.offer = None

    def close(self) -> bool:
        """Finish what is on its way to lower tiers. False if one of them hung."""
        self._ticker.stop(wait=True)
        with self._lock:
            self._engine.give_up()
            for ticket in list(self._loadings):
                self._offloader.cancel(ticket)
            return self._offloader.close(_CLOSE_SECONDS)

    @property
    def failure(self) -> Exception | None:
        """What went wrong behind vLLM's back."""
        return self._ticker.error

    def abandon(self) -> None:
        """After an error: stop the thread and write nothing more. The books cannot be trusted."""
        self._ticker.stop(wait=False)

    def check(self) -> None:
        """Audit the books, and what is kept here beside them."""
        with self._lock:
            self._offloader.check()
            self._dispatch.check()
            self._sessions.check()
            waiting = {t.loading.ticket for t in self._tracked.values() if t.loading is not None}
            if not waiting <= self._loadings.keys():
                raise BookError("a request waits for a load that nobody knows")

    # Requests.

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            keys = self._naming.keys(self._namespace, request)
            hints = self._hints.of(request)
            tracked = self._tracked[request.request_id] = Tracked(request, keys, hints)
            if self._sessions.began(hints, tracked.tenant):
                self._ticker.wake()
        return tracked

    def _follow_hints(self, tracked: Tracked) -> None:
        if tracked.keys is not None and tracked.hints is not NO_HINTS:
            keys = tracked.keys.first(tracked.num_saved * self._block_tokens)
            num_found = min(tracked.num_found or 0, len(keys))
            self._sessions.ended(tracked.hints, keys, num_found, tracked.tenant)

    def _is_named(self, tracked: Tracked) -> bool:
        """Whether its keys still name its KV. An adapter's files may change while it runs."""
        if tracked.keys is not None and not self._naming.holds(tracked.keys):
            tracked.keys = tracked.offer = None
        return tracked.keys is not None

    def _follow(self, scheduled: Scheduled) -> None:
        """Take over a request's blocks; those that its step writes to are fenced."""
        blocks = list(scheduled.block_ids)
        written = blocks
        if scheduled.has_all:
            written = blocks[scheduled.num_computed // self._block_tokens :]
        if (tracked := self._tracked.get(scheduled.request_id)) is not None:
            if scheduled.has_all:
                tracked.block_ids = blocks
            else:
                tracked.block_ids += blocks
            tracked.num_computed = scheduled.num_computed
        self._dispatch.fence(written)

    def _leave(self, request_id: str) -> None:
        """vLLM has preempted a request: what it computed is saved before others write there."""
        if (tracked := self._tracked.get(request_id)) is None:
            return
        self._save_rest(tracked)
        tracked.block_ids = []
        tracked.num_computed = tracked.num_saved = 0

    # Saves.

    def _save(self, tracked: Tracked, num_tokens: int) -> None:
        if not self._may_save or not tracked.has_unsaved(num_tokens, self._block_tokens):
            return
        if not self._is_named(tracked):
            return
        start = tracked.num_saved
        keys, slots = tracked.unsaved(num_tokens, self._block_tokens)
        if keys:
            if self._news is not None:
                self._news.name(keys, start, tracked.request, self._block_tokens)
            parents = {0: tracked.key_before(start, self._block_tokens)}
            self._offloader.save(keys, slots, tenant=tracked.tenant, parents=parents)
            self._ticker.wake()

    def _save_rest(self, tracked: Tracked) -> None:
        """A request leaves its blocks. At its last token's place may lie a draft's KV."""
        self._save(tracked, min(tracked.num_computed, len(tracked.request.all_token_ids) - 1))

    # Loads.

    def _tell_choice(self, num_matched: int, choice: LoadChoice) -> None:
        event = Decided(num_matched, choice.num_blocks, choice.load_seconds, choice.compute_seconds)
        tell(self._observers, [event])

    def _load(self, request_id: str, tracked: Tracked, offer: Offer, num_blocks: int) -> None:
        end = offer.start + num_blocks
        assert tracked.keys is not None
        keys = tracked.keys.first(end * self._block_tokens)[offer.start :]
        slots = tuple(Slot(block) for block in tracked.block_ids[offer.start : end])
        self._dispatch.fence(slots)
        counts = _count_by_tier(offer.match, num_blocks)
        tracked.tokens_from = {tier: n * self._block_tokens for tier, n in counts.items()}
        tracked.num_saved = max(tracked.num_saved, end)  # what comes from there need not go again
        loading = Loading(
            request_id,
            TicketId(0),
            offer.start,
            slots,
            len(slots),
            max(counts),
            len(slots) * self._block_bytes,
            self._clock.now(),
        )
        tracked.loading = loading
        self._dispatch.expect(loading)
        loading.ticket = self._offloader.load(
            keys,
            slots,
            patience_seconds=offer.choice.patience_seconds,
            tenant=tracked.tenant,
            parents={0: tracked.key_before(offer.start, self._block_tokens)},
        )
        self._loadings[loading.ticket] = loading
        self._ticker.wake()

    def _settle(self) -> None:
        for done in self._offloader.step():
            if done.direction is Direction.LOAD:
                self._loaded(done)
            elif self._news is not None and not done.ok:
                self._news.forget(done.keys)

    def _loaded(self, done: Done) -> None:
        loading = self._loadings.pop(done.ticket)
        bad = [index for index, verdict in enumerate(done.verdicts) if verdict is not Verdict.OK]
        self._dispatch.ended(loading, [loading.slots[index] for index in bad])
        tracked = self._tracked.get(loading.request_id)
        if tracked is None:
            return
        if tracked.loading is loading:
            tracked.loading = None
        if bad:
            tracked.barred_until = self._clock.now() + _BARRED_SECONDS
            tracked.num_saved = min(tracked.num_saved, loading.start + bad[0])
            arrived = Counter(tier for tier in done.sources[: bad[0]] if tier is not None)
            tracked.tokens_from = {t: n * self._block_tokens for t, n in arrived.items()}

    def _tick(self) -> bool:
        with self._lock:
            self._settle()
            return self._offloader.is_moving


def _count_by_tier(match: Match, num_blocks: int) -> dict[Tier, int]:
    """Where the first `num_blocks` of a match come from."""
    counts: dict[Tier, int] = {}
    for run in match.runs:
        taken = min(run.num_blocks, num_blocks)
        if taken:
            counts[run.tier] = counts.get(run.tier, 0) + taken
        num_blocks -= taken
    return counts
