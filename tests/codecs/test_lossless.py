"""The lossless format: every bit survives, and what does not fit is never kept."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.codecs.lossless import LosslessCodec
from penstock.codecs.lossless_format import MAX_RATIO, LosslessFormat, fit_lossless

Values = np.ndarray[tuple[int], np.dtype[np.uint16]]
BOTH = [pytest.param(True, id="numba"), pytest.param(False, id="torch")]
SMALL = LosslessFormat(row_values=64, region_rows=8, num_regions=3)


def _packed(codec: LosslessCodec, values: Values) -> bytes | None:
    packed = bytearray(codec.packed_bytes)
    fits = codec.pack(memoryview(values.view(np.uint8)), memoryview(packed))
    return bytes(packed) if fits else None


def _unpacked(codec: LosslessCodec, packed: bytes) -> Values:
    raw = bytearray(codec.raw_bytes)
    codec.unpack(memoryview(bytearray(packed)), memoryview(raw))
    return np.frombuffer(raw, np.uint16)


@pytest.mark.parametrize("use_numba", BOTH)
def test_all_patterns_survive(use_numba: bool) -> None:
    """65,536 patterns, in rows whose exponents are close together."""
    values = np.arange(1 << 16, dtype=np.uint16)
    values = values[np.argsort((values >> 7) & 0xFF, kind="stable")]
    form = fit_lossless([2 * len(values)], 128)
    assert form is not None
    codec = LosslessCodec(form, use_numba=use_numba)
    packed = _packed(codec, values)
    assert packed is not None
    assert np.array_equal(_unpacked(codec, packed), values)


@pytest.mark.parametrize("use_numba", BOTH)
@pytest.mark.parametrize(
    "pattern", [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF]
)
def test_a_special_value_among_others_survives(pattern: int, use_numba: bool) -> None:
    """Zeros, denormals, infinities and NaN payloads beside usual values."""
    rng = np.random.default_rng(pattern)
    values = (
        rng.standard_normal(SMALL.raw_bytes // 2).astype(np.float32).view(np.uint32) >> 16
    ).astype(np.uint16)
    values[5] = values[64 * 8] = pattern
    codec = LosslessCodec(SMALL, use_numba=use_numba)
    packed = _packed(codec, values)
    if pattern & 0x7F80 == 0x7F80:
        # Far above all others of its row, which become exceptions: more than a region can have.
        assert packed is None
    else:
        assert packed is not None
        assert np.array_equal(_unpacked(codec, packed), values)


@settings(deadline=None, max_examples=200)
@given(
    arrays.arrays(
        np.uint16, 64 * 8 * 3, elements=st.integers(0x3C00, 0x4400), fill=st.just(0x3F80)
    ),
    st.lists(st.tuples(st.integers(0, 64 * 8 * 3 - 1), st.integers(0, 0xFFFF)), max_size=30),
)
def test_packs_exactly_or_not_at_all(values: Values, wild: list[tuple[int, int]]) -> None:
    for place, pattern in wild:
        values[place] = pattern
    packed = [_packed(LosslessCodec(SMALL, use_numba=numba), values) for numba in (True, False)]
    assert packed[0] == packed[1]
    exponents = (values >> 7 & 0xFF).reshape(3, 8, 64).astype(int)
    below = exponents.max(2, keepdims=True) - exponents
    counts = ((below >= 14) & (exponents > 0)).sum((1, 2))
    assert (packed[0] is not None) == bool((counts <= SMALL.max_exceptions).all())
    if packed[0] is not None:
        for numba in (True, False):
            assert np.array_equal(
                _unpacked(LosslessCodec(SMALL, use_numba=numba), packed[0]), values
            )


def test_the_bytes_are_those_of_the_description() -> None:
    form = LosslessFormat(row_values=64, region_rows=1, num_regions=1)
    values = np.full(64, 0x3F80, np.uint16)  # 1.0: exponent 127
    values[1] = 0xBF81  # -1.0078125
    values[2] = 0x0000
    values[33] = 0x3E80  # 0.25: exponent 125
    values[40] = 0x0C82  # exponent 25: an exception
    packed = _packed(LosslessCodec(form), values)
    assert packed is not None
    assert form.max_exceptions == 1
    assert len(packed) == form.packed_bytes == 16 + 112
    assert struct.unpack_from("<H", packed) == (1,)
    plain, codes = packed[16:80], packed[80:112]
    assert plain[:3] == bytes([0x00, 0x81, 0x00])
    assert plain[40] == 0x02
    assert codes[:2] == bytes([0x00, 0x0E])
    assert codes[16] == 0x20  # value 33 shares a byte with value 32
    assert codes[20] == 0x0F
    assert packed[112:] == bytes([127, 0, 25]) + bytes(13)


def test_damaged_bytes_never_raise() -> None:
    rng = np.random.default_rng(3)
    for use_numba in (True, False):
        codec = LosslessCodec(SMALL, use_numba=use_numba)
        for _ in range(20):
            packed = rng.integers(0, 256, codec.packed_bytes, dtype=np.uint8).tobytes()
            assert len(_unpacked(codec, packed)) == codec.raw_bytes // 2


@pytest.mark.parametrize(
    ("stretches", "head_dim", "row"),
    [
        ([2 * 16 * 8 * 128] * 64, 128, 128),
        ([2 * 16 * 3 * 64] * 60, 64, 64),
        ([2 * 16 * 32 * 96] * 64, 96, 96),
        ([2 * 16 * 32 * 80] * 64, 80, 80),
        ([2 * 16 * 576] * 61, 576, 128),  # MLA: a row is not a head's vector
        ([2 * 16 * 2 * 16] * 4, 16, 128),
        ([2 * 1024, 2 * 4096], None, 128),
    ],
)
def test_a_format_is_small_enough(stretches: list[int], head_dim: int | None, row: int) -> None:
    form = fit_lossless(stretches, head_dim)
    assert form is not None
    assert form.row_values == row
    assert form.raw_bytes == sum(stretches)
    assert form.packed_bytes <= MAX_RATIO * form.raw_bytes
    assert all(size % (2 * form.region_values) == 0 for size in stretches)
    assert form.region_bytes % 16 == form.header_bytes % 16 == 0


@pytest.mark.parametrize("stretches", [[3], [2 * 60], [2 * 64, 2 * 65], [2 * 128]])
def test_no_format_for_shapes_that_gain_nothing(stretches: list[int]) -> None:
    assert fit_lossless(stretches) is None
