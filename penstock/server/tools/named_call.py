"""Reads a call of Mistral's latest models while it is written.

    name[ARGS]{"x": 1}
    name[CALL_ID]123456789[ARGS]{"x": 1}

Some leave out `[ARGS]`. The id is not used: an answer's calls get new ones.
"""

from __future__ import annotations

import re

from penstock.server.tools.json_object import ObjectReader
from penstock.server.tools.reading import MAX_NAME_CHARS, SPACE

ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
NAME = r"[a-zA-Z0-9_.:/-]{1,128}"
_HEADER = re.compile(
    rf"\s*(?P<name>{NAME})\s*(?:\[CALL_ID\]\s*[a-zA-Z0-9_-]{{1,64}}\s*)?(?:\[ARGS\])?\s*"
)


class NamedReader:
    def __init__(self) -> None:
        self.name: str | None = None
        self.has_value = False
        self.is_complete = False
        self.is_broken = False
        self._header = ""
        self._arguments = ObjectReader()

    @property
    def text(self) -> str:
        return self._header

    @property
    def num_chars(self) -> int:
        return len(self._header)

    def feed(self, text: str) -> int:
        for place, char in enumerate(text):
            if self.name is None:
                self._read_header(char)
            else:
                self._read_value(char)
            if self.is_complete or self.is_broken:
                return place + 1
        return len(text)

    def take_value(self) -> str:
        return self._arguments.take_value()

    def _read_header(self, char: str) -> None:
        if char == "{":
            found = _HEADER.fullmatch(self._header)
            self._header += char
            self.is_broken = found is None
            if found is not None:
                self.name = found["name"]
                self.has_value = True
                self._arguments.feed('{"arguments": ')
                self._read_value(char)
            return
        self._header += char
        # Only letters, digits and the marks may come, and not much of it.
        is_allowed = char in SPACE or char in "_.:/-[]" or (char.isascii() and char.isalnum())
        self.is_broken = not is_allowed or len(self._header) > 2 * MAX_NAME_CHARS

    def _read_value(self, char: str) -> None:
        self._arguments.feed(char)
        self.is_broken = self._arguments.is_broken
        self.is_complete = self._arguments.has_whole_value
