"""Prompts whose front is computed while their back is loaded (see `costs.choose`).

The back is loaded in pieces, the last one first. Pieces that have arrived stay outside the
sequence's table until the front reaches them; then they become its end. The front never waits:
loaded blocks that it overtakes are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.engine.announcer import Announcer
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
    start: int  # its first block
    piece_blocks: int
    back: int  # the first block that has arrived: from here on all have
    slots: list[Slot] = field(default_factory=list)  # of the blocks from `back` on
    next_end: int = 0  # where the next piece to request ends
    under_way: dict[TicketId, _Piece] = field(default_factory=dict)
    early: list[_Piece] = field(default_factory=list)  # arrived before the piece after them
    has_failed: bool = False  # a piece failed: no more are requested
    sources: dict[int, Tier] = field(default_factory=dict)  # the tier of each arrived block


class TwoEndedLoads:
    def __init__(
        self,
        pool: BlockPool,
        tiers: EngineTiers | None,
        block_tokens: int,
        max_chunk_tokens: int,
        announcer: Announcer | None = None,
    ) -> None:
        """`max_chunk_tokens`: chunks are short, because progress is checked only between them."""
        self._pool = pool
        self._tiers = tiers
        self._announcer = announcer
        self._block_tokens = block_tokens
        self._max_chunk_tokens = max_chunk_tokens
        self._loads: dict[str, _TwoEndedLoad] = {}  # by request
        self._tickets: dict[TicketId, _TwoEndedLoad] = {}

    def __len__(self) -> int:
        """The number of pieces being loaded."""
        return len(self._tickets)

    def __iter__(self) -> Iterator[Request]:
        """The requests that have a two-ended load. Loads may end during the iteration."""
        return iter([load.request for load in self._loads.values()])

    def begin(self, request: Request, start: int, end: int) -> None:
        """Begin to load a request's blocks from `end` back to `start`."""
        piece_blocks = max(1, (end - start) // _NUM_PIECES)
        load = _TwoEndedLoad(request, start, piece_blocks, back=end, next_end=end)
        self._loads[request.id] = load
        self._request_pieces(load)

    def end_of_chunk(self, request: Request, num_tokens: int) -> int:
        """Shorten a chunk of `num_tokens` so that it ends where the loaded blocks begin."""
        load = self._loads.get(request.id)
        if load is None:
            return num_tokens
        num_tokens = min(num_tokens, self._max_chunk_tokens)
        gap = load.back * self._block_tokens - request.num_computed
        return max(1, min(num_tokens, gap)) if load.slots else num_tokens

    def try_to_join(self, request: Request) -> bool:
        """Join front and back if they have met. If True, the back is now part of the table."""
        load = self._loads[request.id]
        front = -(-request.num_computed // self._block_tokens)
        if load.slots and front > load.back:  # the front has overtaken some blocks
            num_past = min(front - load.back, len(load.slots))
            self._pool.release(load.slots[:num_past])
            del load.slots[:num_past]
            load.back += num_past
        has_joined = bool(load.slots) and request.num_computed >= load.back * self._block_tokens
        if has_joined:
            keys = request.chain.keys[load.back : load.back + len(load.slots)]
            if self._announcer is not None:
                self._announcer.completes(request, range(load.back, load.back + len(load.slots)))
            for slot, key in zip(load.slots, keys, strict=True):
                self._pool.name(slot, key)
            request.table.extend(load.slots)
            request.num_loaded_tokens += len(load.slots) * self._block_tokens
            if not request.num_preemptions:
                last = load.back + len(load.slots)
                request.found.update(load.sources[n] for n in range(load.back, last))
            load.slots = []
            self.leave(request)
            return True
        for ticket, piece in load.under_way.items():
            if piece.end <= front:
                assert self._tiers is not None
                self._tiers.cancel(ticket)
        self._request_pieces(load)
        if not (load.slots or load.under_way):
            self.leave(request)  # nothing more will arrive
        return False

    def settle(self, done: Done) -> bool:
        """Take in a piece that has arrived or failed. False if the load was not a piece."""
        load = self._tickets.pop(done.ticket, None)
        if load is None:
            return False
        piece = load.under_way.pop(done.ticket)
        if self._loads.get(load.request.id) is not load:
            self._pool.release(piece.slots)
            return True
        for index, source in enumerate(done.sources, piece.start):
            if source is not None:
                load.sources[index] = source
        bad = [index for index, verdict in enumerate(done.verdicts) if verdict is not Verdict.OK]
        if bad:  # blocks before a gap cannot be used
            num_lost = bad[-1] + 1
            self._pool.release(piece.slots[:num_lost])
            piece = _Piece(piece.start + num_lost, piece.slots[num_lost:])
            load.has_failed = True
        load.early.append(piece)
        for early in sorted(load.early, key=lambda piece: -piece.end):
            if early.end == load.back:
                load.slots[:0] = early.slots
                load.back = early.start
                load.early.remove(early)
        return True

    def leave(self, request: Request) -> None:
        """End a request's two-ended load. Pieces being loaded are freed when they end."""
        load = self._loads.pop(request.id, None)
        if load is None:
            return
        assert self._tiers is not None
        for slots in (load.slots, *(piece.slots for piece in load.early)):
            self._pool.release(slots)
        for ticket in load.under_way:
            self._tiers.cancel(ticket)

    def _request_pieces(self, load: _TwoEndedLoad) -> None:
        """Request the next pieces, as far as there is room for them and for the front."""
        assert self._tiers is not None
        request = load.request
        front = max(load.start, -(-request.num_computed // self._block_tokens))
        while not load.has_failed:
            start = max(load.next_end - load.piece_blocks, front)
            num_blocks = load.next_end - start
            if num_blocks < min(2, load.piece_blocks):
                return
            num_for_front = load.back - len(request.table)
            if self._pool.num_available < num_blocks + num_for_front:
                return
            slots = self._pool.take(num_blocks)
            assert slots is not None
            keys = request.chain.keys[start : load.next_end]
            parents = {0: request.chain.key_before(start)}
            ticket = self._tiers.load(keys, slots, tenant=request.tenant, parents=parents)
            load.under_way[ticket] = _Piece(start, slots)
            self._tickets[ticket] = load
            load.next_end = start
