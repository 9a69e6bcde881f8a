"""Brings the segments of running requests to the device, and says when they can be placed.

A segment's blocks are shared if the device has them, and loaded if not. When all of them are there,
its reused tokens are copied to the request's own blocks (see `turning`); afterwards the request
needs the segment's blocks no more. A segment that cannot be had is computed like any other part of
the prompt. Requests compute from left to right: they skip what is placed, and wait for what comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.costs.choose import LoadChoice
from penstock.engine.admit import Choose
from penstock.engine.anywhere.segments import Segment
from penstock.engine.anywhere.turning import Placing
from penstock.engine.blocks import BlockPool
from penstock.engine.request import Request
from penstock.engine.tiers import EngineTiers
from penstock.types import Done, Slot, TicketId, Verdict

Take = Callable[[int, Request], list[Slot] | None]
"""Holds so many device blocks for a request; None if there is no room."""


@dataclass(slots=True, eq=False)
class _Coming:
    """A segment whose blocks are held, or are being loaded."""

    request: Request
    segment: Segment
    slots: list[Slot]  # of its blocks
    num_shared: int  # the first of them that the device had
    ticket: TicketId | None = None


@dataclass(slots=True, eq=False)
class _Reuse:
    """One request's segments, in order."""

    coming: list[_Coming] = field(default_factory=list)
    placed: list[range] = field(default_factory=list)  # positions that are not computed


class _Queued(NamedTuple):
    request: Request
    placing: Placing


