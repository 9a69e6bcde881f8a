"""What was brought for the next step counts while it must still be what it was, and not longer."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.fetch_choice import FetchChoice, FetchPlan
from penstock.engine.table import Addresses, BlockTable
from penstock.types import Slot

ADDRESSES = Addresses(1 << 20, 10, 1 << 30, 100)


def table_of(*places: int) -> BlockTable:
    table = BlockTable()
    table.extend_places(places)
    return table


def choose(choice: FetchChoice, *tables: BlockTable) -> FetchPlan:
    return choice.choose(tables, [table.places for table in tables], ADDRESSES)


def pins(chosen: FetchPlan) -> list[int]:
    """The slots of HOST that are fetched, by their numbers."""
    return ((chosen.sources - ADDRESSES.host_address) // ADDRESSES.host_stride).tolist()


def steady(*tables: BlockTable, max_fetched: int = 8) -> FetchChoice:
    """After two steps, the second of which is followed by fetching ahead."""
    choice = FetchChoice(max_fetched)
    choose(choice, *tables)
    assert not choice.is_steady
    choose(choice, *tables)
    assert choice.is_steady
    choice.fetch_ahead()
    return choice


def test_everything_is_new_at_first() -> None:
    choice = FetchChoice(8)
    chosen = choose(choice, table_of(1, ~5, ~3, 2), table_of(~3, 4))
    assert pins(chosen) == [5, 3]
    assert chosen.num_there == 0
    device = [ADDRESSES.device_address + 10 * slot for slot in (1, 2, 4)]
    assert chosen.table.tolist() == [device[0], ~0, ~1, device[1], ~1, device[2]]


def test_what_most_read_is_fetched_where_not_all_can_be() -> None:
    chosen = choose(FetchChoice(1), table_of(~1, ~2), table_of(~2, ~3))
    assert pins(chosen) == [2]
    host = [ADDRESSES.host_address + 100 * slot for slot in (1, 3)]
    assert chosen.table.tolist() == [host[0], ~0, ~0, host[1]]


def test_the_same_again_lies_there() -> None:
    table = table_of(~5, ~3, 7)
    choice = steady(table)
    chosen = choose(choice, table)
    assert (pins(chosen), chosen.num_there) == ([5, 3], 2)


def test_a_sequence_grows_on_the_device() -> None:
    table, other = table_of(~5, 7), table_of(1)
    choice = steady(table, other)
    table.extend([Slot(3)])
    chosen = choose(choice, table, other)
    assert (pins(chosen), chosen.num_there) == ([5], 1)
    device = [ADDRESSES.device_address + 10 * slot for slot in (7, 3, 1)]
    assert chosen.table.tolist() == [~0, *device]


@given(st.data())
def test_it_tells_what_one_without_a_memory_tells(data: st.DataObject) -> None:
    """Whatever happens between steps: the same blocks, at the same addresses or fetched."""
    tables = [table_of(*range(10 * n, 10 * n + 6)) for n in range(3)]
    free = [Slot(n) for n in range(20)]
    choice = FetchChoice(data.draw(st.integers(1, 8)))
    for _ in range(data.draw(st.integers(1, 8))):
        running = data.draw(st.lists(st.sampled_from(tables), min_size=1, unique=True))
        chosen = choose(choice, *running)
        fetched = [ADDRESSES.host_address + 100 * pin for pin in pins(chosen)]
        told = [fetched[~address] if address < 0 else address for address in chosen.table.tolist()]
        assert told == ADDRESSES.of(np.concatenate([t.places for t in running])).tolist()
        assert len(set(fetched)) == len(fetched) <= choice.max_fetched
        if data.draw(st.booleans()) and choice.is_steady:
            choice.fetch_ahead()
        for _ in range(data.draw(st.integers(0, 3))):
            table = data.draw(st.sampled_from(tables))
            cold, resident = table.cold(), table.resident()
            match data.draw(st.sampled_from(["chill", "warm", "grow"])):
                case "chill" if resident and free:
                    table.chill(data.draw(st.sampled_from(resident)), free.pop())
                case "warm" if cold:
                    free.append(table.warm(data.draw(st.sampled_from(cold)), Slot(99)))
                case "grow":
                    table.extend([Slot(50)])


def test_it_lies_there_for_one_step() -> None:
    table = table_of(~5, 7)
    choice = steady(table)
    choose(choice, table)
    assert choose(choice, table).num_there == 0


def test_what_goes_cold_comes_behind() -> None:
    table, other = table_of(8, ~5, 7), table_of(~6)
    choice = steady(table)
    table.chill(0, Slot(2))
    chosen = choose(choice, table, other)
    assert chosen.num_there == 1
    assert pins(chosen) == [5, 6, 2]
    assert chosen.table.tolist()[:2] == [~2, ~0]


def test_there_is_no_more_room_than_there_is() -> None:
    table = table_of(8, ~5, ~4)
    choice = steady(table, max_fetched=2)
    table.chill(0, Slot(2))
    chosen = choose(choice, table)
    assert (sorted(pins(chosen)), chosen.num_there) == ([4, 5], 2)
    assert chosen.table[0] == ADDRESSES.host_address + 200


def test_a_pin_let_go_may_hold_anything() -> None:
    table = table_of(8, ~5, ~4)
    choice = steady(table)
    assert table.warm(1, Slot(9)) == 5
    table.chill(0, Slot(5))  # another block, in the same slot
    chosen = choose(choice, table)
    assert (sorted(pins(chosen)), chosen.num_there) == ([4, 5], 0)
    assert not choice.is_steady


def test_a_sequence_that_ended_has_let_go() -> None:
    table, other = table_of(~5), table_of(1, ~6)
    choice = steady(table, other)
    other.chill(0, Slot(5))  # where the one that ended had its block
    chosen = choose(choice, other)
    assert (sorted(pins(chosen)), chosen.num_there) == ([5, 6], 0)


def test_a_table_that_was_emptied_and_filled_is_another() -> None:
    table = table_of(~5)
    choice = steady(table)
    table.take_all()
    table.extend_places([~5])
    assert choose(choice, table).num_there == 0


def test_who_reads_less_of_a_sequence_than_before_reads_it_anew() -> None:
    table = table_of(~5, ~3)
    choice = steady(table)
    chosen = choice.choose([table], [table.places[:1]], ADDRESSES)
    assert (pins(chosen), chosen.num_there) == ([5], 0)


def test_a_step_that_fetches_nothing_ends_it() -> None:
    table = table_of(~5)
    choice = steady(table)
    choice.forget()
    assert choose(choice, table).num_there == 0
    assert not choice.is_steady


def test_nothing_is_brought_twice_for_a_step_that_does_not_come() -> None:
    choice = steady(table_of(~5))
    assert not choice.is_steady
