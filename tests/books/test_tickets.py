from __future__ import annotations

import pytest
from tools import key_of

from penstock.books.tickets import Ticket
from penstock.types import BlockKey, Direction, Slot, TicketId, Verdict

KEYS = tuple(key_of(number) for number in range(8))


def ticket(parents: dict[int, BlockKey | None] | None = None) -> Ticket:
    slots = tuple(Slot(slot) for slot in range(8))
    return Ticket(TicketId(1), Direction.LOAD, KEYS, slots, 0.0, parents=parents or {})


@pytest.mark.parametrize("parents", [{}, {0: key_of("before all")}, {3: None, 5: key_of("other")}])
@pytest.mark.parametrize("stretch", [range(8), range(3), range(2, 6), range(7, 8), range(4, 4)])
def test_a_stretch_is_dealt_with_as_its_positions_one_by_one(
    stretch: range, parents: dict[int, BlockKey | None]
) -> None:
    whole, single = ticket(parents), ticket(parents)
    positions = list(stretch)
    assert list(whole.keys_at(stretch)) == single.keys_at(positions)
    assert list(whole.slots_at(stretch)) == single.slots_at(positions)
    assert whole.parents_at(stretch) == single.parents_at(positions)
    for one, at in ((whole, stretch), (single, positions)):
        one.judge([2], Verdict.MISSING)
        one.judge(at, Verdict.OK)
    assert whole.open_positions() == single.open_positions()
    for one in (whole, single):
        one.judge(range(8), Verdict.OK)
        assert one.over
    assert whole.done(1.0) == single.done(1.0)
