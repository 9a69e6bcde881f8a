"""Turns on the device: more sessions may be under way than it holds KV for.

To read a sequence's KV from HOST takes the link as long as all of it is large, at every token. To
bring it back takes that long once, and then it decodes at the device's own pace. So where more
than a little would be cold, sequences take turns: one that has decoded for a while makes room for
one that waits, its KV is pinned in HOST, and it comes back when others have had their turn.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine.request import Request, RequestPhase
from penstock.engine.tiers import EngineTiers

_MIN_KEPT = 0.9  # of a sequence's blocks, in HOST: else its turn would end in computing again
_MIN_TOKENS = 4  # of a turn, however long they take: who comes back must get somewhere
_PATIENCE = 1.5  # turns: so long its end waits for a block to be complete


class Rotation:
    def __init__(
        self, turn_seconds: float | None, block_tokens: int = 1, tiers: EngineTiers | None = None
    ) -> None:
        """Without a length, or without tiers: whoever runs stays until it ends or is preempted."""
        self._turn_seconds = None if tiers is None else turn_seconds
        self._block_tokens = block_tokens
        self._tiers = tiers

    def begin(self, request: Request, now: float) -> None:
        """It has all that it needs to go on."""
        request.turn_began = now
        request.turn_start = len(request.tokens)

    def over(self, running: Iterable[Request], wanting: Request, now: float) -> Request | None:
        """The one that makes room for `wanting`: of those whose turn is over, the longest there.

        Prompts are computed to their end first, and whoever asked never to be cold stays.
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
        """Its turn is over, and what it has is kept; False if that is not safe, and it stays."""
        assert self._tiers is not None
        pins = self._tiers.pin(request.chain.keys[: request.num_named])
        request.resting = [slot for slot in pins if slot is not None]
        if len(request.resting) >= _MIN_KEPT * request.num_named:
            return True
        self.wake(request)
        self.begin(request, now)  # for another turn
        return False

    def wake(self, request: Request) -> None:
        """What was kept for it no longer is: it is on its way, or nobody wants it."""
        if request.resting:
            assert self._tiers is not None
            self._tiers.unpin(request.resting)
            request.resting = []

    def _is_over(self, request: Request, now: float) -> bool:
        """Best between two blocks: of one that is not complete, all is computed again."""
        if self._turn_seconds is None:
            return False
        is_between = request.num_computed % self._block_tokens == 0
        turns = (now - request.turn_began) / self._turn_seconds
        num_tokens = len(request.tokens) - request.turn_start
        return num_tokens >= _MIN_TOKENS and turns >= (1.0 if is_between else _PATIENCE)
