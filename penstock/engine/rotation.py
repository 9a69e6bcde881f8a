"""Whose turn on the device is over: more sessions may be under way than it holds KV for. Pure.

To read a sequence's KV from HOST takes the link as long as all of it is large, at every token. To
bring it back takes that long once, and then it decodes at the device's own pace. So where more
than a little would be cold, sequences take turns: one that has decoded for a while makes room for
one that waits, its KV stays in HOST, and it comes back when others have had their turn.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine.request import Phase, Request

_MIN_TOKENS = 4  # of a turn, however long they take: who comes back must get somewhere
_PATIENCE = 1.5  # turns: so long its end waits for a block to be complete


class Rotation:
    def __init__(self, turn_seconds: float | None, block_tokens: int = 1) -> None:
        """None: whoever runs stays until it has ended, or is preempted."""
        self._turn_seconds = turn_seconds
        self._block_tokens = block_tokens

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
            and request.phase is Phase.RUNNING
            and request.num_uncomputed == 1
            and request.priority >= wanting.priority
            and not request.params.residency.never_cold
            and self._is_over(request, now)
        ]
        return min(due, key=lambda r: (-r.priority, r.turn_began, r.sequence), default=None)

    def _is_over(self, request: Request, now: float) -> bool:
        """Best between two blocks: of one that is not complete, all is computed again."""
        if self._turn_seconds is None:
            return False
        is_between = request.num_computed % self._block_tokens == 0
        turns = (now - request.turn_began) / self._turn_seconds
        num_tokens = len(request.tokens) - request.turn_start
        return num_tokens >= _MIN_TOKENS and turns >= (1.0 if is_between else _PATIENCE)
