"""The values of parameters that a model writes as plain text: what each may be by its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

Kinds = frozenset[str]  # of JSON: string, number, integer, boolean, null, object, array
TEXT: Kinds = frozenset({"string"})
ANY: Kinds = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
NOTES = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "$comment", "$schema")
)
_DEFS = ("$defs", "definitions")
_ANYTHING: Mapping[str, Any] = {}
_MAX_REFERENCES = 16
_MAX_BRANCHES = 256
_WORDS = {"True": "true", "False": "false", "None": "null"}  # as chat templates write them


def resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema that a reference points to. None if it is elsewhere than in the definitions."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return _ANYTHING if schema is True else None
        if "$ref" not in schema:
            return schema
        parts = schema["$ref"].split("/") if isinstance(schema["$ref"], str) else []
        if len(parts) != 3 or parts[0] != "#" or parts[1] not in _DEFS:
            return None
        found = root.get(parts[1])
        schema = found.get(parts[2]) if isinstance(found, Mapping) else None
    return None


def kinds_of(schema: object, root: Mapping[str, Any]) -> Kinds:
    """What a value may be. Anything, if the schema does not say.

    Each branch is looked at once: in schemas that contain themselves, there are endless paths.
    """
    kinds: Kinds = frozenset()
    waiting: list[object] = [schema]
    seen: set[int] = set()
    while waiting:
        branch = resolved(waiting.pop(), root)
        if branch is None or len(seen) == _MAX_BRANCHES:
            return ANY
        if id(branch) in seen:
            continue
        seen.add(id(branch))
        unions = (branch[name] for name in ("anyOf", "oneOf") if isinstance(branch.get(name), list))
        union = next(unions, None)
        if union:
            waiting += union[: _MAX_BRANCHES + 1]
        else:
            kinds |= _own_kinds(branch)
    return kinds or ANY


def _own_kinds(schema: Mapping[str, Any]) -> Kinds:
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind}) & ANY or ANY
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str)) & ANY or ANY
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return frozenset(_kind_of(value) for value in values)
    return ANY


def as_json(text: str, kinds: Kinds) -> str:
    """The JSON text of a value: what it reads as, if the schema allows that, or else a string."""
    bare = text.strip()
    if kinds != TEXT:
        bare = _WORDS.get(bare, bare)
        try:
            value = json.loads(bare, parse_constant=_refuse)
        except (ValueError, RecursionError):
            pass
        else:
            kind = _kind_of(value)
            is_whole = kind == "number" and float(value).is_integer() and "integer" in kinds
            if kind != "string" and (kind in kinds or is_whole or _is_number(kind, kinds)):
                return bare
    return json.dumps(text, ensure_ascii=False)


def _is_number(kind: str, kinds: Kinds) -> bool:
    return kind == "integer" and "number" in kinds


def _kind_of(value: object) -> str:
    if value is None:
        return "null"
    for types, kind in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, types):
            return kind
    return "array" if isinstance(value, list) else "object"


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)  # NaN and Infinity are not JSON
