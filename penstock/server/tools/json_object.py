"""Reads a tool call's JSON object while it is written."""

from __future__ import annotations

import json

from penstock.server.tools.reading import SPACE

_CLOSING = {"{": "}", "[": "]"}
_VALUE_KEYS = ("arguments", "parameters")


class ObjectReader:
    """Finds the name of a call, and the text of its arguments, as soon as they are there."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_value = False  # whether the arguments have begun
        self.is_complete = False
        self.is_broken = False  # not JSON, or not a call
        self.num_chars = 0  # read so far
        self._seen: list[str] = []
        self._value: list[str] = []  # of the arguments, not taken yet
        self._closing: list[str] = []  # the brackets that are open
        self._string: list[str] | None = None  # the string that is being read
        self._escapes = False
        self._key: str | None = None
        self._phase = "start"  # in the outermost object: key, colon, value, next
        self._reads_value = False

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._seen)

    @property
    def has_whole_value(self) -> bool:
        """Whether arguments that are an object have just ended."""
        return self._reads_value and len(self._closing) == 1

    def feed(self, text: str) -> int:
        """Read on. Returns how many characters belong to the object."""
        for place, char in enumerate(text):
            self._read(char)
            if self.is_complete or self.is_broken:
                self._see(text[: place + 1])
                return place + 1
        self._see(text)
        return len(text)

    def take_value(self) -> str:
        """The text of the arguments since the last call."""
        value, self._value = "".join(self._value), []
        return value

    def _see(self, text: str) -> None:
        self._seen.append(text)
        self.num_chars += len(text)

    def _read(self, char: str) -> None:
        if self._string is not None:
            self._read_string(self._string, char)
        elif char in SPACE:
            if self._reads_value and len(self._closing) > 1:
                self._value.append(char)
        elif len(self._closing) > 1:
            self._read_inner(char)
        else:
            self._read_outer(char)

    def _read_string(self, string: list[str], char: str) -> None:
        string.append(char)
        if self._reads_value:
            self._value.append(char)
        if self._escapes:
            self._escapes = False
        elif char == "\\":
            self._escapes = True
        elif char == '"':
            self._string = None
            if len(self._closing) == 1:
                self._end_outer_string("".join(string))

    def _end_outer_string(self, string: str) -> None:
        is_name = self._phase == "value" and self._key == "name" and self.name is None
        if self._phase != "key" and not is_name:
            return
        try:
            text = json.loads(string, strict=False)
            text.encode()  # "\\ud800" is JSON, but no text: it cannot be sent
        except ValueError:
            self.is_broken = True
            return
        if self._phase == "key":
            self._key, self._phase = text, "colon"
        else:
            self.name = text

    def _read_inner(self, char: str) -> None:
        if self._reads_value:
            self._value.append(char)
        self._open_or_close(char)

    def _read_outer(self, char: str) -> None:
        """A character of the outermost object itself, or of a number or word in it."""
        match self._phase, char:
            case "start", "{":
                self._closing.append("}")
                self._phase = "key"
            case "key", '"':
                self._string = [char]
            case "colon", ":":
                self._phase = "value"
                is_first = self._key in _VALUE_KEYS and not self.has_value
                self.has_value = self._reads_value = is_first or self.has_value
                self._reads_value = is_first
            case "value", ",":
                self._phase, self._reads_value = "key", False
            case "key" | "value", "}":
                self._reads_value = False
                self.is_complete = True
            case "value", _:
                if self._key == "name" and self.name is None and char != '"':
                    self.is_broken = True
                if self._reads_value:
                    self._value.append(char)
                self._open_or_close(char)
            case _:
                self.is_broken = True

    def _open_or_close(self, char: str) -> None:
        if char == '"':
            self._string = [char]
        elif char in _CLOSING:
            self._closing.append(_CLOSING[char])
        elif char in "]}":
            self.is_broken = self._closing.pop() != char
