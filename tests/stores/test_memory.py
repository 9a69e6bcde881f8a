from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from tools import ODD_BLOCK_BYTES, TIMEOUT_SECONDS, Desk, key_of, keys_of, spec

from penstock.errors import Corrupt, Full, Missing, StoreError
from penstock.stores.base import Block, Store
from penstock.stores.memory import Faults, MemoryStore
from penstock.types import BlockKey, Slot

KEYS = keys_of(4)


class Bench:
    """A store with faults on demand, and memory to move blocks with."""

    def __init__(self, block_bytes: int = 8192, num_slots: int = 8) -> None:
        block_spec = spec(block_bytes)
        self.faults = Faults()
        self.store: Store = MemoryStore(block_spec, num_slots, self.faults)
        self.desk = Desk(block_spec, num_slots)

    def put(self, keys: Sequence[BlockKey], places: Sequence[int]) -> list[type | None]:
        return _kinds(self.store.put(self.desk.write(keys, places)))

    def get(self, keys: Sequence[BlockKey], places: Sequence[int]) -> list[type | None]:
        blocks: list[Block] = self.desk.blank(keys, places)
        answers = self.store.get(blocks)
        for block, answer in zip(blocks, answers, strict=True):
            assert answer is not None or self.desk.right(block), "the store lied"
        return _kinds(answers)


def _kinds(answers: Sequence[StoreError | None]) -> list[type | None]:
    return [None if answer is None else type(answer) for answer in answers]


@pytest.mark.parametrize("block_bytes", [1, 4096, 8192, ODD_BLOCK_BYTES])
def test_blocks_come_back_bit_for_bit(block_bytes: int) -> None:
    bench = Bench(block_bytes)
    assert bench.put(KEYS, [3, 0, 7, 1]) == [None] * 4
    assert bench.get(KEYS[::-1], [1, 7, 0, 3]) == [None] * 4


def test_what_was_put_is_a_copy() -> None:
    bench = Bench()
    blocks = bench.desk.write(KEYS[:1], [0])
    bench.store.put(blocks)
    blocks[0].memory[:] = bytes(len(blocks[0].memory))
    assert bench.get(KEYS[:1], [0]) == [None]


def test_a_slot_answers_for_the_block_it_holds_only() -> None:
    bench = Bench()
    bench.put(KEYS[:2], [0, 1])
    bench.put([KEYS[2]], [1])
    assert bench.get(KEYS[:3], [0, 1, 1]) == [None, Missing, None]
    assert bench.get([KEYS[3]], [5]) == [Missing]


def test_drop_takes_the_named_block_only() -> None:
    bench = Bench()
    bench.put(KEYS[:2], [0, 1])
    bench.store.drop(KEYS[0], Slot(1))
    bench.store.drop(KEYS[0], Slot(0))
    bench.store.drop(KEYS[0], Slot(0))
    assert bench.get(KEYS[:2], [0, 1]) == [Missing, None]


def test_a_scan_names_every_slot_once() -> None:
    bench = Bench()
    bench.put(KEYS[:2], [6, 2])
    found = [pair for batch in bench.store.scan() for pair in batch]
    assert sorted(found, key=lambda pair: pair[0]) == [
        (Slot(slot), {6: KEYS[0], 2: KEYS[1]}.get(slot)) for slot in range(8)
    ]


def test_failing() -> None:
    bench = Bench()
    bench.put(KEYS[:1], [0])
    bench.faults.failing = True
    assert bench.get(KEYS[:1], [0]) == [StoreError]
    assert bench.put(KEYS[1:2], [1]) == [StoreError]
    bench.faults.failing = False
    assert bench.get(KEYS[:2], [0, 1]) == [None, Missing]
    assert bench.put(KEYS[1:2], [1]) == [None]
    assert bench.get(KEYS[1:2], [1]) == [None]


def test_a_failed_put_leaves_neither_the_old_block_nor_the_new() -> None:
    bench = Bench()
    bench.put(KEYS[:1], [0])
    bench.faults.failing = True
    bench.put(KEYS[1:2], [0])
    bench.faults.failing = False
    assert bench.get(KEYS[:2], [0, 0]) == [Missing, Missing]


def test_full() -> None:
    bench = Bench()
    bench.put(KEYS[:1], [0])
    bench.faults.full = True
    assert bench.put(KEYS[1:2], [1]) == [Full]
    assert bench.get(KEYS[:2], [0, 1]) == [None, Missing]
    bench.faults.full = False
    assert bench.put(KEYS[1:2], [1]) == [None]


def test_corrupting_is_seen_by_every_get() -> None:
    bench = Bench()
    bench.put(KEYS[:1], [0])
    bench.faults.corrupting = True
    assert [bench.get(KEYS[:1], [0]) for _ in range(4)] == [[Corrupt]] * 4


def test_a_corrupt_block_can_be_stored_again() -> None:
    bench = Bench()
    bench.put(KEYS[:1], [0])
    bench.faults.corrupting = True
    assert bench.get(KEYS[:1], [0]) == [Corrupt]
    bench.faults.corrupting = False
    assert bench.put(KEYS[:1], [0]) == [None]
    assert bench.get(KEYS[:1], [0]) == [None]


@pytest.mark.parametrize(("fault", "expected"), [("failing", StoreError), ("corrupting", Corrupt)])
def test_only_narrows_a_fault_to_some_blocks(fault: str, expected: type) -> None:
    bench = Bench()
    bench.put(KEYS, range(4))
    bench.faults.only = lambda key: key == KEYS[2]
    setattr(bench.faults, fault, True)
    assert bench.get(KEYS, range(4)) == [None, None, expected, None]


def test_only_narrows_full_to_some_blocks() -> None:
    bench = Bench()
    bench.faults.only = lambda key: key == KEYS[2]
    bench.faults.full = True
    assert bench.put(KEYS, range(4)) == [None, None, Full, None]


def test_the_gate_holds_a_get_until_it_opens() -> None:
    bench = Bench()
    bench.put(KEYS[:1], [0])
    bench.faults.gate.clear()
    begun, answers = threading.Event(), list[list[type | None]]()

    def work() -> None:
        begun.set()
        answers.append(bench.get(KEYS[:1], [0]))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert begun.wait(TIMEOUT_SECONDS)
    assert answers == []
    bench.faults.gate.set()
    thread.join(TIMEOUT_SECONDS)
    assert answers == [[None]]


def test_the_gate_holds_only_the_blocks_it_is_for() -> None:
    bench = Bench()
    bench.faults.only = lambda key: key == key_of("held up")
    bench.faults.gate.clear()
    assert bench.put(KEYS, range(4)) == [None] * 4
    assert bench.get(KEYS, range(4)) == [None] * 4


def test_faults_are_off_unless_asked_for() -> None:
    faults = Faults()
    assert (faults.failing, faults.corrupting, faults.full) == (False, False, False)
    assert faults.gate.is_set()
    assert Faults().gate is not faults.gate


def test_a_closed_store_holds_nothing() -> None:
    bench = Bench()
    bench.put(KEYS, range(4))
    bench.store.close()
    assert bench.get(KEYS, range(4)) == [Missing] * 4
