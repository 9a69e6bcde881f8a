from __future__ import annotations

import pytest

from penstock.books.ledger import Ledger
from penstock.errors import BookError
from penstock.policies import LRU
from penstock.types import BlockKey, Slot

A, B, C, D = (BlockKey(bytes([i]) * 32) for i in range(4))


def ledger(capacity: int = 3) -> Ledger:
    return Ledger(capacity, LRU(capacity))


def fill(book: Ledger, *keys: BlockKey) -> tuple[Slot, ...]:
    claim = book.claim(keys)
    assert claim is not None
    book.commit(keys)
    return claim.slots


def test_a_claimed_block_is_offered_only_after_its_commit() -> None:
    book = ledger()
    book.claim([A])
    assert A in book
    assert book.is_filling(A)
    assert not book.is_ready(A)
    book.commit([A])
    assert book.is_ready(A)
    book.check()


def test_slots_claimed_together_lie_together() -> None:
    book = ledger(8)
    assert fill(book, A, B, C) == (0, 1, 2)
    for key in (A, B, C):
        book.drop(key)
    assert fill(book, A, B, C, D) == (0, 1, 2, 3)


def test_a_claim_takes_all_or_nothing() -> None:
    book = ledger(2)
    fill(book, A, B)
    book.lease([A])
    assert book.claim([C, D]) is None
    assert book.is_ready(A)
    assert book.is_ready(B)
    book.check()
    claim = book.claim([C])
    assert claim is not None
    assert claim.evicted == (B,)
    assert A in book
    assert B not in book


def test_blocks_on_their_way_are_never_evicted() -> None:
    book = ledger(1)
    book.claim([A])
    assert book.claim([B]) is None
    book.abort([A])
    assert book.claim([B]) is not None


def test_a_leased_block_outlives_every_claim() -> None:
    book = ledger(1)
    fill(book, A)
    (slot,) = book.lease([A])
    assert book.claim([B]) is None
    book.release([slot])
    assert book.claim([B]) is not None
    book.check()


def test_a_block_dropped_while_leased_keeps_its_slot_until_released() -> None:
    book = ledger(2)
    fill(book, A)
    (old,) = book.lease([A])
    book.drop(A)
    assert A not in book
    (new,) = fill(book, A)  # stored again at once, in another slot
    assert new != old
    assert book.claim([B, C]) is None
    book.release([old])
    book.check()
    assert book.claim([B, C]) is not None


def test_leases_are_counted() -> None:
    book = ledger(1)
    fill(book, A)
    (slot,) = book.lease([A])
    book.lease([A])
    book.release([slot])
    assert book.num_leased == 1
    book.release([slot])
    assert book.num_leased == 0
    with pytest.raises(BookError, match="more often than leased"):
        book.release([slot])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda book: book.claim([A]),
        lambda book: book.claim([C, C]),
        lambda book: book.claim([C], [A, C]),
        lambda book: book.commit([B, A]),
        lambda book: book.commit([A]),
        lambda book: book.commit([D]),
        lambda book: book.abort([A]),
        lambda book: book.lease([A, D]),
        lambda book: book.lease([B]),
        lambda book: book.release([Slot(0), Slot(0)]),
        lambda book: book.drop(B),
        lambda book: book.drop(D),
        lambda book: book.adopt(Slot(0), D),
    ],
)
def test_a_broken_contract_changes_nothing(wrong: object) -> None:
    book = ledger()
    fill(book, A)
    book.claim([B])
    book.lease([A])
    with pytest.raises(BookError):
        wrong(book)  # type: ignore[operator]
    book.check()
    assert book.is_ready(A)
    assert book.is_filling(B)
    assert book.leases() == {0: 1}
    assert len(book.held) == 2


def test_all_of_several_blocks_are_ready() -> None:
    book = ledger()
    assert book.are_ready([])
    fill(book, A)
    book.claim([B])
    assert book.are_ready([A])
    assert not book.are_ready([A, B]), "B is being filled"
    assert not book.are_ready([A, C]), "C is not there"


def test_after_a_restart_slots_become_known_one_by_one() -> None:
    book = Ledger(3, LRU(3), recovering=True)
    assert book.claim([A]) is None
    assert book.adopt(Slot(1), B)
    assert book.is_ready(B)
    assert book.adopt(Slot(0), None)
    assert fill(book, A) == (0,)
    assert not book.adopt(Slot(2), B), "the block is there twice: one copy is given up"
    book.check()
    assert book.num_free == 1
    with pytest.raises(BookError, match="adopted twice"):
        book.adopt(Slot(2), C)


def test_a_ledger_without_slots_is_refused() -> None:
    with pytest.raises(BookError):
        ledger(0)


def test_the_audit_notices_a_forged_book() -> None:
    book = ledger()
    fill(book, A)
    book._num_leases[0] = 1
    with pytest.raises(BookError, match="miscounted"):
        book.check()
