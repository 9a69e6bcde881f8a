"""Computes segments that are nowhere to be found, before the requests that have them start.

Each missing segment is a request of its own, which generates nothing: its blocks are named and
saved like those of any prompt. Requests that miss the same segment wait for the same one. A request
waits once; what it then still misses is computed as part of its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.engine.anywhere.segments import Segment
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request, RequestPhase
from penstock.keys import KeyChain
from penstock.types import BlockKey

_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


class Fills:
    def __init__(self, is_missing: Callable[[Segment], bool]) -> None:
        self._is_missing = is_missing
        self._fills: dict[BlockKey, Request] = {}  # by the segment's last key
        self._waiting: dict[BlockKey, set[Request]] = {}  # the requests that wait for each

    def __len__(self) -> int:
        return len(self._fills)

    def start(self, request: Request, segments: Sequence[Segment], now: float) -> list[Request]:
        """The fills that a request needs and nobody has started yet. It waits for all it needs.

        `segments`: those of the request that it wants.
        """
        request.has_filled = True
        made = []
        for segment in segments:
            key = segment.keys[-1]
            if key in request.fills or not self._is_missing(segment):
                continue
            if key not in self._fills:
                made.append(self._make(request, segment, now))
                self._fills[key] = made[-1]
                self._waiting[key] = set()
            fill = self._fills[key]
            fill.priority = min(fill.priority, request.priority)
            self._waiting[key].add(request)
            request.fills.add(key)
        return made

    def next_for(self, request: Request) -> Request | None:
        """A fill that a waiting request needs and that has not begun."""
        fills = (self._fills[key] for key in request.fills)
        return next((fill for fill in fills if fill.phase is RequestPhase.WAITING), None)

    def ended(self, fill: Request) -> None:
        """A fill has ended, computed or not. Requests that waited for it start without it."""
        key = _key(fill)
        del self._fills[key]
        for request in self._waiting.pop(key):
            request.fills.discard(key)

    def leave(self, request: Request) -> list[Request]:
        """A request ends. Returns the fills that nobody needs any more: remove them."""
        unneeded = []
        for key in request.fills:
            self._waiting[key].discard(request)
            if not self._waiting[key]:
                unneeded.append(self._fills[key])
        request.fills = set()
        return unneeded

    def _make(self, request: Request, segment: Segment, now: float) -> Request:
        return Request(
            f"segment {segment.keys[-1].hex()[:16]}",
            segment.tokens,
            _PARAMS,
            KeyChain(segment.namespace),
            priority=request.priority,
            tenant=request.tenant,
            max_total_tokens=len(segment.tokens),
            arrival=now,
            sequence=request.sequence,
            is_fill=True,
        )


def _key(fill: Request) -> BlockKey:
    return fill.chain.keys[-1]
