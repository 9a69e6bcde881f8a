from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.blocks import BlockPool, CompletedBlocks
from penstock.errors import BookError
from penstock.types import BlockKey, Slot

STEPS = ["take", "share", "name", "release", "hold"]


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 32)


def named(pool: BlockPool, *numbers: int) -> list[Slot]:
    slots = pool.take(len(numbers))
    assert slots is not None
    for slot, number in zip(slots, numbers, strict=True):
        pool.name(slot, key(number))
    return slots


def test_a_complete_block_is_shared_by_whoever_has_the_same_prefix() -> None:
    pool = BlockPool(4)
    slots = named(pool, 1, 2)
    assert pool.share([key(1), key(2), key(3)]) == slots
    assert pool.share([key(3), key(1)]) == []
    pool.check()


def test_released_blocks_stay_findable_until_their_room_is_needed() -> None:
    pool = BlockPool(3)
    slots = named(pool, 1, 2)
    pool.release(slots)
    assert pool.num_available == 3
    assert pool.share([key(1), key(2)]) == slots
    pool.release(slots)
    pool.take(2)
    assert pool.share([key(1), key(2)]) == slots[:1], "the tail goes before the head"
    pool.check()


def test_a_held_block_is_never_given_to_another() -> None:
    pool = BlockPool(2)
    slots = named(pool, 1)
    assert pool.take(2) is None
    pool.hold(slots)
    pool.release(slots)
    assert pool.take(2) is None
    pool.release(slots)
    assert pool.take(2) is not None


def test_of_two_equal_blocks_the_first_is_found() -> None:
    pool = BlockPool(4)
    first = named(pool, 1)
    second = named(pool, 1)
    assert pool.share([key(1)]) == first
    pool.release(second)
    pool.check()
    assert pool.num_available == 3


@pytest.mark.parametrize(
    "wrong", [lambda p: p.release([Slot(0)]), lambda p: p.name(Slot(0), key(1))]
)
def test_a_broken_contract_is_refused(wrong: object) -> None:
    pool = BlockPool(1)
    with pytest.raises(BookError):
        wrong(pool)  # type: ignore[operator]
    pool.check()


def test_forgetting_drops_what_nobody_holds() -> None:
    pool = BlockPool(3)
    pool.release(named(pool, 1))
    held = named(pool, 2)
    pool.forget()
    assert pool.share([key(1)]) == []
    assert pool.share([key(2)]) == held
    pool.check()


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 7))))
def test_any_history_adds_up(steps: list[tuple[str, int]]) -> None:
    pool = BlockPool(6)
    holds: list[Slot] = []
    fresh: list[Slot] = []
    for step, number in steps:
        if step == "take":
            taken = pool.take(number % 4)
            holds += taken or []
            fresh += taken or []
        elif step == "share":
            holds += pool.share([key(number)])
        elif step == "name" and fresh:
            pool.name(fresh.pop(), key(number))
        elif step == "hold" and holds:
            pool.hold([holds[0]])
            holds.append(holds[0])
        elif step == "release" and holds:
            slot = holds.pop(number % len(holds))
            pool.release([slot])
            if slot not in holds and slot in fresh:
                fresh.remove(slot)
        pool.check()
    for slot in holds:
        pool.release([slot])
    pool.check()
    assert pool.num_available == 6


def _free_and_idle(pool: BlockPool) -> None:
    pool._free.append(next(iter(pool._idle)))


def _free_and_held(pool: BlockPool) -> None:
    pool._free.append(_held(pool))


def _idle_and_held(pool: BlockPool) -> None:
    pool._num_holds[next(iter(pool._idle))] = 1


def _free_twice(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def _held(pool: BlockPool) -> Slot:
    return next(Slot(number) for number in range(6) if pool.num_holds(Slot(number)))


@pytest.mark.parametrize("loses_one", [False, True])
@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (_free_and_idle, "two of free, idle and held"),
        (_free_and_held, "two of free, idle and held"),
        (_idle_and_held, "two of free, idle and held"),
        (_free_twice, "free list twice"),
    ],
)
def test_a_block_that_is_counted_twice_is_found(
    breaks: Callable[[BlockPool], None], says: str, loses_one: bool
) -> None:
    """Also if another is counted nowhere, so that the numbers add up."""
    pool = BlockPool(6)
    pool.release(named(pool, 1, 2))
    named(pool, 3)
    pool.check()
    if loses_one:
        pool._free.pop()
    breaks(pool)
    with pytest.raises(BookError, match=says):
        pool.check()


def test_a_block_that_is_counted_nowhere_is_found() -> None:
    pool = BlockPool(6)
    pool._free.pop()
    with pytest.raises(BookError, match="neither free nor idle nor held"):
        pool.check()


def test_after_distrust_nothing_is_shared_and_nothing_is_lost() -> None:
    pool = BlockPool(4)
    held, idle = named(pool, 1, 2), named(pool, 3)
    pool.release(idle)
    pool.distrust()
    assert pool.share([key(1)]) == []
    assert pool.share([key(3)]) == []
    pool.check()
    pool.release(held)
    pool.check()
    assert pool.num_available == 4


def test_blocks_can_be_left_out_of_a_save() -> None:
    pool = BlockPool(4)
    blocks = CompletedBlocks(pool)
    slots = pool.take(4)
    assert slots is not None
    blocks.add(key(9), [key(1), key(2), key(3), key(4)], slots)
    assert blocks.without(lambda _: False) is blocks
    kept = blocks.without(lambda each: each in (key(1), key(3)))
    assert kept.keys == [key(2), key(4)]
    assert kept.slots == [slots[1], slots[3]]
    assert kept.parents == {0: key(1), 1: key(3)}
