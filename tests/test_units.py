from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.units import counted, format_bytes, format_rate, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("32GiB", 32 << 30),
        ("32 GB", 32_000_000_000),
        ("512MiB", 512 << 20),
        (" 512 mib ", 512 << 20),
        ("1.5TiB", 3 << 39),
        ("1kB", 1000),
        ("1KB", 1000),
        ("2PiB", 2 << 50),
        ("0.3KiB", 307),
        ("0GiB", 0),
    ],
)
def test_sizes_are_read(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "not a size"),
        ("lots", "not a size"),
        ("-4GiB", "not a size"),
        ("1e9", "not a size"),
        ("1.GiB", "not a size"),
        ("4GiB 2MiB", "not a size"),
        ("٣GiB", "not a size"),
        ("9" * 5000, "not a size"),
        ("4 apples", "not a unit"),
        ("32G", "ambiguous"),
        ("1.5", "not a whole number of bytes"),
        ("1.5B", "not a whole number of bytes"),
        (-1, "negative"),
        (True, "not a size"),
        (1.5, "not a size"),
        (None, "not a size"),
        ([], "not a size"),
    ],
)
def test_bad_sizes_are_refused_in_one_sentence(value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_bytes(value)
    message = str(caught.value)
    assert "expected" in message
    assert "write" in message
    assert "\n" not in message
    assert len(message) < 300


def test_an_ambiguous_unit_is_answered_with_both_readings() -> None:
    with pytest.raises(ConfigError, match='"32GiB" or "32GB"'):
        parse_bytes("32g")


@given(st.integers(0, 1 << 70))
def test_plain_numbers_read_as_themselves(num_bytes: int) -> None:
    assert parse_bytes(num_bytes) == parse_bytes(str(num_bytes)) == num_bytes


@given(st.integers(0, 1 << 65))
def test_what_is_written_can_be_read_back(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    assert not text.startswith("1024")
    assert parse_bytes(text) == pytest.approx(num_bytes, rel=0.06)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (64 * 23_040, "1.4 MiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (32 << 30, "32.0 GiB"),
        (-(2 << 20), "-2.0 MiB"),
        (5000 << 60, "5000.0 EiB"),
    ],
)
def test_sizes_are_written(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0, "0.0 B/s"), (55.4e9, "55.4 GB/s"), (999_960, "1.0 MB/s"), (1500, "1.5 kB/s")],
)
def test_rates_are_written(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (350e-6, "350 µs"),
        (999.9e-6, "1.0 ms"),
        (41.5e-3, "41.5 ms"),
        (0.99999, "1.00 s"),
        (7.6, "7.60 s"),
        (59.999, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.9, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (-125, "-2 min 05 s"),
        (float("inf"), "inf s"),
        (float("nan"), "nan s"),
    ],
)
def test_durations_are_written(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_one_is_singular() -> None:
    assert counted(1, "session") == "1 session"
    assert counted(0, "session") == "0 sessions"
    assert counted(12000, "block") == "12,000 blocks"
    assert counted(2, "copy", "copies") == "2 copies"
