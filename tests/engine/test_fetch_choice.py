"""What was brought for the next step counts while it must still be what it was, and not longer."""

from __future__ import annotations

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
    """The slots of HOST that are fetched, wave after wave."""
    return ((chosen.fetches.sources - ADDRESSES.host_address) // ADDRESSES.host_stride).tolist()


def num_there(chosen: FetchPlan) -> int:
    return sum(chosen.fetches.num_there)


def steady(*tables: BlockTable, max_fetched: int = 8, span_blocks: int = 1) -> FetchChoice:
    """After two steps, the second of which is followed by fetching ahead."""
    choice = FetchChoice(max_fetched, span_blocks)
    choose(choice, *tables)
    assert not choice.is_steady
    choose(choice, *tables)
    assert choice.is_steady
    choice.fetch_ahead()
    return choice


def test_everything_is_new_at_first() -> None:
    choice = FetchChoice(8, 1)
    chosen = choose(choice, table_of(1, ~5, ~3, 2), table_of(~3, 4))
    assert pins(chosen) == [5, 3]
    assert num_there(chosen) == 0
    device = [ADDRESSES.device_address + 10 * slot for slot in (1, 2, 4)]
    assert chosen.table.tolist() == [device[0], ~0, ~1, device[1], ~1, device[2]]


def test_what_does_not_fit_at_once_comes_in_waves() -> None:
    choice = FetchChoice(2, 2)
    chosen = choose(choice, table_of(~1, ~2, ~3, 8, 9), table_of(~2, ~1, 7, 6, ~4))
    assert pins(chosen) == [2, 1, 4, 3]  # what both read comes once, in the first wave
    fetches = chosen.fetches
    assert (fetches.num_sources, fetches.num_there) == ([2, 2], [0, 0])
    assert [waves.tolist() for waves in fetches.span_waves] == [[0, 1, 0], [0, 0, 1]]
    told = [address if address < 0 else 0 for address in chosen.table.tolist()]
    assert told == [~1, ~0, ~1, 0, 0, ~0, ~1, 0, 0, ~0]


def test_waves_that_are_there_need_not_come_again() -> None:
    table = table_of(~1, ~2, ~3, ~4, 5, 6)
    choice = steady(table, max_fetched=2, span_blocks=2)
    table.extend([Slot(7)])
    chosen = choose(choice, table)
    assert (chosen.fetches.num_sources, chosen.fetches.num_there) == ([2, 2], [2, 2])
    assert chosen.fetches.span_waves[0].tolist() == [0, 1, 0, 0]


def test_other_waves_than_those_that_are_there_come_again() -> None:
    table = table_of(~1, ~2, ~3, ~4, 5, 6)
    choice = steady(table, max_fetched=2, span_blocks=2)
    table.chill(4, Slot(9))
    chosen = choose(choice, table)
    assert (chosen.fetches.num_sources, chosen.fetches.num_there) == ([2, 2, 1], [0, 0, 0])


def test_the_same_again_lies_there() -> None:
    table = table_of(~5, ~3, 7)
    choice = steady(table)
    chosen = choose(choice, table)
    assert (pins(chosen), num_there(chosen)) == ([5, 3], 2)


def test_a_sequence_grows_on_the_device() -> None:
    table, other = table_of(~5, 7), table_of(1)
    choice = steady(table, other)
    table.extend([Slot(3)])
    chosen = choose(choice, table, other)
    assert (pins(chosen), num_there(chosen)) == ([5], 1)
    device = [ADDRESSES.device_address + 10 * slot for slot in (7, 3, 1)]
    assert chosen.table.tolist() == [~0, *device]


def told(
    chosen: FetchPlan, running: list[BlockTable], span_blocks: int, max_fetched: int
) -> list[list[int]]:
    """The addresses of each sequence's blocks, wherever they are fetched from."""
    fetches = chosen.fetches
    waves, sources = [], fetches.sources.tolist()
    for count, there in zip(fetches.num_sources, fetches.num_there, strict=True):
        assert there <= count <= max_fetched
        waves.append(sources[:count])
        assert len(set(waves[-1])) == count
        sources = sources[count:]
    assert not sources
    if len({source for wave in waves for source in wave}) <= max_fetched:
        assert len(waves) <= 1
    rest, found = chosen.table.tolist(), []
    for table, span_waves in zip(running, fetches.span_waves, strict=True):
        mine, rest = rest[: len(table)], rest[len(table) :]
        for index, address in enumerate(mine):
            if address < 0:
                mine[index] = waves[span_waves[index // span_blocks]][~address]
        found.append(mine)
    return found


@given(st.data())
def test_it_tells_what_one_without_a_memory_tells(data: st.DataObject) -> None:
    """Whatever happens between steps: the same blocks, at the same addresses or fetched."""
    tables = [table_of(*range(10 * n, 10 * n + 6)) for n in range(3)]
    free = [Slot(n) for n in range(20)]
    span_blocks = data.draw(st.integers(1, 4))
    choice = FetchChoice(data.draw(st.integers(span_blocks, 8)), span_blocks)
    for _ in range(data.draw(st.integers(1, 8))):
        running = data.draw(st.lists(st.sampled_from(tables), min_size=1, unique=True))
        chosen = choose(choice, *running)
        assert told(chosen, running, span_blocks, choice.max_fetched) == [
            ADDRESSES.of(table.places).tolist() for table in running
        ]
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
    assert num_there(choose(choice, table)) == 0


def test_what_goes_cold_comes_behind() -> None:
    table, other = table_of(8, ~5, 7), table_of(~6)
    choice = steady(table)
    table.chill(0, Slot(2))
    chosen = choose(choice, table, other)
    assert num_there(chosen) == 1
    assert pins(chosen) == [5, 6, 2]
    assert chosen.table.tolist()[:2] == [~2, ~0]


def test_a_pin_let_go_may_hold_anything() -> None:
    table = table_of(8, ~5, ~4)
    choice = steady(table)
    assert table.warm(1, Slot(9)) == 5
    table.chill(0, Slot(5))  # another block, in the same slot
    chosen = choose(choice, table)
    assert (sorted(pins(chosen)), num_there(chosen)) == ([4, 5], 0)
    assert not choice.is_steady


def test_a_sequence_that_ended_has_let_go() -> None:
    table, other = table_of(~5), table_of(1, ~6)
    choice = steady(table, other)
    other.chill(0, Slot(5))  # where the one that ended had its block
    chosen = choose(choice, other)
    assert (sorted(pins(chosen)), num_there(chosen)) == ([5, 6], 0)


def test_a_table_that_was_emptied_and_filled_is_another() -> None:
    table = table_of(~5)
    choice = steady(table)
    table.take_all()
    table.extend_places([~5])
    assert num_there(choose(choice, table)) == 0


def test_who_reads_less_of_a_sequence_than_before_reads_it_anew() -> None:
    table = table_of(~5, ~3)
    choice = steady(table)
    chosen = choice.choose([table], [table.places[:1]], ADDRESSES)
    assert (pins(chosen), num_there(chosen)) == ([5], 0)


def test_who_reads_more_of_a_sequence_than_before_fetches_what_is_cold_there() -> None:
    table = table_of(~5, 7, ~3)
    choice = FetchChoice(8, 1)
    choice.choose([table], [table.places[:1]], ADDRESSES)
    chosen = choose(choice, table)  # nothing has moved, but a cold block was not read before
    assert sorted(pins(chosen)) == [3, 5]
    assert (chosen.table < 0).tolist() == [True, False, True]


def test_nothing_is_brought_for_the_next_step_after_one_that_reads_nothing_cold() -> None:
    table = table_of(7, ~5)
    choice = FetchChoice(8, 1)
    for _ in range(2):
        chosen = choice.choose([table], [table.places[:1]], ADDRESSES)
        assert not chosen.fetches.num_sources
        assert not choice.is_steady


def test_a_step_that_fetches_nothing_ends_it() -> None:
    table = table_of(~5)
    choice = steady(table)
    choice.forget()
    assert num_there(choose(choice, table)) == 0
    assert not choice.is_steady


def test_nothing_is_brought_twice_for_a_step_that_does_not_come() -> None:
    choice = steady(table_of(~5))
    assert not choice.is_steady
