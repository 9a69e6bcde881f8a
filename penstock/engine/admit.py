"""How a waiting sequence starts: which blocks it shares, loads and computes.

The engine's scheduler and the simulator's both start sequences this way. `plan_admission` decides
and may find no room; a plan that it returned can always be carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from penstock.costs.choose import LoadChoice
from penstock.engine.blocks import BlockPool
from penstock.engine.tiers import EngineTiers
from penstock.types import BlockKey, Match, Slot, TicketId

Choose = Callable[[Match, int], LoadChoice]
"""How much of a match to load, given how many tokens before it have their KV on the device."""

_Sequence = TypeVar("_Sequence")


class DeviceRoom(Generic[_Sequence]):
    """Finds device blocks for sequences. Here their KV is never cold (but see `Placement`)."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def take(self, count: int, request: _Sequence) -> list[Slot] | None:
        """Hold `count` blocks, or none if it is below 1. If None, nothing is held."""
        return self._pool.take(max(0, count))

    def arrange(
        self, request: _Sequence, start: int, num_loads: int, slots: list[Slot]
    ) -> list[Slot | None] | None:
        """Where to load `num_loads` blocks from the `start`-th on: a device slot, or None for HOST.

        `slots` are held already, and those that are not needed are released. If the whole result
        is None, there is no room, and all of them are released.
        """
        more = self._pool.take(max(0, num_loads - len(slots)))
        if more is None:
            self._pool.release(slots)
            return None
        self._pool.release(slots[num_loads:])
        return [*slots[:num_loads], *more]


class AdmissionPlan(NamedTuple):
    """What a sequence starts with. Its slots are held."""

    keys: Sequence[BlockKey]  # of its complete blocks
    num_shared: int  # leading blocks that the device has
    match: Match | None  # of the blocks after those; None if the tiers were not asked
    choice: LoadChoice
    into: list[Slot | None]  # where the loaded blocks go
    first_slots: list[Slot]  # of the first chunk, if nothing is loaded before it

    def count_hits(self, tiers: EngineTiers, *, tenant: str) -> None:
        """Report what a new sequence has found to the tiers' policies and metrics."""
        if self.match is not None:
            tiers.note(self.match)
        if self.num_shared:
            tiers.used(self.keys[: self.num_shared], tenant=tenant)

    def load(self, tiers: EngineTiers, parent: BlockKey | None, *, tenant: str) -> TicketId:
        """Begin the load. `parent` is the last shared block."""
        return tiers.load(
            self.keys[self.num_shared :][: len(self.into)],
            self.into,
            patience_seconds=self.choice.patience_seconds,
            tenant=tenant,
            parents={0: parent},
        )


def plan_admission(
    request: _Sequence,
    keys: Sequence[BlockKey],
    num_shared: int,
    num_tokens: int,
    *,
    budget: int,
    block_tokens: int,
    room: DeviceRoom[_Sequence],
    tiers: EngineTiers | None,
    choose: Choose,
) -> AdmissionPlan | None:
    """Plan the start of a sequence of `num_tokens` that holds its shared blocks already.

    `budget` is the number of tokens left in this step. If None, there is no room, and nothing has
    been taken.
    """
    num_past = num_shared * block_tokens
    # Room first: a sequence that waits for room must not query the tiers at every step.
    first_end = -(-min(num_tokens, num_past + budget) // block_tokens)
    slots = room.take(first_end - num_shared, request)
    if slots is None:
        return None
    match, choice = None, LoadChoice(0)
    if tiers is not None and num_shared < len(keys):
        match = tiers.match(keys[num_shared:])
        choice = choose(match, num_past)
    if not choice.num_blocks:
        return AdmissionPlan(keys, num_shared, match, choice, [], slots)
    into = room.arrange(request, num_shared, choice.num_blocks, slots)
    return None if into is None else AdmissionPlan(keys, num_shared, match, choice, into, [])
