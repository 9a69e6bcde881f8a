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


class Rotation:
    def __init__(self, turn_seconds: float | None) -> None:
        """None: whoever runs stays until it has ended, or is preempted."""
        self._turn_seconds = turn_seconds

    def begin(self, request: Request, now: float) -> None:
        """It has all that it needs to go on."""
        request.turn_began = now
        request.turn_start = len(request.tokens)

    def over(self, running: Iterable[Request], wanting: Request, now: float) -> Request | None:
        """The one that makes room for `wanting`: of those whose turn is over, the longest there.

        Prompts are computed to their end first, and whoever asked never to be cold stays.
        """
        if self._turn_seconds is None:
            return None
        due = [
            request
            for request in running
            if request is not wanting
            and request.phase is Phase.RUNNING
            and request.num_uncomputed == 1
            and request.priority >= wanting.priority
            and not request.params.residency.never_cold
            and now - request.turn_began >= self._turn_seconds
            and len(request.tokens) - request.turn_start >= _MIN_TOKENS
        ]
        return min(due, key=lambda r: (-r.priority, r.turn_began, r.sequence), default=None)
