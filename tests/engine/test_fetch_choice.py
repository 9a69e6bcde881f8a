"""What was brought for the next step counts while it must still be what it was, and not longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.fetch_choice import FetchChoice, Fetches, FetchPlan
from penstock.engine.reach import Reach
from penstock.engine.table import Addresses, BlockTable
from penstock.types import Slot

ADDRESSES = Addresses(1 << 20, 10, 1 << 30, 100)
BLOCK_TOKENS = 4


def table_of(*places: int) -> BlockTable:
    table = BlockTable()
    table.extend_places(places)
    return table


def choose(choice: FetchChoice, *tables: BlockTable, lengths: Sequence[int] = ()) -> FetchPlan:
    """`lengths`: in tokens; by default, all blocks are full."""
    lengths = lengths or [BLOCK_TOKENS * len(table) for table in tables]
    return choice.choose(tables, [table.places for table in tables], lengths, ADDRESSES)


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


@dataclass(frozen=True)
class Buffers:
    """What a step's layers find in their buffers, wave by wave; None where nothing is fetched."""

    near: list[list[int | None]]  # layers with a window
    whole: list[list[int | None]]  # layers without one

    @classmethod
    def after(cls, fetches: Fetches, ahead: Buffers | None = None) -> Buffers:
        """`ahead`: what was there before. Then these are the buffers of the first layers."""
        near: list[list[int | None]] = []
        whole: list[list[int | None]] = []
        begin = 0
        numbers = zip(fetches.num_sources, fetches.num_near, fetches.num_there, strict=True)
        for wave, (count, num_near, num_there) in enumerate(numbers):
            sources = fetches.sources[begin : begin + count].tolist()
            begin += count
            for filled, end, before in (
                (near, num_near, ahead and ahead.near),
                (whole, count, ahead and ahead.whole),
            ):
                there = before[wave][:num_there] if before and num_there else []
                assert len(there) == num_there or ahead is None
                new = [None] * count
                new[len(there) : end] = sources[len(there) : end]
                filled.append([*there, *new[len(there) :]])
        return cls(near, whole)


