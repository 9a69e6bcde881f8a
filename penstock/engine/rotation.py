"""Turns on the device, so that more sessions can be active than its pool holds KV for.

Reading a sequence's KV from HOST costs a full transfer for every token. Loading it back costs one
transfer, after which it decodes at full speed. So if much of the KV would be cold, sequences take
turns: one that has decoded for a while makes room for one that waits, its KV is pinned in HOST, and
it resumes after the others had their turn.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine.request import Request, RequestPhase
from penstock.engine.tiers import EngineTiers

_MIN_KEPT = 0.9  # share of its blocks that HOST must have, or too much would be recomputed
_MIN_TOKENS = 4  # per turn, however long they take, so that every turn makes progress
_PATIENCE = 1.5  # a turn may be this many times longer, to end on a complete block


class Rotation:
    def __init__(
        self, turn_seconds: float | None, block_tokens: int = 1, tiers: EngineTiers | None = None
    ) -> None:
        """Without `turn_seconds` or tiers, a sequence runs until it ends or is preempted."""
        self._turn_seconds = None if tiers is None else turn_seconds
        self._block_tokens = block_tokens
        self._tiers = tiers

    def begin(self, request: Request, now: float) -> None:
        """Begin a request's turn."""
        request.turn_began = now
        request.turn_start = len(request.tokens)

    def over(self, running: Iterable[Request], wanting: Request, now: float) -> Request | None:
        """The request that makes room for `wanting`: the longest-running whose turn is over.

        Requests that compute their prompt stay, and so do those that must never be cold.
        """
        due = [
            request
            for request in running
            if request is not wanting
            and request.phase is RequestPhase.RUNNING
            and request.num_uncomputed == 1
            and request.priority >= wanting.priority
            and not request.params.residency.never_cold
            and self._is_over(request, now)
        ]
        return min(due, key=lambda r: (-r.priority, r.turn_began, r.sequence), default=None)

    def rest(self, request: Request, now: float) -> bool:
        """Pin a request's KV in HOST to end its turn. If False, HOST has too little of it."""
        assert self._tiers is not None
        pins = self._tiers.pin(request.chain.keys[: request.num_named])
        request.resting = [slot for slot in pins if slot is not None]
        if len(request.resting) >= _MIN_KEPT * request.num_named:
            return True
        self.wake(request)
        self.begin(request, now)  # for another turn
        return False

    def wake(self, request: Request) -> None:
        """Unpin a request's KV: it has been loaded, or is not needed any more."""
        if request.resting:
            assert self._tiers is not None
            self._tiers.unpin(request.resting)
            request.resting = []

    def _is_over(self, request: Request, now: float) -> bool:
        """Prefers the end of a block, because an incomplete block would be recomputed."""
        if self._turn_seconds is None:
            return False
        is_between = request.num_computed % self._block_tokens == 0
        turns = (now - request.turn_began) / self._turn_seconds
        num_tokens = len(request.tokens) - request.turn_start
        return num_tokens >= _MIN_TOKENS and turns >= (1.0 if is_between else _PATIENCE)
