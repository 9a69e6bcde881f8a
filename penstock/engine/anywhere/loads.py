"""Brings the segments of running requests to the device, and says when they can be placed.

A segment's blocks are shared if the device has them, and loaded if not. When all of them are there,
its reused tokens are copied to the request's own blocks (see `turning`); afterwards the request
needs the segment's blocks no more. A segment that cannot be had is computed like any other part of
the prompt.

A request computes what stands before its first segment. When all of its segments have arrived, they
are placed, and it computes the rest. To blend, the tokens to mend are chosen between (see `looks`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from penstock.costs.choose import LoadChoice
from penstock.engine.admit import Choose
from penstock.engine.anywhere.looks import Look, LookPart
from penstock.engine.anywhere.placing import Placing
from penstock.engine.anywhere.segmented import AnySegment, Segmented
from penstock.engine.blocks import BlockPool
from penstock.engine.lossy import LossyBlocks
from penstock.engine.table import Places
from penstock.engine.tiers import EngineTiers
from penstock.types import Done, Slot, TicketId, Verdict

_NOTHING: Places = np.zeros(0, np.int64)

_Request = TypeVar("_Request", bound=Segmented)

Take = Callable[[int, _Request], list[Slot] | None]
"""Holds so many device blocks for a request; None if there is no room."""


@dataclass(slots=True, eq=False)
class _Coming(Generic[_Request]):
    """A segment whose blocks are held, or are being loaded."""

    request: _Request
    segment: AnySegment
    slots: list[Slot]  # of its blocks
    num_shared: int  # the first of them that the device had
    ticket: TicketId | None = None


@dataclass(slots=True, eq=False)
class _Reuse(Generic[_Request]):
    """One request's segments, in order."""

    coming: list[_Coming[_Request]] = field(default_factory=list)
    placed: list[range] = field(default_factory=list)  # positions that are not computed
    look: Look[_Request] | None = None  # that is not finished


class _Queued(NamedTuple, Generic[_Request]):
    request: _Request
    placing: Placing


class Work(NamedTuple):
    """What a request does in the next step."""

    positions: Places  # that it computes; maybe none
    end: int  # it needs room for so many of its tokens before
    places: bool = False  # whether its segments are placed first
    num_looked: int = 0  # tokens at which it looks afterwards, to choose which are mended
    num_charged: int = 0  # tokens of the step's budget that it takes


