"""Prompts that are computed from the front while their back is loaded (see `costs.choose`).

The back is loaded in pieces, the last one first. A piece that has come waits outside the sequence's
table until the front has reached it; then all that has come is its end. The front never waits: what
it overtakes is given up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.engine.blocks import BlockPool
from penstock.engine.request import Request
from penstock.engine.tiers import EngineTiers
from penstock.types import Done, Slot, TicketId, Tier, Verdict

_NUM_PIECES = 16


@dataclass(slots=True, eq=False)
class _Piece:
    start: int  # block
    slots: list[Slot]

    @property
    def end(self) -> int:
        return self.start + len(self.slots)


@dataclass(slots=True, eq=False)
class _TwoEndedLoad:
    request: Request
    start: int  # the first block that is not loaded yet, in any case
    piece_blocks: int
    back: int  # the first of the blocks that have come
    slots: list[Slot] = field(default_factory=list)  # theirs, in order
    next_end: int = 0  # where the piece to be asked for next ends
    under_way: dict[TicketId, _Piece] = field(default_factory=dict)
    early: list[_Piece] = field(default_factory=list)  # have come before one behind them
    given_up: bool = False  # one did not come: no more are asked for
    sources: dict[int, Tier] = field(default_factory=dict)  # of those that have come, by block


class TwoEndedLoads:
    def __init__(
        self, pool: BlockPool, tiers: EngineTiers | None, block_tokens: int, max_chunk_tokens: int
    ) -> None:
        """Chunks of at most so many tokens: how far the back has come is seen between them."""
        self._pool = pool
        self._tiers = tiers
        self._block_tokens = block_tokens
        self._max_chunk_tokens = max_chunk_tokens
        self._two_ended_loads: dict[str, _TwoEndedLoad] = {}  # by request
        self._tickets: dict[TicketId, _TwoEndedLoad] = {}

    def __len__(self) -> int:
        """Pieces under way."""
        return len(self._tickets)

    def __iter__(self) -> Iterator[Request]:
        """The requests that have one, over a copy: it may end."""
        return iter([meeting.request for meeting in self._two_ended_loads.values()])

    def begin(self, request: Request, start: int, end: int) -> None:
        """Its blocks from `start` to `end` are to be loaded from the back."""
        piece_blocks = max(1, (end - start) // _NUM_PIECES)
        meeting = _TwoEndedLoad(request, start, piece_blocks, back=end, next_end=end)
        self._two_ended_loads[request.id] = meeting
        self._ask(meeting)

    def end_of_chunk(self, request: Request, num_tokens: int) -> int:
        """Of `num_tokens` to be computed next, those before what has come."""
        meeting = self._two_ended_loads.get(request.id)
        if meeting is None:
            return num_tokens
        num_tokens = min(num_tokens, self._max_chunk_tokens)
        gap = meeting.back * self._block_tokens - request.num_computed
        return max(1, min(num_tokens, gap)) if meeting.slots else num_tokens

    def try_to_meet(self, request: Request) -> bool:
        """Front or back has moved on. True: they have met, and the back is part of the table."""
        meeting = self._two_ended_loads[request.id]
        front = -(-request.num_computed // self._block_tokens)
        if meeting.slots and front > meeting.back:  # overtaken in part
            num_past = min(front - meeting.back, len(meeting.slots))
            self._pool.release(meeting.slots[:num_past])
            del meeting.slots[:num_past]
            meeting.back += num_past
        is_met = bool(meeting.slots) and request.num_computed >= meeting.back * self._block_tokens
        if is_met:
            keys = request.chain.keys[meeting.back : meeting.back + len(meeting.slots)]
            for slot, key in zip(meeting.slots, keys, strict=True):
                self._pool.name(slot, key)
            request.table.extend(meeting.slots)
            request.num_loaded_tokens += len(meeting.slots) * self._block_tokens
            if not request.num_preemptions:
                last = meeting.back + len(meeting.slots)
                request.found.update(meeting.sources[n] for n in range(meeting.back, last))
            meeting.slots = []
            self.leave(request)
            return True
        for ticket, piece in meeting.under_way.items():
            if piece.end <= front:
                assert self._tiers is not None
                self._tiers.cancel(ticket)
        self._ask(meeting)
        if not (meeting.slots or meeting.under_way):
            self.leave(request)  # there is nothing to wait for
        return False

    def settle(self, done: Done) -> bool:
        """Whether it was a piece that has come or not."""
        meeting = self._tickets.pop(done.ticket, None)
        if meeting is None:
            return False
        piece = meeting.under_way.pop(done.ticket)
        if self._two_ended_loads.get(meeting.request.id) is not meeting:
            self._pool.release(piece.slots)
            return True
        for index, source in enumerate(done.sources, piece.start):
            if source is not None:
                meeting.sources[index] = source
        bad = [index for index, verdict in enumerate(done.verdicts) if verdict is not Verdict.OK]
        if bad:  # what lies before a gap is of no use
            num_lost = bad[-1] + 1
            self._pool.release(piece.slots[:num_lost])
            piece = _Piece(piece.start + num_lost, piece.slots[num_lost:])
            meeting.given_up = True
        meeting.early.append(piece)
        for early in sorted(meeting.early, key=lambda piece: -piece.end):
            if early.end == meeting.back:
                meeting.slots[:0] = early.slots
                meeting.back = early.start
                meeting.early.remove(early)
        return True

    def leave(self, request: Request) -> None:
        """The request is met, preempted or gone; what is under way is freed when it ends."""
        meeting = self._two_ended_loads.pop(request.id, None)
        if meeting is None:
            return
        assert self._tiers is not None
        for slots in (meeting.slots, *(piece.slots for piece in meeting.early)):
            self._pool.release(slots)
        for ticket in meeting.under_way:
            self._tiers.cancel(ticket)

    def _ask(self, meeting: _TwoEndedLoad) -> None:
        """For the next pieces, as far as there is room: what is not needed is called back."""
        assert self._tiers is not None
        request = meeting.request
        front = max(meeting.start, -(-request.num_computed // self._block_tokens))
        while not meeting.given_up:
            start = max(meeting.next_end - meeting.piece_blocks, front)
            num_blocks = meeting.next_end - start
            if num_blocks < min(2, meeting.piece_blocks):
                return
            num_for_front = meeting.back - len(request.table)
            if self._pool.num_available < num_blocks + num_for_front:
                return
            slots = self._pool.take(num_blocks)
            assert slots is not None
            keys = request.chain.keys[start : meeting.next_end]
            parents = {0: request.chain.key_before(start)}
            ticket = self._tiers.load(keys, slots, tenant=request.tenant, parents=parents)
            meeting.under_way[ticket] = _Piece(start, slots)
            self._tickets[ticket] = meeting
            meeting.next_end = start
