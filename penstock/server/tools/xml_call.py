"""Reads a call of Qwen3-Coder's while it is written, and tells its arguments as JSON.

    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>

A value is text as it is: nothing in it is escaped, so it ends at the first `</parameter>`, except
for one within a string of a list or an object. What it is in JSON depends on the schema of its
parameter. One that can only be a string is told while it is written, others once they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.server.tools.reading import MAX_NAME_CHARS, num_shared
from penstock.server.tools.xml_values import ANY, TEXT, Kinds, as_json, kinds_of, resolved

FUNCTION = "<function="
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"
END_FUNCTION = "</function>"
_END_CALL = "</tool_call>"  # some answers leave out the end of the function
_MARKS = (PARAMETER, END_FUNCTION, _END_CALL)
_MAX_KEY_CHARS = 1 << 10
_OPENING = re.compile(r"\s*[\[{]")  # of a list or an object


class _Strings:
    """Whether JSON that has been read so far ends within a string."""

    def __init__(self) -> None:
        self.is_open = False
        self._escapes = False
        self._is_broken = False  # a string with a line break: it is no JSON

    def read(self, text: str) -> None:
        for char in text:
            if self._is_broken:
                return
            if self._escapes:
                self._escapes = False
            elif char == '"':
                self.is_open = not self.is_open
            elif self.is_open:
                self._escapes = char == "\\"
                self._is_broken = char in "\r\n"
                self.is_open = not self._is_broken


class XmlReader:
    """`schemas`: of the arguments of each tool, by its name."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.name: str | None = None
        self.has_value = False
        self.is_complete = False
        self.is_broken = False
        self._schemas = schemas
        self._header = ""
        self._held = ""
        self._told: list[str] = []
        self._num_parameters = 0
        self._kinds = ANY
        self._value = ""  # of a parameter that may be something else than a string
        self._strings = _Strings()
        self._is_first = False  # whether the value has not begun
        self._state = self._between

    @property
    def text(self) -> str:
        """All that was read, while the name is not known."""
        return self._header

    @property
    def num_chars(self) -> int:
        return len(self._header)

    def feed(self, text: str) -> int:
        """Read on. Returns how many characters belong to the call."""
        start = 0
        if self.name is None:
            start = self._read_header(text)
            if self.name is None:
                return start
        self._held += text[start:]
        while not self.is_complete and self._state():
            pass
        return len(text) - len(self._held) if self.is_complete else len(text)

    def take_value(self) -> str:
        told, self._told = "".join(self._told), []
        return told

    def _read_header(self, text: str) -> int:
        for place, char in enumerate(text):
            self._header += char
            num = len(self._header)
            if num <= len(FUNCTION):
                self.is_broken = not FUNCTION.startswith(self._header)
            elif char == ">":
                self._begin(self._header[len(FUNCTION) : -1])
            else:
                self.is_broken = char in "<\r\n" or num > len(FUNCTION) + MAX_NAME_CHARS
            if self.is_broken or self.name is not None:
                return place + 1
        return len(text)

    def _begin(self, name: str) -> None:
        if not name:
            self.is_broken = True
            return
        self.name = name
        self.has_value = True
        self._told.append("{")

    # Each state reads a part of what is held. It returns False if more is needed.

    def _between(self) -> bool:
        """Before a parameter, or the end. What a model writes here beside them is left out."""
        found = [(place, mark) for mark in _MARKS if (place := self._held.find(mark)) >= 0]
        if not found:
            keep = max(num_shared(self._held, mark) for mark in _MARKS)
            self._held = self._held[len(self._held) - keep :]
            return False
        place, mark = min(found)
        self._held = self._held[place + len(mark) :]
        if mark == PARAMETER:
            self._state = self._key
        else:
            self.is_complete = True
            self._told.append("}")
        return True

    def _key(self) -> bool:
        place = self._held.find(">")
        if place < 0 and len(self._held) <= _MAX_KEY_CHARS:
            return False
        if not 0 <= place <= _MAX_KEY_CHARS:
            self._state = self._between
            return True
        key, self._held = self._held[:place], self._held[place + 1 :]
        self._kinds = self._kinds_of(key)
        separator = ", " if self._num_parameters else ""
        self._num_parameters += 1
        self._told.append(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._value, self._strings, self._is_first = "", _Strings(), True
        if self._kinds == TEXT:
            self._told.append('"')
            self._state = self._string
        else:
            self._state = self._any
        return True

    def _kinds_of(self, key: str) -> Kinds:
        root = self._schemas.get(self.name or "", {})
        properties = (resolved(root, root) or {}).get("properties")
        return kinds_of(properties.get(key, {}) if isinstance(properties, dict) else {}, root)

    def _skip_line(self) -> bool:
        """The line break before a value is not part of it. False if it may still come."""
        if self._is_first and self._held:
            self._held = self._held.removeprefix("\n")
            self._is_first = False
        return not self._is_first

    def _string(self) -> bool:
        if not self._skip_line():
            return False
        place = self._held.find(END_PARAMETER)
        if place >= 0:
            self._say(self._held[:place].removesuffix("\n"))
            self._told.append('"')
            self._held = self._held[place + len(END_PARAMETER) :]
            self._state = self._between
            return True
        keep = max(num_shared(self._held, each) for each in (END_PARAMETER, f"\n{END_PARAMETER}"))
        self._say(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _say(self, text: str) -> None:
        self._told.append(json.dumps(text, ensure_ascii=False)[1:-1])

    def _any(self) -> bool:
        if not self._skip_line():
            return False
        place = self._held.find(END_PARAMETER)
        if place < 0:
            self._take(len(self._held) - num_shared(self._held, END_PARAMETER))
            return False
        self._take(place)
        rest = self._held[len(END_PARAMETER) :]
        if self._strings.is_open and _OPENING.match(self._value):
            ahead, ends = rest.lstrip(), (PARAMETER, END_FUNCTION)
            may_be_text = "string" in self._kinds
            if may_be_text and any(
                len(ahead) < len(each) and each.startswith(ahead) for each in ends
            ):
                return False
            if not (may_be_text and ahead.startswith(ends)):
                self._take(len(END_PARAMETER))
                return True
        self._told.append(as_json(self._value.removesuffix("\n"), self._kinds))
        self._held = rest
        self._state = self._between
        return True

    def _take(self, num_chars: int) -> None:
        """Read this much of a value."""
        self._value += self._held[:num_chars]
        self._strings.read(self._held[:num_chars])
        self._held = self._held[num_chars:]
