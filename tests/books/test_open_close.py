"""The books of a HOST whose slots open and close, against the same model of the world.

A closed slot belongs to somebody else: what the world holds there is garbage. So a closed slot that
is handed out, found or read shows up as wrong content.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from penstock.books.ledger import Ledger
from penstock.errors import BookError
from penstock.policies import LRU
from penstock.policies.base import Policy
from penstock.types import BlockKey, Slot, Tier
from tests.books.test_ledgers import GARBAGE, Books, some_keys

A, B, C, D = (BlockKey(bytes([i]) * 32) for i in range(4))


class OpeningBooks(Books):
    def make_host(self, num_slots: int, policy: Policy) -> Ledger:
        self.num_slots = num_slots
        self.going: set[Slot] = set()  # that close when nothing uses them
        self.pinned: Counter[Slot] = Counter()
        return self.ledger_type(num_slots, policy, closed=True)

    @property
    def closed(self) -> set[Slot]:
        return {Slot(s) for s in range(self.num_slots) if self.host.are_closed([Slot(s)])}

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def open(self, data: Any) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.closed)), min_size=1, unique=True))
        self.stack.host.open(slots)
        self.going.difference_update(slots)

    @rule(data=st.data())
    def close(self, data: Any) -> None:
        of_all = st.sampled_from(range(self.num_slots))
        slots = [Slot(slot) for slot in data.draw(st.lists(of_all, min_size=1, unique=True))]
        self.going.update(slots)
        self.go_on_closing()
        self.stack.tick(self.now)
        self.collect()

    @rule()
    def go_on_closing(self) -> None:
        """As a node does at every step."""
        self.stack.ledgers.close_host(sorted(self.going))
        self.going -= self.closed
        for slot in self.closed:
            self.world[Tier.HOST][slot] = GARBAGE

    @rule(keys=some_keys)
    def pin(self, keys: list[BlockKey]) -> None:
        self.pinned.update(slot for slot in self.stack.pins.pin(keys) if slot is not None)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        slot = data.draw(st.sampled_from(sorted(self.pinned)))
        self.stack.pins.unpin([slot])
        self.pinned -= Counter([slot])

    @invariant()
    def closed_slots_are_left_alone(self) -> None:
        if not hasattr(self, "stack"):
            return
        host, closed = self.host, self.closed
        for transfer in self.under_way:
            if transfer.target is Tier.HOST:
                assert closed.isdisjoint(transfer.target_slots)
            if transfer.source is Tier.HOST:
                assert closed.isdisjoint(transfer.source_slots)
        assert closed.isdisjoint(self.pinned)
        assert closed.isdisjoint(host.leases())
        assert closed.isdisjoint(map(host.slot_of, list(host.held)))
        assert host.num_free + host.num_used + len(closed) == self.num_slots
        not_closed = [s for s in self.going if not host.are_closed([s])]
        assert host.capacity == self.num_slots - len(closed) - len(not_closed)
        assert 0 <= host.num_claimable <= self.num_slots

    def teardown(self) -> None:
        if not hasattr(self, "stack"):
            return
        self.stack.pins.clear()
        self.pinned.clear()
        self.stack.host.open(sorted(self.closed))
        self.going.clear()
        super().teardown()
        self.stack.retention.clear()
        self.going = {Slot(slot) for slot in range(self.num_slots)}
        self.go_on_closing()
        assert len(self.closed) == self.num_slots, "a slot that nothing uses stays open"
        assert self.host.capacity == 0 == self.host.num_free == self.host.num_used


TestOpeningBooks = OpeningBooks.TestCase
TestOpeningBooks.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def opened(num_slots: int) -> Ledger:
    book = Ledger(num_slots, LRU(num_slots), closed=True)
    book.open([Slot(slot) for slot in range(num_slots)])
    return book


def test_nothing_fits_until_slots_are_open() -> None:
    book = Ledger(4, LRU(4), closed=True)
    assert book.claim([A]) is None
    book.open([Slot(2), Slot(3)])
    claim = book.claim([A, B])
    assert claim is not None
    assert claim.slots == (2, 3)
    assert book.claim([C]) is None
    assert book.capacity == 2
    book.check()


def test_a_slot_that_is_being_filled_closes_when_its_block_does_not_arrive() -> None:
    book = opened(2)
    book.claim([A])
    assert book.close([Slot(0)]) == []
    assert not book.are_closed([Slot(0)])
    assert book.capacity == 1
    book.abort([A])
    assert book.are_closed([Slot(0)]), "it must not be handed out again first"
    book.check()


def test_a_slot_that_is_being_filled_closes_after_its_block_arrived() -> None:
    book = opened(2)
    book.claim([A])
    book.close([Slot(0)])
    book.commit([A])
    assert book.close([Slot(0)]) == [A]
    assert book.are_closed([Slot(0)])
    assert A not in book
    book.check()


def test_a_leased_slot_closes_with_the_last_lease() -> None:
    book = opened(2)
    book.claim([A])
    book.commit([A])
    slots = book.lease([A])
    book.lease([A])
    assert book.close(slots) == [A]
    assert A not in book
    book.release(slots)
    assert not book.are_closed(slots)
    book.release(slots)
    assert book.are_closed(slots)
    book.check()
    book.open(slots)
    assert book.num_free == 2
    book.check()


def test_closing_twice_is_closing_once() -> None:
    book = opened(3)
    book.close([Slot(1)])
    book.close([Slot(1)])
    assert book.capacity == 2
    book.check()


def test_only_closed_slots_open_and_all_or_none_do() -> None:
    book = opened(3)
    book.close([Slot(0)])
    with pytest.raises(BookError, match="not closed"):
        book.open([Slot(0), Slot(1)])
    assert book.are_closed([Slot(0)])
    with pytest.raises(BookError, match="named twice"):
        book.open([Slot(0), Slot(0)])
    book.check()
    with pytest.raises(BookError, match="began closed"):
        Ledger(2, LRU(2)).close([Slot(0)])
