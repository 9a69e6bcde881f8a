"""Pages of SGLang as blocks: names that never meet, and cuts that lose no byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.sglang.pages import PageFormat, block_bytes_for
from penstock.units import MiB

PAGE = PageFormat("kv", "layer_first; tp 0 of 1", 3 * MiB + 5, 1 * MiB)


@given(st.integers(1, 64 * MiB), st.integers(1, 64 * MiB))
def test_a_page_is_cut_into_blocks_without_a_gap(main: int, other: int) -> None:
    size = block_bytes_for(main)
    assert size % 4096 == 0
    assert size < 2 * MiB + 4096
    for num_bytes in (main, other):
        found = PageFormat("kv", "", num_bytes, size)
        parts = [found.part(index) for index in range(found.num_parts)]
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == num_bytes


def test_a_small_page_is_one_block() -> None:
    assert block_bytes_for(32_768) == 32_768
    assert PageFormat("kv", "", 32_768, 32_768).num_parts == 1


@pytest.mark.parametrize(
    "other",
    [
        replace(PAGE, pool="mamba"),
        replace(PAGE, layout="page_first; tp 0 of 1"),
        replace(PAGE, layout="layer_first; tp 1 of 2"),
        replace(PAGE, page_bytes=3 * MiB + 6),
        replace(PAGE, pool="kvl", layout=PAGE.layout[1:]),
    ],
    ids=lambda found: f"{found.pool} {found.layout} {found.page_bytes}",
)
def test_what_makes_other_bytes_makes_other_keys(other: PageFormat) -> None:
    assert not set(PAGE.keys(["a", "b"])) & set(other.keys(["a", "b"]))


def test_keys_are_those_of_their_page_and_salt_alone() -> None:
    keys = PAGE.keys(["a", "b"])
    assert len(set(keys)) == 2 * PAGE.num_parts == 8
    assert keys == PAGE.keys(["a"]) + PAGE.keys(["b"])
    assert not set(keys) & set(PAGE.keys(["a", "b"], b"salt"))


def test_a_page_without_one_of_its_blocks_is_not_there() -> None:
    assert PAGE.whole([True] * 4 + [True, True, False, True]) == [True, False]