class SegmentLoads(Generic[_Request]):
    def __init__(
        self,
        pool: BlockPool,
        tiers: EngineTiers | None,
        block_tokens: int,
        take: Take[_Request],
        choose: Choose,
        lossy: LossyBlocks,
        looks_per_token: int = 1,
    ) -> None:
        """`choose` chooses no two-ended loads. `looks_per_token`: how many tokens are looked at in
        the time in which one is computed.
        """
        self._looks_per_token = looks_per_token
        self._lossy = lossy
        self._pool = pool
        self._tiers = tiers
        self._block_tokens = block_tokens
        self._take = take
        self._choose = choose
        self._reuses: dict[_Request, _Reuse[_Request]] = {}
        self._tickets: dict[TicketId, _Coming[_Request]] = {}
        self._queued: list[_Queued[_Request]] = []  # to be copied before the next step
        self._looks: list[LookPart[_Request]] = []  # of the next step
        self._read: list[Slot] = []  # held for copies that were handed out

    def __len__(self) -> int:
        """The number of loads that are under way."""
        return len(self._tickets)

    def num_missing(self, segment: AnySegment) -> int:
        """How many blocks of a segment are neither on the device nor in the tiers."""
        keys = segment.keys[self._pool.num_leading(segment.keys) :]
        num_there = self._tiers.match(keys).num_blocks if self._tiers and keys else 0
        return len(keys) - num_there

    def has_room(self, request: _Request) -> bool:
        """Whether the device has room for a waiting request and for its segments.

        Until they are placed, it has them twice. The request holds the blocks that it shares.
        """
        wanted = self.wanted(request)
        if not wanted:  # it may be larger than the device: only a part of it is there at a time
            return True
        shared = [self._pool.share(segment.keys) for segment in wanted]
        num_loads = sum(len(segment.keys) for segment in wanted) - sum(map(len, shared))
        num_own = -(-len(request.tokens) // self._block_tokens) - len(request.table)
        slots = self._take(num_loads + num_own, request)
        for each in (*shared, slots or ()):
            self._pool.release(each)
        return slots is not None

    def begin(self, request: _Request, num_present: int) -> None:
        """Bring the segments of a request that starts and will have its first tokens."""
        reuse = self._reuses[request] = _Reuse()
        for segment in self.wanted(request, num_present):
            if (coming := self._bring(request, segment)) is not None:
                reuse.coming.append(coming)

    def wanted(self, request: _Request, num_present: int = 0) -> list[AnySegment]:
        """The segments to bring, as far as a device with nothing else on it could have them."""
        num_present = max(num_present, len(request.table) * self._block_tokens)
        num_blocks = -(-len(request.tokens) // self._block_tokens)
        wanted = []
        for segment in request.segments:
            fits = num_blocks + len(segment.keys) <= self._pool.num_blocks
            if segment.reused.stop > num_present and fits:
                wanted.append(segment)
                num_blocks += len(segment.keys)
        return wanted

    def settle(self, done: Done) -> bool:
        """Finish a load. False if it was not one of a segment."""
        coming = self._tickets.pop(done.ticket, None)
        if coming is None:
            return False
        coming.ticket = None
        reuse = self._reuses.get(coming.request)
        if reuse is None or coming not in reuse.coming:
            self._pool.release(coming.slots)
            return True
        request = coming.request
        loaded = coming.slots[coming.num_shared :]
        for slot, key, verdict in zip(loaded, done.keys, done.verdicts, strict=True):
            if verdict is Verdict.OK:
                self._pool.name(slot, key)
        if not request.num_preemptions:
            tiers = [tier for tier in done.sources if tier is not None]
            request.found.update(tiers)
            request.found_elsewhere.update(tiers)
            request.lost.update(verdict for verdict in done.verdicts if verdict is not Verdict.OK)
        if done.num_leading_ok < len(loaded):  # it is computed
            reuse.coming.remove(coming)
            self._pool.release(coming.slots)
        else:
            request.num_loaded_tokens += len(loaded) * self._block_tokens
            self._lossy.loaded(request, len(loaded), loaded)
        return True

    def next_work(self, request: _Request, budget: int) -> Work | None:
        """What a running request does next. None if it waits for its segments."""
        reuse = self._reuses[request]
        if reuse.look is not None:
            return self._look_work(reuse.look.num_left, reuse.look.stop, budget)
        if not reuse.coming:
            rest = range(request.num_computed, len(request.tokens))
            found = self._computed(request, rest, reuse.placed)[:budget]
            return Work(found, int(found[-1]) + 1, num_charged=len(found))
        first, last = reuse.coming[0].segment.reused, reuse.coming[-1].segment.reused
        if request.num_computed < first.start:
            end = min(first.start, request.num_computed + budget)
            before = np.arange(request.num_computed, end, dtype=np.int64)
            return Work(before, end, num_charged=len(before))
        if any(coming.ticket is not None for coming in reuse.coming):
            return None
        if _must_choose(request, reuse.coming):
            num_tokens = last.stop - request.num_computed
            return self._look_work(num_tokens, last.stop, budget)._replace(places=True)
        rest = range(request.num_computed, len(request.tokens))
        placed = [*reuse.placed, *(coming.segment.reused for coming in reuse.coming)]
        found = self._computed(request, rest, placed)[:budget]
        end = max(last.stop, int(found[-1]) + 1)
        return Work(found, end, places=True, num_charged=len(found))

    def _look_work(self, num_left: int, end: int, budget: int) -> Work:
        num_tokens = min(num_left, budget * self._looks_per_token)
        num_charged = -(-num_tokens // self._looks_per_token)
        return Work(_NOTHING, end, num_looked=num_tokens, num_charged=num_charged)

    def place(self, request: _Request) -> None:
        """Copy all segments of a request. They have arrived, and it has room for them."""
        reuse = self._reuses[request]
        coming, reuse.coming = reuse.coming, []
        if _must_choose(request, coming):
            reused = [_placed(request, each) for each in coming]
            reuse.look = Look(request, reused, request.num_computed, request.num_computed)
        # After a preemption it is placed again. What is blended is counted when it is chosen.
        is_counted = not (request.num_reused_tokens or request.is_blended)
        for each in coming:
            placing = self._placing(request, each)
            self._queued.append(_Queued(request, placing))
            self._read += each.slots
            reuse.placed.append(each.segment.reused)
            if is_counted:
                request.num_reused_tokens += len(placing.slots)
                # What was found as a prefix of the prompt is counted as cached, and only so.
                first = max(each.segment.start, request.num_cached_tokens)
                request.num_mended_tokens += max(0, each.segment.reused.start - first)

    def look(self, request: _Request, num_tokens: int) -> None:
        """Look at the next tokens of a request, whose segments are placed."""
        reuse = self._reuses[request]
        assert reuse.look is not None
        part = reuse.look.advance(num_tokens)
        self._looks.append(part)
        if part.is_last:
            reuse.look = None

    def skip(self, request: _Request) -> int:
        """The first position that is not computed or placed."""
        rest = range(request.num_computed, len(request.tokens))
        found = self._computed(request, rest, self._reuses[request].placed)
        return int(found[0]) if len(found) else len(request.tokens)

    @staticmethod
    def _computed(request: _Request, positions: range, placed: list[range]) -> Places:
        """Those of `positions` that must be computed, because they are not placed, or mended."""
        if not placed or placed[-1].stop <= positions.start:
            return np.arange(positions.start, positions.stop, dtype=np.int64)
        is_computed = np.ones(max(positions.stop, placed[-1].stop), np.bool_)
        for part in placed:
            is_computed[part.start : part.stop] = False
        if request.mended is not None:
            is_computed[request.mended] = True
        return np.flatnonzero(is_computed[positions.start : positions.stop]) + positions.start

    @property
    def is_looking(self) -> bool:
        """Whether the next step looks at tokens."""
        return bool(self._looks)

    def take_placings(self) -> tuple[list[Placing], list[LookPart[_Request]]]:
        """What is to be copied and then looked at, before the next step is computed."""
        queued, self._queued = self._queued, []
        looks, self._looks = self._looks, []
        return [each.placing for each in queued], looks

    def release_read(self) -> None:
        """The copies that were handed out have ended."""
        self._pool.release(self._read)
        self._read = []

    def leave(self, request: _Request) -> None:
        """A request releases its blocks. Blocks that are being loaded are freed when that ends."""
        reuse = self._reuses.pop(request, None)
        if reuse is None:
            return
        self._queued = [each for each in self._queued if each.request is not request]
        self._looks = [each for each in self._looks if each.look.request is not request]
        for coming in reuse.coming:
            if coming.ticket is None:
                self._pool.release(coming.slots)
            else:
                assert self._tiers is not None
                self._tiers.cancel(coming.ticket)

    def _bring(self, request: _Request, segment: AnySegment) -> _Coming[_Request] | None:
        """None if it has to be computed: it is not there, loading takes longer, or no room."""
        slots = self._pool.share(segment.keys)
        num_shared = len(slots)
        keys = segment.keys[num_shared:]
        into = self._room_for_load(request, segment, num_shared) if keys else []
        if into is None:
            self._pool.release(slots)
            return None
        self._lossy.shared(request, slots)
        if self._tiers is not None and slots and not request.num_preemptions:
            self._tiers.used(segment.keys[:num_shared], tenant=request.tenant)
        if not keys:
            return _Coming(request, segment, slots, num_shared)
        assert self._tiers is not None
        coming = _Coming(request, segment, slots + into, num_shared)
        parent = segment.keys[num_shared - 1] if num_shared else None
        coming.ticket = self._tiers.load(keys, into, tenant=request.tenant, parents={0: parent})
        self._tickets[coming.ticket] = coming
        return coming

    def _room_for_load(
        self, request: _Request, segment: AnySegment, num_shared: int
    ) -> list[Slot] | None:
        if self._tiers is None:
            return None
        keys = segment.keys[num_shared:]
        match = self._tiers.match(keys)
        if match.num_blocks < len(keys):
            return None
        choice: LoadChoice = self._choose(match, segment.start)
        if choice.num_blocks < len(keys) or not _saves_time(choice, segment):
            return None
        if not request.num_preemptions:
            self._tiers.note(match)
        return self._take(len(keys), request)

    def _placing(self, request: _Request, coming: _Coming[_Request]) -> Placing:
        segment, size = coming.segment, self._block_tokens
        placed = _placed(request, coming)
        positions = np.arange(placed.start, placed.stop, dtype=np.int64)
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


def _saves_time(choice: LoadChoice, segment: AnySegment) -> bool:
    """Whether loading is also faster than to compute what is not mended: the rest is computed
    anyway.
    """
    loading, computing = choice.load_seconds, choice.compute_seconds
    if loading is None or computing is None or loading >= computing:  # to measure the link
        return True
    return loading < computing * segment.saved_share


def _placed(request: _Request, coming: _Coming[_Request]) -> range:
    """The positions that are copied for a segment."""
    reused = coming.segment.reused
    # What is present may be shared with other requests: it must not be written.
    return range(min(max(reused.start, request.num_present), reused.stop), reused.stop)


def _must_choose(request: _Request, coming: list[_Coming[_Request]]) -> bool:
    """Whether there is something to mend that was not considered before a preemption."""
    if not request.is_blended:
        return False
    parts = [_placed(request, each) for each in coming]
    return any(
        part and not any(old.start <= part.start and part.stop <= old.stop for old in request.seen)
        for part in parts
    )