class SegmentLoads:
    def __init__(
        self,
        pool: BlockPool,
        tiers: EngineTiers | None,
        block_tokens: int,
        take: Take,
        choose: Choose,
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self._block_tokens = block_tokens
        self._take = take
        self._choose = choose
        self._reuses: dict[str, _Reuse] = {}  # by request
        self._tickets: dict[TicketId, _Coming] = {}
        self._queued: list[_Queued] = []  # to be copied before the next step
        self._read: list[Slot] = []  # held for copies that were handed out

    def __len__(self) -> int:
        """The number of loads that are under way."""
        return len(self._tickets)

    def num_missing(self, segment: Segment) -> int:
        """How many blocks of a segment are neither on the device nor in the tiers."""
        keys = segment.keys[self._pool.num_leading(segment.keys) :]
        num_there = self._tiers.match(keys).num_blocks if self._tiers and keys else 0
        return len(keys) - num_there

    def begin(self, request: Request) -> None:
        """Bring the segments of a request that runs now."""
        reuse = self._reuses[request.id] = _Reuse()
        for segment in request.segments:
            if segment.reused.stop <= request.num_present:
                continue
            if (coming := self._bring(request, segment)) is not None:
                reuse.coming.append(coming)

    def settle(self, done: Done) -> bool:
        """Finish a load. False if it was not one of a segment."""
        coming = self._tickets.pop(done.ticket, None)
        if coming is None:
            return False
        coming.ticket = None
        reuse = self._reuses.get(coming.request.id)
        if reuse is None or coming not in reuse.coming:
            self._pool.release(coming.slots)
            return True
        request = coming.request
        loaded = coming.slots[coming.num_shared :]
        for slot, key, verdict in zip(loaded, done.keys, done.verdicts, strict=True):
            if verdict is Verdict.OK:
                self._pool.name(slot, key)
        if not request.num_preemptions:
            request.found.update(tier for tier in done.sources if tier is not None)
            request.lost.update(verdict for verdict in done.verdicts if verdict is not Verdict.OK)
        if done.num_leading_ok < len(loaded):  # it is computed
            reuse.coming.remove(coming)
            self._pool.release(coming.slots)
        else:
            request.num_loaded_tokens += len(loaded) * self._block_tokens
        return True

    def spans(self, request: Request, budget: int) -> Iterator[tuple[int, int]]:
        """The next positions to compute: starts and ends, at most `budget` tokens in all.

        Segments that have arrived count as placed. Nothing if the request waits for one.
        """
        reuse = self._reuses[request.id]
        skipped = list(reuse.placed)
        stop = len(request.tokens)
        for coming in reuse.coming:
            if coming.ticket is not None:
                stop = coming.segment.reused.start
                break
            skipped.append(coming.segment.reused)
        at = request.num_computed
        for each in [*skipped, range(stop, stop)]:
            end = min(each.start, at + budget, stop)
            if at < end:
                yield at, end
                budget -= end - at
            if not budget:
                return
            at = max(at, each.stop)

    def place_up_to(self, request: Request, end: int) -> None:
        """Copy the segments that end here or before. The request has room for them."""
        reuse = self._reuses[request.id]
        while reuse.coming and reuse.coming[0].ticket is None:
            coming = reuse.coming[0]
            if coming.segment.reused.start >= end:
                return
            del reuse.coming[0]
            self._queued.append(_Queued(request, self._placing(request, coming)))
            self._read += coming.slots
            reuse.placed.append(coming.segment.reused)
            segment = coming.segment
            if not request.num_preemptions:
                # What was found as a prefix of the prompt is counted as cached, and only so.
                num_cached, reused = request.num_cached_tokens, segment.reused
                request.num_reused_tokens += reused.stop - max(reused.start, num_cached)
                request.num_mended_tokens += max(0, reused.start - max(segment.start, num_cached))

    def skip(self, request: Request) -> int:
        """The first position that is not computed or placed."""
        at = request.num_computed
        for each in self._reuses[request.id].placed:
            if each.start <= at:
                at = max(at, each.stop)
        return at

    def take_placings(self) -> list[Placing]:
        """What is to be copied before the next step is computed."""
        queued, self._queued = self._queued, []
        return [each.placing for each in queued]

    def release_read(self) -> None:
        """The copies that were handed out have ended."""
        self._pool.release(self._read)
        self._read = []

    def leave(self, request: Request) -> None:
        """A request releases its blocks. Blocks that are being loaded are freed when that ends."""
        reuse = self._reuses.pop(request.id, None)
        if reuse is None:
            return
        self._queued = [each for each in self._queued if each.request is not request]
        for coming in reuse.coming:
            if coming.ticket is None:
                self._pool.release(coming.slots)
            else:
                assert self._tiers is not None
                self._tiers.cancel(coming.ticket)

    def _bring(self, request: Request, segment: Segment) -> _Coming | None:
        """None if it has to be computed: it is not there, loading takes longer, or no room."""
        slots = self._pool.share(segment.keys)
        num_shared = len(slots)
        keys = segment.keys[num_shared:]
        if not keys:
            return _Coming(request, segment, slots, num_shared)
        into = self._room_for_load(request, segment, num_shared)
        if into is None:
            self._pool.release(slots)
            return None
        assert self._tiers is not None
        coming = _Coming(request, segment, slots + into, num_shared)
        parent = segment.keys[num_shared - 1] if num_shared else None
        coming.ticket = self._tiers.load(keys, into, tenant=request.tenant, parents={0: parent})
        self._tickets[coming.ticket] = coming
        return coming

    def _room_for_load(
        self, request: Request, segment: Segment, num_shared: int
    ) -> list[Slot] | None:
        if self._tiers is None:
            return None
        keys = segment.keys[num_shared:]
        match = self._tiers.match(keys)
        if match.num_blocks < len(keys):
            return None
        choice: LoadChoice = self._choose(match, segment.start)
        if choice.num_blocks + choice.num_two_ended < len(keys):
            return None
        if not request.num_preemptions:
            self._tiers.note(match)
        return self._take(len(keys), request)

    def _placing(self, request: Request, coming: _Coming) -> Placing:
        segment, size = coming.segment, self._block_tokens
        # What is present may be shared with other requests: it must not be written.
        first = max(segment.reused.start, request.num_present)
        positions = np.arange(first, segment.reused.stop, dtype=np.int64)
        local = positions - segment.start
        source = np.array(coming.slots, np.int64)
        places = request.table.places
        return Placing(
            source[local // size],
            local % size,
            places[positions // size],
            positions % size,
            segment.start,
        )
