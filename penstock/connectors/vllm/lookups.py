"""Looks up the KV of waiting requests, and tells vLLM how many of their tokens to load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from penstock.clock import Clock
from penstock.connectors.vllm.auditing import RequestAudits
from penstock.connectors.vllm.awaiting import begin_awaiting
from penstock.connectors.vllm.load_choice import LoadChooser
from penstock.connectors.vllm.tracked import Offer, Tracked, TrackedRequests
from penstock.costs.choose import Hit
from penstock.errors import BookError
from penstock.events import Decided, Observer, tell
from penstock.groups.kinds import Group
from penstock.groups.match import full_bound, legal_hits
from penstock.tiers import Tiers
from penstock.types import BlockKey, Run, Tier

_SAME_ANSWER_SECONDS = 0.02  # vLLM looks up a request that waits for room at every step
# Copies start with a step. When many requests arrive at once, the first should not wait until all
# of them have been looked up: this much keeps the link busy until the next step.
_ENOUGH_BYTES = 2 << 30
_MAX_HITS = 8  # legal lengths that are compared


@dataclass(slots=True)
class RequestLookups:
    offloader: Tiers
    requests: TrackedRequests
    chooser: LoadChooser
    clock: Clock
    block_bytes: int
    may_load: bool
    observers: Sequence[Observer]
    settle: Callable[[], None]  # take in what the tiers have finished
    planned: Callable[[Tracked, int], Iterable[int]]  # where checkpoints of a prompt are kept
    audits: RequestAudits
    whole_prompts_only: bool = False  # load all of a prompt or nothing
    _num_bytes_begun: int = 0  # of loads that start with the next step
    _will_compute: bool = False  # whether the next step computes something for a new request
    _computing: set[str] = field(default_factory=set)  # requests of the last step

    def num_to_load(self, tracked: Tracked, num_computed: int) -> int | None:
        """Tokens after the first `num_computed` that are worth loading, in whole blocks.

        None means: ask again at the next step. The remote tier has not answered yet, or another
        vLLM is computing the prompt, or the loads of other requests should start first.
        """
        if (
            not self.requests.is_named(tracked)
            or not self.may_load
            or self.clock.now() < tracked.barred_until
            or num_computed % self.requests.groups.align_tokens
            or getattr(tracked.request, "skip_reading_prefix_cache", False)
        ):
            self._will_compute = True
            return 0
        if not tracked.has_looked_up and tracked.awaiting is None:
            tracked.awaiting = begin_awaiting(tracked.request, self.clock.now())
        if self._is_time_to_start or self._is_waiting_for_remote(tracked, num_computed):
            return None
        offer = self._offer(tracked, num_computed)
        if self._is_awaiting(tracked, offer):
            return None
        if self.audits.draws(tracked, offer):
            self._will_compute = True
            return 0
        self._will_compute |= offer.num_tokens == 0
        return offer.num_tokens

    def _is_awaiting(self, tracked: Tracked, offer: Offer) -> bool:
        """Whether another vLLM computes the rest of this prompt, and seems to be at it."""
        awaiting = tracked.awaiting
        if awaiting is None:
            return False
        now, found = self.clock.now(), offer.start + offer.num_found
        limit = self.requests.groups.max_hit(tracked.request.num_tokens)
        awaiting.note(found, now)
        prefill = self.chooser.costs.prefill
        seconds = None if prefill is None else prefill.seconds(max(0, limit - found), found)
        if found >= limit or awaiting.is_over(now, seconds):
            tracked.awaiting, tracked.has_looked_up = None, True
            return False
        if awaiting.asks_again(now):
            tracked.has_looked_up = False
        return True

    def accept(self, tracked: Tracked, num_external: int) -> Offer | None:
        """The offer that vLLM has allocated blocks for. None if it loads nothing."""
        offer, tracked.offer = tracked.offer, None
        if offer is not None:
            self.audits.start(tracked, offer)
            if tracked.num_found is None:
                tracked.num_found = offer.start + offer.num_found
            self.offloader.note(offer.match)
            if offer.match.num_blocks:
                choice = offer.choice
                seconds = choice.load_seconds, choice.compute_seconds
                num_loaded = choice.num_blocks if num_external else 0  # audited: it is computed
                event = Decided(offer.match.num_blocks, num_loaded, *seconds)
                tell(self.observers, [event])
        if num_external == 0:
            return None
        if offer is None or num_external > offer.num_tokens:
            raise BookError(
                f"vLLM wants to load {num_external} tokens of a request, but was offered "
                f"{0 if offer is None else offer.num_tokens}"
            )
        self._num_bytes_begun += offer.choice.num_blocks * self.block_bytes
        return offer

    def step_started(self, computing: Iterable[str]) -> None:
        """A step starts the loads accepted so far, and computes tokens of these requests."""
        self._computing = set(computing)
        self._num_bytes_begun = 0
        self._will_compute = False

    def finished(self, request_id: str) -> None:
        self._computing.discard(request_id)

    @property
    def _is_time_to_start(self) -> bool:
        """Whether the next step has enough to load and nothing to compute, so it ends at once."""
        will_compute = self._will_compute or bool(self._computing)
        return self._num_bytes_begun >= _ENOUGH_BYTES and not will_compute

    def _offer(self, tracked: Tracked, start: int) -> Offer:
        now, offer = self.clock.now(), tracked.offer
        is_old = offer is not None and now - offer.at > _SAME_ANSWER_SECONDS
        if offer is None or offer.start != start or is_old:
            if self.requests.groups.is_plain and not self.whole_prompts_only:
                num_before = start // self.requests.groups.align_tokens
                match = self.offloader.match(tracked.prompt_keys()[num_before:])
                offer = self.chooser.choose(start, match, now)
            else:
                hits = self._hits(tracked, start)
                num_asked = self._num_asked(tracked, start)
                offer = self.chooser.choose_hit(start, hits, num_asked, now)
            tracked.offer = offer
        return offer

    def _hits(self, tracked: Tracked, start: int) -> list[Hit]:
        """The longest legal hits of a prompt over all groups, and where their blocks are."""
        groups, num_tokens = self.requests.groups, tracked.request.num_tokens
        limit = groups.max_hit(num_tokens)
        where: dict[int, list[Tier | None]] = {}
        for group in groups:
            blocks = range(start // group.block_tokens, limit // group.block_tokens)
            where[group.index] = self.offloader.where(tracked.keys_of(group, blocks))

        def holds(group: Group, index: int) -> Tier | None:
            return where[group.index][index - start // group.block_tokens]

        found: list[Hit] = []
        for end in islice(legal_hits(groups, holds, start, num_tokens), _MAX_HITS):
            if self.whole_prompts_only and end != num_tokens:
                break  # they only become shorter
            tiers = Counter(
                tier
                for _, group, blocks in self.requests.pieces(end, start)
                for index in blocks
                if (tier := holds(group, index)) is not None
            )
            if not tiers:
                continue  # without full attention, a hit at a border needs nothing
            runs = tuple(Run(tier, count) for tier, count in sorted(tiers.items()))
            found.append(Hit(end - start, runs))
        # Other prompts share exactly this much: a checkpoint here will be used.
        bound = full_bound(groups, holds, start, limit) // groups.align_tokens * groups.align_tokens
        best = start + (found[0].num_tokens if found else 0)
        tracked.junction = bound if bound > best else None
        return found

    def _num_asked(self, tracked: Tracked, start: int) -> int:
        limit = self.requests.groups.max_hit(tracked.request.num_tokens)
        return sum(len(blocks) for _, _, blocks in self.requests.pieces(limit, start))

    def _is_waiting_for_remote(self, tracked: Tracked, start: int) -> bool:
        """Ask the remote tier once per request for what vLLM's own cache lacks."""
        if not tracked.has_looked_up:
            tracked.has_looked_up = True
            groups = self.requests.groups
            limit = groups.max_hit(tracked.request.num_tokens)
            wanted: list[BlockKey] = []
            for group in groups.full:
                size = group.block_tokens
                keys = tracked.keys_of(group, range(limit // size))
                self.offloader.used(keys[: start // size], tenant=tracked.tenant)
                wanted += keys[start // size :]
            for group in groups.partial:
                wanted += self._checkpoint_keys(tracked, group, start, limit)
            tracked.lookup = self.offloader.lookup(wanted)
        if tracked.lookup is not None:
            self.settle()
            if self.offloader.is_looking_up(tracked.lookup):
                return True
            tracked.lookup = None
        return False

    def _checkpoint_keys(
        self, tracked: Tracked, group: Group, start: int, limit: int
    ) -> list[BlockKey]:
        """The blocks of a window or state that another instance may have kept for this prompt."""
        ends = {limit, *self.planned(tracked, start)}
        blocks = {index for end in ends for index in group.needed(end, start)}
        keys = tracked.keys_of(group, range(limit // group.block_tokens))
        return [keys[index] for index in sorted(blocks)]
