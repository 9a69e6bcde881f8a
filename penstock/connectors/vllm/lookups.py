"""Looks up the KV of waiting requests, and tells vLLM how many of their tokens to load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.clock import Clock
from penstock.connectors.vllm.load_choice import LoadChooser
from penstock.connectors.vllm.tracked import Offer, Tracked, TrackedRequests
from penstock.errors import BookError
from penstock.events import Decided, Observer, tell
from penstock.offload import Offloader

_SAME_ANSWER_SECONDS = 0.02  # vLLM looks up a request that waits for room at every step
# Copies start with a step. When many requests arrive at once, the first should not wait until all
# of them have been looked up: this much keeps the link busy until the next step.
_ENOUGH_BYTES = 2 << 30


@dataclass(slots=True)
class RequestLookups:
    offloader: Offloader
    requests: TrackedRequests
    chooser: LoadChooser
    clock: Clock
    block_bytes: int
    may_load: bool
    observers: Sequence[Observer]
    settle: Callable[[], None]  # take in what the tiers have finished
    _num_bytes_begun: int = 0  # of loads that start with the next step
    _will_compute: bool = False  # whether the next step computes something for a new request
    _computing: set[str] = field(default_factory=set)  # requests of the last step

    def num_to_load(self, tracked: Tracked, num_computed: int) -> int | None:
        """Tokens after the first `num_computed` that are worth loading, in whole blocks.

        None means: ask again at the next step. Either the remote tier has not answered yet, or
        the loads of other requests should start first.
        """
        block_tokens = self.requests.block_tokens
        if (
            not self.requests.is_named(tracked)
            or not self.may_load
            or self.clock.now() < tracked.barred_until
            or num_computed % block_tokens
            or getattr(tracked.request, "skip_reading_prefix_cache", False)
        ):
            self._will_compute = True
            return 0
        start = num_computed // block_tokens
        if self._is_time_to_start or self._is_waiting_for_remote(tracked, start):
            return None
        offer = self._offer(tracked, start)
        self._will_compute |= offer.num_tokens == 0
        return offer.num_tokens

    def accept(self, tracked: Tracked, num_external: int) -> Offer | None:
        """The offer that vLLM has allocated blocks for. None if it loads nothing."""
        offer, tracked.offer = tracked.offer, None
        if offer is not None:
            if tracked.num_found is None:
                tracked.num_found = offer.start + offer.match.num_blocks
            self.offloader.note(offer.match)
            if offer.match.num_blocks:
                choice = offer.choice
                seconds = choice.load_seconds, choice.compute_seconds
                event = Decided(offer.match.num_blocks, choice.num_blocks, *seconds)
                tell(self.observers, [event])
        if num_external == 0:
            return None
        if offer is None or num_external > offer.num_tokens:
            raise BookError(
                f"vLLM wants to load {num_external} tokens of a request, but was offered "
                f"{0 if offer is None else offer.num_tokens}"
            )
        num_blocks = -(-num_external // self.requests.block_tokens)
        self._num_bytes_begun += num_blocks * self.block_bytes
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
            match = self.offloader.match(tracked.prompt_keys()[start:])
            offer = tracked.offer = self.chooser.choose(start, match, now)
        return offer

    def _is_waiting_for_remote(self, tracked: Tracked, start: int) -> bool:
        """Ask the remote tier once per request for what vLLM's own cache lacks."""
        if not tracked.has_looked_up:
            tracked.has_looked_up = True
            keys = tracked.prompt_keys()
            self.offloader.used(keys[:start], tenant=tracked.tenant)
            tracked.lookup = self.offloader.lookup(keys[start:])
        if tracked.lookup is not None:
            self.settle()
            if self.offloader.is_looking_up(tracked.lookup):
                return True
            tracked.lookup = None
        return False
