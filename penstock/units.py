"""Parses and formats sizes, rates, durations and counts, as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from penstock.errors import ConfigError

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

_PREFIXES = "kmgtpe"
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000 ** (power + 1) for power, prefix in enumerate(_PREFIXES)}
_UNITS |= {f"{prefix}ib": 1024 ** (power + 1) for power, prefix in enumerate(_PREFIXES)}

# The digits are bounded because int() refuses thousands of them with its own error.
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", re.ASCII)

_EXPECTED = "expected a whole number of bytes or a number with a unit"
_EXAMPLES = 'write it like "512MiB", "1.5TiB" or "32GB"'


def printable(text: str) -> str:
    """Replace control characters, which could be commands to the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def parse_bytes(value: object) -> int:
    """Parse a number of bytes: an int, or text such as "32GiB", "32 GB", "1.5TiB".

    Case does not matter. GiB counts in 1024s, GB in 1000s. Fractions of a byte are cut off.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(f"a size of {value} is negative: {_EXPECTED}; {_EXAMPLES}")
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} is not a size: {_EXPECTED}; {_EXAMPLES}")
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ConfigError(f"{value[:80]!r} is not a size: {_EXPECTED}; {_EXAMPLES}")
    number, unit = match[1], match[2].lower()
    if unit in _PREFIXES and unit:
        # 32G may mean 34.4e9 or 32e9 bytes. Do not guess a limit.
        prefix = unit.upper()
        raise ConfigError(
            f"the unit in {value!r} is ambiguous: expected {prefix}iB (1024s) or {prefix}B "
            f'(1000s); write "{number}{prefix}iB" or "{number}{prefix}B"'
        )
    if unit not in _UNITS:
        raise ConfigError(
            f"{match[2][:80]!r} is not a unit of size: expected B, KiB, MiB, GiB, TiB "
            f"or kB, MB, GB, TB; {_EXAMPLES}"
        )
    factor = _UNITS[unit]
    if factor == 1 and "." in number:
        raise ConfigError(f"{value!r} is not a whole number of bytes: {_EXPECTED}; {_EXAMPLES}")
    return int(Fraction(number) * factor)


def format_bytes(num_bytes: float) -> str:
    """Format in 1024s with one decimal: "1.4 MiB", "131 B"."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes:.0f} B"
    value, unit = _scale(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))
    return f"{value:.1f} {unit}"


def format_rate(bytes_per_second: float) -> str:
    """Format in 1000s, as link speeds are specified: "55.4 GB/s"."""
    value, unit = _scale(bytes_per_second, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))
    return f"{value:.1f} {unit}/s"


def format_seconds(seconds: float) -> str:
    """Format with about three digits: "350 µs", "41.5 ms", "7.60 s", "2 min 05 s"."""
    size = abs(seconds)
    if size < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if size < 0.99995:
        return f"{seconds * 1e3:.1f} ms"
    if size < 59.995:
        return f"{seconds:.2f} s"
    if size == float("inf") or seconds != seconds:
        return f"{seconds} s"
    sign, total = "-" if seconds < 0 else "", round(size)
    if total < 3600:
        return f"{sign}{total // 60} min {total % 60:02d} s"
    return f"{sign}{total // 3600} h {total % 3600 // 60:02d} min"


def _scale(value: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    index = 0
    # Compare the value as printed, so that 1023.97 KiB becomes 1.0 MiB, not 1024.0 KiB.
    while abs(value) >= base - 0.05 and index < len(units) - 1:
        value, index = value / base, index + 1
    return value, units[index]


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Format a number with its noun: "1 session", "2 sessions", "12,000 blocks"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
