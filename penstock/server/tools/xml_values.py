"""The values of parameters that a model writes as plain text: what each may be by its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

Kinds = frozenset[str]  # of JSON: string, number, integer, boolean, null, object, array
TEXT: Kinds = frozenset({"string"})
ANY: Kinds = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_DEFS = ("$defs", "definitions")
_MAX_DEPTH = 16
_WORDS = {"True": "true", "False": "false", "None": "null"}  # as chat templates write them


def resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema that a reference points to. None if it is elsewhere than in the definitions."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {} if schema is True else None
        if "$ref" not in schema:
            return schema
        parts = schema["$ref"].split("/") if isinstance(schema["$ref"], str) else []
        if len(parts) != 3 or parts[0] != "#" or parts[1] not in _DEFS:
            return None
        found = root.get(parts[1])
        schema = found.get(parts[2]) if isinstance(found, Mapping) else None
    return None


def kinds_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> Kinds:
    """What a value may be. Anything, if the schema does not say."""
    found = resolved(schema, root)
    if found is None or depth > _MAX_DEPTH:
        return ANY
    for name in ("anyOf", "oneOf"):
        if isinstance(found.get(name), list):
            each = [kinds_of(branch, root, depth + 1) for branch in found[name]]
            return frozenset().union(*each) or ANY
    kind = found.get("type")
    if isinstance(kind, str):
        return frozenset({kind}) & ANY or ANY
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str)) & ANY or ANY
    values = found.get("enum", [found["const"]] if "const" in found else None)
    if isinstance(values, list) and values:
        return frozenset(_kind_of(value) for value in values)
    return ANY


def as_json(text: str, kinds: Kinds) -> tuple[str, bool]:
    """The JSON text of a value, and whether it is what the schema allows.

    What can be read as something else than a string is that, if it may be.
    """
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
                return bare, True
    return json.dumps(text, ensure_ascii=False), "string" in kinds


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
