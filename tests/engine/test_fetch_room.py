"""Buffers for cold blocks keep within their share, and hold a span, whatever a block's size is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
from penstock.engine import fetching
from penstock.engine.decode_plan import span_blocks
from penstock.engine.fetching import fetch_room

GIB = 1 << 30
SIZES = st.one_of(st.integers(1, 1100), st.sampled_from([16, 32, 64, 128, 255, 256, 257, 1024]))


@given(
    SIZES,
    st.sampled_from([64, 512, 4096, 16384]),
    st.integers(1, 128),
    st.integers(1, 200 * GIB),
    st.integers(1, 1 << 20),
    st.booleans(),
)
def test_a_span_fits_within_the_share_or_there_is_no_room(
    block_tokens: int,
    token_bytes: int,
    num_layers: int,
    pool_bytes: int,
    num_slots: int,
    packed: bool,
) -> None:
    layer_bytes = block_tokens * token_bytes
    arrival_bytes = layer_bytes * 3 // 4 if packed else 0
    span = span_blocks(256, block_tokens)
    least = min(span, num_slots)  # a span has no more different cold blocks
    share = max(8 << 20, pool_bytes // 32)
    room = fetch_room(layer_bytes, arrival_bytes, num_layers, pool_bytes, num_slots, span)
    if room is None:
        assert least * (layer_bytes + 2 * arrival_bytes) > share
        return
    assert 1 <= room.num_buffers <= max(1, min(8, num_layers // 2))
    assert least <= room.num_blocks <= num_slots
    assert room.num_blocks * (room.num_buffers * layer_bytes + 2 * arrival_bytes) <= share
    assert room.num_blocks * layer_bytes <= max(fetching._BUFFER_BYTES, least * layer_bytes)


def test_usual_blocks_have_all_buffers() -> None:
    assert fetch_room(16 * 4096, 0, 32, 40 * GIB, 1 << 16, span_blocks(256, 16)) == (8, 1024)


def test_odd_blocks_have_fewer_buffers_and_none_beside_a_small_pool() -> None:
    span = span_blocks(256, 255)  # 65280 tokens
    assert fetch_room(255 * 4096, 0, 32, 80 * GIB, 1 << 16, span) == (8, 256)
    assert fetch_room(255 * 4096, 0, 32, 20 * GIB, 1 << 16, span) == (2, 256)
    assert fetch_room(255 * 4096, 0, 32, 7 * GIB, 1 << 16, span) is None