@given(st.data())
def test_layers_find_what_their_window_reaches_whatever_was_there(data: st.DataObject) -> None:
    tables = [table_of(*range(10 * n, 10 * n + 6)) for n in range(3)]
    pins = iter(range(1000))
    shared = [~next(pins) for _ in range(3)]
    for table in tables[:2]:
        table.extend_places(shared)
        table.extend([Slot(40)] * data.draw(st.integers(1, 5)))
    lengths = [BLOCK_TOKENS * len(table) - 2 for table in tables]
    reach = Reach(data.draw(st.integers(1, 40)), data.draw(st.booleans()), BLOCK_TOKENS)
    span_blocks = data.draw(st.integers(1, 4))
    choice = FetchChoice(data.draw(st.integers(span_blocks, 8)), span_blocks, reach=reach)
    running = tables
    ahead: Buffers | None = None
    for _ in range(data.draw(st.integers(1, 10))):
        if data.draw(st.booleans()):
            running = data.draw(st.lists(st.sampled_from(tables), min_size=1, unique=True))
        read = [lengths[tables.index(table)] for table in running]
        places = [
            table.places[: -(-length // BLOCK_TOKENS)]
            for table, length in zip(running, read, strict=True)
        ]
        chosen = choice.choose(running, places, read, ADDRESSES)
        fetches = chosen.fetches
        later = Buffers.after(fetches)
        rest = chosen.table.tolist()
        for buffers in (later, Buffers.after(fetches, ahead)):
            rest = chosen.table.tolist()
            for mine, length, waves in zip(places, read, fetches.span_waves, strict=True):
                for index, wanted in enumerate(ADDRESSES.of(mine).tolist()):
                    address = rest.pop(0)
                    is_near = (index + 1) * BLOCK_TOKENS > length - reach.window
                    if address < 0:
                        wave = waves[index // span_blocks]
                        assert not is_near or buffers.near[wave][~address] == wanted
                        assert reach.is_limited or buffers.whole[wave][~address] == wanted
                    else:
                        assert address == wanted
                        assert mine[index] >= 0 or (reach.is_limited and not is_near)
        ahead = None
        if data.draw(st.booleans()) and choice.is_steady:
            choice.fetch_ahead()
            ahead = later
        for _ in range(data.draw(st.integers(0, 3))):
            number = data.draw(st.integers(0, 2))
            table = tables[number]
            cold, resident = table.cold(), table.resident()
            match data.draw(st.sampled_from(["chill", "warm", "grow", "grow", "back"])):
                case "chill" if resident:
                    table.chill(data.draw(st.sampled_from(resident)), Slot(next(pins)))
                case "warm" if cold:
                    table.warm(data.draw(st.sampled_from(cold)), Slot(99))
                case "grow":
                    lengths[number] += data.draw(st.integers(1, 6))
                    table.extend([Slot(50)] * (-(-lengths[number] // BLOCK_TOKENS) - len(table)))
                case "back":
                    lengths[number] = max(1, lengths[number] - data.draw(st.integers(1, 9)))


def test_what_a_window_reaches_comes_first() -> None:
    choice = FetchChoice(8, 1, reach=Reach(window=6, block_tokens=BLOCK_TOKENS))
    one, two = table_of(~5, ~3, 7, 8), table_of(~6, 9)
    chosen = choose(choice, one, two, lengths=[14, 7])
    assert pins(chosen) == [6, 3, 5]
    assert chosen.fetches.num_near == [1]
    chosen = choose(choice, one, two, lengths=[15, 8])
    assert chosen.fetches.num_near == [1]
    one.extend([Slot(10)])
    two.extend([Slot(11)])
    assert choose(choice, one, two, lengths=[18, 11]).fetches.num_near == [0]  # it has moved on
    assert choose(choice, one, two, lengths=[14, 7]).fetches.num_near == [1]  # and back


def test_what_no_layer_reads_is_in_no_wave() -> None:
    reach = Reach(window=6, is_limited=True, block_tokens=BLOCK_TOKENS)
    choice = FetchChoice(8, 1, reach=reach)
    table = table_of(~5, ~3, 7, 8)
    chosen = choose(choice, table, lengths=[13])
    assert pins(chosen) == [3]
    assert chosen.table[0] == ADDRESSES.of(table.places)[0]
    assert not choose(FetchChoice(8, 1, reach=reach), table, lengths=[14]).fetches.num_sources


def test_who_goes_back_reads_what_its_window_had_left() -> None:
    for is_limited in (False, True):
        reach = Reach(window=6, is_limited=is_limited, block_tokens=BLOCK_TOKENS)
        choice = FetchChoice(8, 1, reach=reach)
        table = table_of(~5, ~3, 7, 8)
        for _ in range(2):
            assert not any(choose(choice, table, lengths=[14]).fetches.num_near)
        if not is_limited:
            choice.fetch_ahead()
        chosen = choose(choice, table, lengths=[13])
        assert pins(chosen)[0] == 3
        assert (chosen.fetches.num_near, chosen.fetches.num_there) == ([1], [0])


def test_a_sequence_that_is_nearer_to_what_is_there_needs_it_in_all_layers() -> None:
    choice = FetchChoice(8, 1, reach=Reach(window=6, block_tokens=BLOCK_TOKENS))
    far, near = table_of(~5, 7, 8, 9), table_of(~5, 1)
    for _ in range(2):
        assert choose(choice, far).fetches.num_near == [0]
    choice.fetch_ahead()
    chosen = choose(choice, far, near)
    assert (chosen.fetches.num_near, chosen.fetches.num_there) == ([1], [0])


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
    chosen = choice.choose([table], [table.places[:1]], [BLOCK_TOKENS], ADDRESSES)
    assert (pins(chosen), num_there(chosen)) == ([5], 0)


def test_who_reads_more_of_a_sequence_than_before_fetches_what_is_cold_there() -> None:
    table = table_of(~5, 7, ~3)
    choice = FetchChoice(8, 1)
    choice.choose([table], [table.places[:1]], [BLOCK_TOKENS], ADDRESSES)
    chosen = choose(choice, table)  # nothing has moved, but a cold block was not read before
    assert sorted(pins(chosen)) == [3, 5]
    assert (chosen.table < 0).tolist() == [True, False, True]


def test_nothing_is_brought_for_the_next_step_after_one_that_reads_nothing_cold() -> None:
    table = table_of(7, ~5)
    choice = FetchChoice(8, 1)
    for _ in range(2):
        chosen = choice.choose([table], [table.places[:1]], [BLOCK_TOKENS], ADDRESSES)
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
