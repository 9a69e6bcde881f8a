"""One line of a trace as a JSON object. A wrong field raises a TraceError with the line number."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from penstock.errors import TraceError
from penstock.sim.formats.lines import TraceFile, TraceLine

MAX_TOKENS = 1 << 24  # per request: more than any model reads, so that a typo cannot fill memory
MAX_BLOCK_TOKENS = 1 << 20
_MAX_SECONDS = 1e11  # thousands of years


class Entry:
    __slots__ = ("fields", "file", "number")

    def __init__(self, file: TraceFile, number: int, fields: dict[str, Any]) -> None:
        self.file = file
        self.number = number
        self.fields = fields

    def fault(self, sentence: str) -> TraceError:
        return self.file.fault(self.number, sentence)

    def first_of(self, *names: str) -> str | None:
        """The first of these fields that is present and not null."""
        for name in names:
            if self.fields.get(name) is not None:
                return name
        return None

    def require(self, name: str, expected: str) -> Any:
        if name not in self.fields:
            raise self.fault(f"there is no `{name}`: expected {expected}.")
        return self.fields[name]

    def seconds(self, name: str, ticks_per_second: int = 1) -> float:
        expected = "a time in seconds" if ticks_per_second == 1 else "a time in milliseconds"
        value = self.require(name, expected)
        if type(value) not in (int, float) or not abs(value) <= _MAX_SECONDS * ticks_per_second:
            raise self.fault(f"`{name}` is {_show(value)}: expected {expected}.")
        return float(value / ticks_per_second)

    def duration(self, name: str) -> float:
        value = self.seconds(name)
        if value < 0:
            raise self.fault(f"`{name}` is {value}: expected seconds, 0 or more.")
        return value

    def moment(self, name: str) -> float:
        """A time, given in seconds or as an ISO 8601 date."""
        value = self.require(name, "a time")
        if not isinstance(value, str):
            return self.seconds(name)
        try:
            return parse_moment(value)
        except ValueError:
            raise self.fault(
                f"`{name}` is {_show(value)}: expected a date and time such as "
                "2025-01-31 12:00:00.5, or seconds."
            ) from None

    def count(self, name: str) -> int:
        """A number of tokens."""
        value = self.require(name, "a number of tokens")
        if type(value) is not int or not 0 <= value <= MAX_TOKENS:
            raise self.fault(
                f"`{name}` is {_show(value)}: expected an integer number of tokens, 0 to "
                f"{MAX_TOKENS}."
            )
        return value

    def ids(self, name: str, *, what: str = "ids") -> list[int]:
        """A list of integers."""
        value = self.require(name, f"a list of {what}")
        if type(value) is not list or not set(map(type, value)) <= {int}:
            cut = ' ("..." means that the log was cut: log complete prompts)'
            raise self.fault(
                f"`{name}` is {_show(value)}: expected a list of {what}, all integers"
                f"{cut if type(value) is list and '...' in value else ''}."
            )
        return value

    def text(self, name: str) -> str:
        value = self.require(name, "text")
        if not isinstance(value, str):
            raise self.fault(f"`{name}` is {_show(value)}: expected text.")
        return value

    def inner(self, name: str) -> Entry:
        value = self.require(name, "an object")
        if not isinstance(value, dict):
            raise self.fault(f"`{name}` is {_show(value)}: expected an object.")
        return Entry(self.file, self.number, value)


class ArrivalOrder:
    """Arrival times relative to the first request. They must not decrease."""

    def __init__(self) -> None:
        self._first = self._latest = -math.inf

    def add(self, entry: Entry, name: str, moment: float) -> float:
        """The seconds since the first request; `moment` is the entry's field `name`."""
        if moment < self._latest:
            raise entry.fault(
                f"`{name}` goes back by {self._latest - moment:.3f} s: expected requests in order "
                "of arrival; sort the file."
            )
        self._first = moment if self._first == -math.inf else self._first
        self._latest = moment
        return moment - self._first


def entries(file: TraceFile) -> Iterator[Entry]:
    for line in file.lines():
        yield Entry(file, line.number, parse_object(file, line))


def parse_object(file: TraceFile, line: TraceLine) -> dict[str, Any]:
    try:
        value = json.loads(line.text)
    except (ValueError, RecursionError) as error:
        if line.is_cut:
            raise file.fault(
                line.number,
                "the last line is cut off: expected a complete JSON object; copy the file again, "
                "or remove this line.",
            ) from None
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be read"
        raise file.fault(
            line.number, f"this is not a JSON object: expected one per line ({reason})."
        ) from None
    if not isinstance(value, dict):
        raise file.fault(line.number, f"this is {_show(value)}: expected one JSON object per line.")
    return value


def parse_moment(text: str) -> float:
    """Seconds since 1970 of an ISO 8601 date; UTC if it has no time zone. Raises ValueError."""
    moment = datetime.fromisoformat(text.strip())
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()


def _show(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
