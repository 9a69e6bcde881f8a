"""Which cold blocks the CPU attends to: as many as end together with the link."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.options import COLD_AUTO, COLD_CPU, COLD_DEVICE
from penstock.engine.cold_split import ColdRates, ColdSplit, divide, num_for_cpu, whole_spans
from penstock.engine.fetch_choice import ON_CPU, FetchChoice
from penstock.engine.table import Addresses, BlockTable

GB = 10**9
RATES = st.floats(1 * GB, 200 * GB)


def step_seconds(spans: int, span_bytes: int, cold_bytes: int, rates: ColdRates) -> float:
    on_cpu = spans * span_bytes
    cpu = on_cpu / rates.cpu + rates.other_seconds if on_cpu else 0.0
    return max((cold_bytes - on_cpu) / rates.link, cpu)


@given(
    num_spans=st.integers(0, 300),
    others=st.integers(0, 300),
    link=RATES,
    cpu=RATES,
    other_seconds=st.floats(0, 0.05),
    limit=st.integers(0, 300),
)
def test_no_other_share_is_much_faster(
    num_spans: int, others: int, link: float, cpu: float, other_seconds: float, limit: int
) -> None:
    span_bytes = 32 << 20
    cold_bytes = (num_spans + others) * span_bytes
    rates = ColdRates(link, cpu, other_seconds)
    chosen = num_for_cpu(num_spans, span_bytes, cold_bytes, rates, limit)
    assert 0 <= chosen <= min(num_spans, limit)
    ours = step_seconds(chosen, span_bytes, cold_bytes, rates)
    alone = cold_bytes / link
    assert ours <= alone
    assert chosen == 0 or ours <= 0.95 * alone + 1e-12
    one_span = span_bytes / min(link, cpu)  # spans are whole
    for other in range(min(num_spans, limit) + 1):
        best = step_seconds(other, span_bytes, cold_bytes, rates)
        assert ours <= best + one_span + 1e-9 or (chosen == 0 and best > 0.94 * alone - one_span)


@pytest.mark.parametrize(
    ("link", "cpu", "other", "expected"),
    [
        (50, 50, 0.0, 50),
        (75, 25, 0.0, 25),
        (50, 50, 0.01, 34),  # the CPU has 10 ms less
        (50, 1, 0.0, 0),  # it would gain less than 5%
        (50, 50, 10.0, 0),  # the step is long enough for the link alone
    ],
)
def test_both_end_together(link: int, cpu: int, other: float, expected: int) -> None:
    rates = ColdRates(link * GB, cpu * GB, other)
    assert num_for_cpu(100, GB // 64, 100 * GB // 64, rates, 1000) == expected


@given(st.integers(0, 200), st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_a_share_is_divided_in_proportion(count: int, available: list[int]) -> None:
    shares = divide(count, available)
    total = sum(available)
    assert sum(shares) == min(count, total)
    for share, has in zip(shares, available, strict=True):
        assert 0 <= share <= has
        assert total == 0 or abs(share - min(count, total) * has / total) < 1


@given(st.data())
def test_only_whole_spans_of_one_sequence_can_be_the_cpus(data: st.DataObject) -> None:
    span_blocks = data.draw(st.integers(1, 4))
    tables = data.draw(
        st.lists(st.lists(st.integers(-12, 60), min_size=1, max_size=20), min_size=1, max_size=4)
    )
    cold, sequences, spans = [], [], []
    for number, table in enumerate(tables):
        for index, place in enumerate(table):
            if place < 0:
                cold.append(place)
                sequences.append(number)
                spans.append(index // span_blocks)
    found = whole_spans(
        np.array(cold, np.int64),
        np.array(sequences, np.int64),
        np.array(spans, np.int64),
        [len(table) for table in tables],
        span_blocks,
    )
    for number, table in enumerate(tables):
        for span in range(len(table) // span_blocks + 1):
            blocks = table[span * span_blocks : (span + 1) * span_blocks]
            is_whole = len(blocks) == span_blocks and (span + 1) * span_blocks < len(table)
            is_own = all(block < 0 and cold.count(block) == 1 for block in blocks)
            assert (span in found[number]) == (is_whole and is_own)


def test_a_mode_decides() -> None:
    available = [np.arange(8), np.arange(2), np.arange(0)]
    rates = ColdRates(50 * GB, 50 * GB)
    split = {
        mode: ColdSplit(mode, GB, 100).choose(available, 20 * GB, rates)
        for mode in (COLD_DEVICE, COLD_CPU, COLD_AUTO)
    }
    assert [len(each) for each in split[COLD_DEVICE]] == [0, 0, 0]
    assert [len(each) for each in split[COLD_CPU]] == [8, 2, 0]
    assert [each.tolist() for each in split[COLD_AUTO]] == [list(range(8)), [0, 1], []]
    few = ColdSplit(COLD_AUTO, GB, 5).choose(available, 20 * GB, rates)
    assert [each.tolist() for each in few] == [[0, 1, 2, 3], [0], []]
    unknown = ColdSplit(COLD_AUTO, GB, 100).choose(available, 20 * GB, None)
    assert sum(map(len, unknown)) == 0


class _Takes:
    """A part of the CPU that takes as many spans of each sequence as it is told."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.is_stale = False

    def choose(self, available: list[np.ndarray], num_cold: int) -> list[np.ndarray]:
        self.num_cold = num_cold
        return [each[: self.count] for each in available]


def test_the_link_brings_what_the_cpu_leaves() -> None:
    cpu = _Takes(2)
    choice = FetchChoice(100, 2, cpu)
    tables = [BlockTable(), BlockTable()]
    tables[0].extend_places([-1, -2, -3, -4, -5, -6, 7, 8])
    tables[1].extend_places([-7, -8, 9, -10, -11])
    addresses = Addresses(1000, 10, 100_000, 10)

    def choose() -> tuple[list[int], list[list[int]], list[int]]:
        places = [table.places for table in tables]
        plan = choice.choose(tables, places, [len(each) for each in places], addresses)
        share = plan.fetches.on_cpu
        waves = [each.tolist() for each in plan.fetches.span_waves]
        return plan.fetches.sources.tolist(), waves, share.blocks.tolist()

    def host(*slots: int) -> list[int]:
        return [100_000 + slot * 10 for slot in slots]

    sources, waves, blocks = choose()
    assert cpu.num_cold == 10
    assert sorted(sources) == host(4, 5, 9, 10)
    assert waves == [[ON_CPU, ON_CPU, 0, 0], [ON_CPU, 0, 0]]
    assert blocks == host(0, 1, 2, 3, 6, 7)
    tables[0].extend_places([10])  # a sequence grows: the split stays
    cpu.count = 1
    tables[0].num_moves -= 1
    sources, waves, blocks = choose()
    assert waves == [[ON_CPU, ON_CPU, 0, 0, 0], [ON_CPU, 0, 0]]
    assert blocks == host(0, 1, 2, 3, 6, 7)
    cpu.is_stale = True
    sources, waves, blocks = choose()
    assert sorted(sources) == host(2, 3, 4, 5, 9, 10)
    assert waves == [[ON_CPU, 0, 0, 0, 0], [ON_CPU, 0, 0]]
    assert blocks == host(0, 1, 6, 7)
