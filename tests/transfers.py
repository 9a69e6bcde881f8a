"""Orders for a transfer engine, and what became of them."""

from __future__ import annotations

from itertools import count

from tools import TIMEOUT_SECONDS, key_of

from penstock.transfer.engine import TransferEngine
from penstock.types import Direction, Outcome, Slot, Tier, Transfer, TransferId

LOAD, SAVE = Direction.LOAD, Direction.SAVE
_ids = count(1)


def transfer(
    direction: Direction = LOAD,
    link: Tier = Tier.DISK,
    *,
    num: int = 1,
    deadline: float | None = None,
) -> Transfer:
    upper = Tier(link - 1)
    source, target = (link, upper) if direction is LOAD else (upper, link)
    number = next(_ids)
    slots = tuple(Slot(slot) for slot in range(num))
    keys = tuple(key_of((number, slot)) for slot in slots)
    return Transfer(TransferId(number), source, target, keys, slots, slots, deadline)


def outcomes(engine: TransferEngine, num: int) -> dict[TransferId, Outcome]:
    """The next `num` outcomes; fails rather than wait for ever, and if one comes twice."""
    found: dict[TransferId, Outcome] = {}
    while len(found) < num:
        assert engine.wait(TIMEOUT_SECONDS), f"{len(found)} of {num} transfers ended"
        for outcome in engine.poll():
            assert outcome.transfer_id not in found, "reported twice"
            found[outcome.transfer_id] = outcome
    return found
