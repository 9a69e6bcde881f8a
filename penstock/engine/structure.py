"""What an answer must look like: a JSON schema, a regular expression, choices, or a grammar.

The names are vLLM's. This module does not import torch or llguidance: a server can check a request
without them. `grammar.py` makes the automaton.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from penstock.errors import ConfigError

MAX_GRAMMAR_CHARS = 1 << 18
MAX_CHOICES = 4096
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
# As chat templates write JSON. One line: small models that may put whitespace anywhere often never
# stop, and an answer that is rendered into the next prompt as it was written reuses its KV.
_JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


class UnusableStructure(ConfigError):
    """A schema or grammar that cannot be compiled."""


def _refuse(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(
        f"structured_outputs.{name} is {reprlib.repr(value)}: expected {expected}; correct it, or "
        "leave it out"
    )


class GrammarSource(NamedTuple):
    """Equal sources make equal automata."""

    kind: str  # json, regex or grammar
    text: str
    options: str = ""  # for json: how it is written, as JSON


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Exactly one of the first five must be given. `json` is stored as text."""

    json: str | Mapping[str, Any] | bool | None = None  # a JSON schema
    regex: str | None = None
    choice: Sequence[str] | None = None  # the answer is one of these
    grammar: str | None = None  # in Lark's format, or in GBNF
    json_object: bool | None = None  # any JSON object
    strict: bool = True  # False: ignore the keywords of a schema that are not supported
    disable_any_whitespace: bool = True  # False: JSON may have line breaks and indents
    whitespace_pattern: str | None = None  # whitespace that JSON may have, as a regular expression

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:
            raise _refuse("json", False, "a schema that accepts something")
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise ConfigError(
                f"structured_outputs has {found}: expected exactly one of {', '.join(_KINDS)}; "
                "say which one the answer must follow"
            )
        for name in ("strict", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true or false")
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise _refuse("json_object", self.json_object, "true or false")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None:
                self._set(name, _text(name, value))
        if self.json is not None:
            self._set("json", _schema_text(self.json))
        if self.choice is not None:
            self._set("choice", _choices(self.choice))

    @property
    def source(self) -> GrammarSource:
        if self.regex is not None:
            return GrammarSource("regex", self.regex)
        if self.grammar is not None:
            return GrammarSource("grammar", self.grammar)
        if self.choice is not None:
            words = " | ".join(json.dumps(word, ensure_ascii=False) for word in self.choice)
            return GrammarSource("grammar", f"start: {words}")
        style: dict[str, object] = dict(_JSON_STYLE)
        if self.whitespace_pattern is not None:
            style = {"whitespace_pattern": self.whitespace_pattern}
        elif not self.disable_any_whitespace:
            style = {"whitespace_flexible": True}
        options = json.dumps({**style, "lenient": not self.strict})
        text = self.json if isinstance(self.json, str) else '{"type": "object"}'
        return GrammarSource("json", text, options)

    @classmethod
    def of(cls, value: object) -> StructuredOutputsParams | None:
        if value is None or isinstance(value, cls):
            return value
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or not set(value) <= set(names):
            raise ConfigError(
                f"sampling parameter structured_outputs is {reprlib.repr(value)}: expected a "
                f"mapping with any of {', '.join(names)}; correct it, or leave it out"
            )
        return cls(**value)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_GRAMMAR_CHARS:
        raise _refuse(name, value, f"a text of 1 to {MAX_GRAMMAR_CHARS} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refuse(name, value, "valid Unicode") from None
    return value


def _schema_text(value: object) -> str:
    """The schema as JSON text. Its keys keep their order: answers follow it."""
    if value is True:
        return "{}"
    try:
        read = json.loads(_text("json", value)) if isinstance(value, str) else value
        if read is True:
            return "{}"
        if not isinstance(read, Mapping):
            raise _refuse("json", value, "a JSON schema, as an object or its text")
        text = json.dumps(read, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise _refuse("json", value, "a JSON schema, as an object or its text") from None
    return _text("json", text)


def _choices(value: object) -> tuple[str, ...]:
    expected = f"a list of 1 to {MAX_CHOICES} texts, none of them empty"
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _refuse("choice", value, expected)
    if not 0 < len(value) <= MAX_CHOICES or not all(isinstance(x, str) and x for x in value):
        raise _refuse("choice", value, expected)
    _text("choice", "".join(value))
    return tuple(value)
