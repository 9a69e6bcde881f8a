"""Prompts that another server computes: their KV is taken as it comes, instead of computed.

The request runs, but is given no chunks until all complete blocks of its prompt have arrived. Each
time the tiers have more of them, these are loaded. If none has come for longer than computing the
rest would take (twice that, and at least a second), the rest is computed here: the other server may
be gone, or busy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.costs.patience import prefill_patience
from penstock.engine.announcer import Announcer
from penstock.engine.blocks import BlockPool
from penstock.engine.request import Request
from penstock.engine.tiers import EngineTiers
from penstock.types import Done, LookupId, Slot, TicketId

_LOOK_SECONDS = 0.005  # between two looks at the tiers
_ASK_SECONDS = 0.02  # between two questions to a remote tier
_MAX_ASKED_BLOCKS = 256

ComputeSeconds = Callable[[int, int], float | None]
"""Seconds to compute this many tokens after so many others; None while that is unknown."""


@dataclass(slots=True, eq=False)
class _Awaited:
    request: Request
    num_blocks: int  # complete blocks of the prompt
    since: float  # when it last got a block
    next_look: float = 0.0
    next_question: float = 0.0
    lookup: LookupId | None = None
    ticket: TicketId | None = None
    slots: list[Slot] = field(default_factory=list)  # of the load that is under way


class AwaitedPrefills:
    def __init__(
        self,
        pool: BlockPool,
        tiers: EngineTiers | None,
        block_tokens: int,
        compute_seconds: ComputeSeconds,
        announcer: Announcer | None = None,
    ) -> None:
        self._announcer = announcer
        self._pool = pool
        self._tiers = tiers
        self._block_tokens = block_tokens
        self._compute_seconds = compute_seconds
        self._awaited: dict[str, _Awaited] = {}  # by request
        self._tickets: dict[TicketId, _Awaited] = {}

    def __len__(self) -> int:
        """The number of loads that are under way."""
        return len(self._tickets)

    def holds(self, request: Request) -> bool:
        """Whether a running request waits for its blocks, and must not compute."""
        return request.id in self._awaited

    def begin(self, request: Request, now: float) -> None:
        """Wait for the blocks of a request that runs now, if another server computes them."""
        num_blocks = len(request.prompt_ids) // self._block_tokens
        if (
            self._tiers is None
            or not request.params.awaits_prefill
            or request.has_stopped_waiting
            or request.num_present >= num_blocks * self._block_tokens
        ):
            return
        self._awaited[request.id] = _Awaited(request, num_blocks, now)

    def advance(self, now: float) -> None:
        """Load what has come, and give up what does not come."""
        for awaited in list(self._awaited.values()):
            if awaited.ticket is None and now >= awaited.next_look:
                awaited.next_look = now + _LOOK_SECONDS
                self._look(awaited, now)

    def settle(self, done: Done, now: float) -> tuple[Request, int] | None:
        """Take in blocks that have arrived: the request, and how many. None if it is another's.

        The blocks are part of its table then, under their names.
        """
        awaited = self._tickets.pop(done.ticket, None)
        if awaited is None:
            return None
        slots, awaited.slots, awaited.ticket = awaited.slots, [], None
        request = awaited.request
        if self._awaited.get(request.id) is not awaited:
            self._pool.release(slots)
            return request, 0
        num_arrived = done.num_leading_ok
        if self._announcer is not None:
            first = len(request.table)
            self._announcer.completes(request, range(first, first + num_arrived))
        for slot, key in zip(slots[:num_arrived], done.keys, strict=False):
            self._pool.name(slot, key)
        request.table.extend(slots[:num_arrived])
        self._pool.release(slots[num_arrived:])
        if num_arrived:
            awaited.since = now
            awaited.next_look = now
        if len(request.table) >= awaited.num_blocks:
            del self._awaited[request.id]
        return request, num_arrived

    def leave(self, request: Request) -> None:
        """End the wait of a request. Blocks that are being loaded are freed when that ends."""
        awaited = self._awaited.pop(request.id, None)
        if awaited is not None and awaited.ticket is not None:
            assert self._tiers is not None
            self._tiers.cancel(awaited.ticket)

    def _look(self, awaited: _Awaited, now: float) -> None:
        assert self._tiers is not None
        request = awaited.request
        start = len(request.table)
        keys = request.chain.keys[start : awaited.num_blocks]
        if awaited.lookup is not None and self._tiers.is_looking_up(awaited.lookup):
            return
        awaited.lookup = None
        num_there = self._tiers.match(keys).num_blocks
        if num_there:
            slots = self._pool.take(num_there)
            if slots is not None:
                awaited.slots = slots
                awaited.ticket = self._tiers.load(
                    keys[:num_there],
                    slots,
                    tenant=request.tenant,
                    parents={0: request.chain.key_before(start)},
                )
                self._tickets[awaited.ticket] = awaited
                return
        elif now >= awaited.next_question:
            awaited.next_question = now + _ASK_SECONDS
            awaited.lookup = self._tiers.lookup(keys[:_MAX_ASKED_BLOCKS])
        if now - awaited.since > self._patience(awaited, start):
            request.has_stopped_waiting = True
            self.leave(request)

    def _patience(self, awaited: _Awaited, num_there: int) -> float:
        num_tokens = (awaited.num_blocks - num_there) * self._block_tokens
        return prefill_patience(self._compute_seconds(num_tokens, num_there * self._block_tokens))
