"""Limits on the structure of a JSON body, checked before it is parsed.

A parser makes an object of every value: three bytes (`{},`) become hundreds, so a body within the
size limit could take a hundred times its size. Text does not grow, so strings are not counted.
"""

from __future__ import annotations

import re

from penstock.server.errors import ApiError

MAX_VALUES = 1 << 21  # mostly token ids: more than any model's context
MAX_NAMES = 1 << 17  # keys of objects
MAX_CONTAINERS = 1 << 16  # objects and lists

_LIMITS = (
    ("values", b",", MAX_VALUES),
    ("names", b":", MAX_NAMES),
    ("objects and lists", b"{[", MAX_CONTAINERS),
)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def check_structure(data: bytes) -> None:
    """Raise ApiError if the body has more values, names or containers than any request needs."""
    # First a fast count that includes strings, where these characters are harmless and common.
    suspects = [limit for limit in _LIMITS if _count(data, limit[1]) > limit[2]]
    if not suspects:
        return
    counts = dict.fromkeys((what for what, _, _ in suspects), 0)
    start = 0
    while start < len(data):
        string = _STRING.search(data, start)
        end = len(data) if string is None else string.start()
        for what, characters, most in suspects:
            counts[what] += _count(data, characters, start, end)
            if counts[what] > most:
                raise ApiError(
                    400,
                    f"the body has more than {most:,} {what}, the limit per request; split it.",
                    code="too_many_values",
                )
        start = end if string is None else string.end()


def _count(data: bytes, characters: bytes, start: int = 0, end: int | None = None) -> int:
    return sum(data.count(character, start, end) for character in characters)
