"""Computes segments that are nowhere to be found, before the requests that have them start.

Each missing segment is a request of its own, which generates nothing: its blocks are named and
saved like those of any prompt. Requests that miss the same segment wait for the same one. A request
waits once; what it then still misses is computed as part of its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from penstock.engine.anywhere.segmented import AnySegment, Segmented
from penstock.engine.anywhere.segments import Segment
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request
from penstock.keys import KeyChain
from penstock.types import BlockKey

_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)

_Request = TypeVar("_Request", bound=Segmented)


class Fills(Generic[_Request]):
    def __init__(
        self,
        num_missing: Callable[[AnySegment], int],
        make: Callable[[_Request, Any, float], _Request],
    ) -> None:
        """`num_missing`: how many blocks of a segment are nowhere. `make` makes the request that
        computes a segment of another, at a point in time."""
        self._num_missing = num_missing
        self._make = make
        self._fills: dict[BlockKey, _Request] = {}  # by the segment's last key
        self._keys: dict[_Request, BlockKey] = {}  # of each fill
        self._waiting: dict[BlockKey, set[_Request]] = {}  # the requests that wait for each

    def __len__(self) -> int:
        return len(self._fills)

    def start(
        self, request: _Request, segments: Sequence[AnySegment], now: float
    ) -> list[_Request]:
        """The fills that a request needs and nobody has started yet. It waits for all it needs.

        `segments`: those of the request that it wants.
        """
        request.has_filled = True
        made = []
        for segment in segments:
            key = segment.keys[-1]
            if key in request.fills or not (num_missing := self._num_missing(segment)):
                continue
            request.num_new_blocks.setdefault(key, num_missing)
            if key not in self._fills:
                made.append(self._make(request, segment, now))
                self._fills[key] = made[-1]
                self._keys[made[-1]] = key
                self._waiting[key] = set()
            fill = self._fills[key]
            fill.priority = min(fill.priority, request.priority)
            self._waiting[key].add(request)
            request.fills.add(key)
        return made

    def next_for(self, request: _Request) -> _Request | None:
        """A fill that a waiting request needs and that has not begun."""
        fills = (self._fills[key] for key in request.fills)
        return next((fill for fill in fills if fill.is_waiting), None)

    def ended(self, fill: _Request) -> None:
        """A fill has ended, computed or not. Requests that waited for it start without it."""
        key = self._keys.pop(fill)
        del self._fills[key]
        for request in self._waiting.pop(key):
            request.fills.discard(key)

    def leave(self, request: _Request) -> list[_Request]:
        """A request ends. Returns the fills that nobody needs any more: remove them."""
        unneeded = []
        for key in request.fills:
            self._waiting[key].discard(request)
            if not self._waiting[key]:
                unneeded.append(self._fills[key])
        request.fills = set()
        return unneeded


def make_fill(request: Request, segment: Segment, now: float) -> Request:
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
