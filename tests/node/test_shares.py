"""Every extent of DRAM has one owner, and goes to the model that needs it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.errors import BookError
from penstock.node.shares import Shares, extent_size
from penstock.units import GiB, MiB


class SharedDram(RuleBasedStateMachine):
    @initialize(num=st.integers(1, 16), floor=st.integers(0, 8), cap=st.integers(1, 20))
    def start(self, num: int, floor: int, cap: int) -> None:
        self.num, self.cap = num, min(num, cap)
        self.floor = min(floor, self.cap)
        self.shares = Shares(num, floor=self.floor, cap=cap)
        self.rooms: dict[int, dict[int, int]] = {}  # each room's extents that are being emptied
        self.next_room = 1
        self.now = 0.0

    @precondition(lambda self: len(self.rooms) < 4)
    @rule()
    def add(self) -> None:
        self.rooms[self.next_room] = {}
        self.shares.add(self.next_room, self.now)
        self.next_room += 1

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        room = data.draw(st.sampled_from(sorted(self.rooms)))
        del self.rooms[room]
        self.shares.remove(room)

    @precondition(lambda self: self.rooms)
    @rule(data=st.data(), num=st.integers(1, 5))
    def grant(self, data: Any, num: int) -> None:
        room = data.draw(st.sampled_from(sorted(self.rooms)))
        num_free = self.shares.num_free
        granted = self.shares.grant(room, num, self.now)
        assert len(granted) <= min(num, num_free)
        assert set(granted) <= self.shares.owned(room)

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def take(self, data: Any) -> None:
        room = data.draw(st.sampled_from(sorted(self.rooms)))
        donor = self.shares.donor(room, self.now)
        if donor is None:
            return
        assert donor != room
        assert not self.shares.num_free
        kept = self.shares.owned(donor) - self.rooms[donor].keys()
        self.shares.give_up(donor, max(kept), room)
        self.rooms[donor][max(kept)] = room
        assert len(kept) - 1 + self.coming(donor) >= min(self.floor, self.num // len(self.rooms))

    @precondition(lambda self: any(self.rooms.values()))
    @rule(data=st.data())
    def hand_over(self, data: Any) -> None:
        pairs = [(room, extent) for room, going in self.rooms.items() for extent in going]
        room, extent = data.draw(st.sampled_from(sorted(pairs)))
        heir = self.rooms[room].pop(extent)
        owner = self.shares.gave_up(room, extent)
        assert owner == (heir if heir in self.rooms else None)

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def every_extent_has_one_place(self) -> None:
        if not hasattr(self, "shares"):
            return
        self.shares.check()
        owned = [e for room in self.rooms for e in self.shares.owned(room)]
        assert len(owned) == len(set(owned))
        assert len(owned) + self.shares.num_free == self.num
        for room, going in self.rooms.items():
            assert len(self.shares.owned(room)) - len(going) + self.coming(room) <= self.cap

    def coming(self, room: int) -> int:
        return sum(heir == room for going in self.rooms.values() for heir in going.values())


TestSharedDram = SharedDram.TestCase
TestSharedDram.settings = settings(
    max_examples=200, deadline=None, suppress_health_check=list(HealthCheck)
)


def move(shares: Shares, room: int, now: float) -> bool:
    """Give a room one more extent, if another one should give it up."""
    if shares.grant(room, 1, now):
        return True
    donor = shares.donor(room, now)
    if donor is None:
        return False
    extent = max(shares.owned(donor))
    shares.give_up(donor, extent, room)
    assert shares.gave_up(donor, extent) == room
    return True


@given(
    num=st.integers(2, 64),
    rooms=st.integers(2, 5),
    floor=st.integers(0, 10),
    cap=st.integers(1, 64),
    data=st.data(),
)
@settings(deadline=None)
def test_busy_rooms_come_to_rest(num: int, rooms: int, floor: int, cap: int, data: Any) -> None:
    """All want more, at every moment and in any order: at some point, nothing moves any more."""
    shares = Shares(num, floor=min(floor, cap), cap=cap)
    for room in range(rooms):
        shares.add(room, 0.0)
        shares.grant(room, data.draw(st.integers(0, num)), 0.0)
    order = data.draw(st.permutations(range(rooms)))
    for _ in range(20 * num):
        if not sum(move(shares, room, 1.0) for room in order):
            break
    else:
        pytest.fail("extents go round and round")
    sizes = [len(shares.owned(room)) for room in range(rooms)]
    shares.check()
    least = min(min(floor, cap), num // rooms)
    assert min(sizes) >= least
    if all(size < cap for size in sizes):
        assert max(sizes) - min(sizes) <= max(1, max(sizes) - floor)


def test_two_equal_rooms_take_nothing_from_each_other() -> None:
    shares = Shares(10)
    shares.add(1, 0.0)
    shares.add(2, 0.0)
    shares.grant(1, 10, 0.0)
    num_moves = 0
    for _ in range(100):
        num_moves += move(shares, 2, 1.0)
        num_moves += move(shares, 1, 1.0)
    assert (len(shares.owned(1)), len(shares.owned(2))) == (5, 5)
    assert num_moves == 5


def test_an_idle_room_gives_down_to_its_floor() -> None:
    shares = Shares(10, floor=2)
    shares.add(1, 0.0)
    shares.add(2, 0.0)
    shares.grant(1, 10, 0.0)
    while move(shares, 2, 100.0):
        pass
    assert (len(shares.owned(1)), len(shares.owned(2))) == (2, 8)


def test_what_was_given_up_does_not_go_back() -> None:
    shares = Shares(4)
    shares.add(1, 0.0)
    shares.add(2, 0.0)
    shares.grant(1, 4, 0.0)
    assert shares.donor(2, 1.0) == 1
    shares.give_up(1, 3, 2)
    assert shares.grant(1, 1, 1.0) == []
    assert shares.gave_up(1, 3) == 2
    assert shares.grant(1, 1, 1.0) == []
    assert shares.owned(2) == {3}
    with pytest.raises(BookError):
        shares.give_up(1, 3, 2)


def test_what_was_for_a_room_that_is_gone_is_free() -> None:
    shares = Shares(4)
    shares.add(1, 0.0)
    shares.add(2, 0.0)
    shares.grant(1, 4, 0.0)
    shares.give_up(1, 3, 2)
    shares.remove(2)
    assert shares.gave_up(1, 3) is None
    assert shares.num_free == 1
    shares.check()


@pytest.mark.parametrize("size", [2 * MiB, 16 * MiB, GiB, 100 * GiB, 4096 * GiB])
def test_extents_are_whole_huge_pages_and_not_too_many(size: int) -> None:
    assert extent_size(size) % (2 * MiB) == 0
    assert 1 <= size // extent_size(size) <= 256
