"""What all that read calls share."""

from __future__ import annotations

from typing import Protocol

SPACE = " \t\r\n"
MAX_NAME_CHARS = 1 << 8


class CallReader(Protocol):
    """Finds the name of a call, and the JSON of its arguments, as soon as they are there."""

    name: str | None
    has_value: bool  # whether the arguments have begun
    is_complete: bool
    is_broken: bool  # not a call, or not one any more

    @property
    def num_chars(self) -> int: ...  # read while the name is not known, or more

    @property
    def text(self) -> str: ...  # all that was read while the name was not known, or more

    def feed(self, text: str) -> int: ...  # how many characters belong to the call

    def take_value(self) -> str: ...  # the arguments since the last time


def num_shared(text: str, mark: str) -> int:
    """How many of the last characters of the text may be the start of `mark`."""
    for count in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-count:]):
            return count
    return 0
