"""The grammar of a call of Qwen3-Coder's, whose values are text and not JSON.

Only schemas that such a text can follow for certain are taken: others are refused with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.engine.structure import MAX_GRAMMAR_CHARS
from penstock.errors import ConfigError
from penstock.server.tools.tool import Tool
from penstock.server.tools.xml_call import END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER
from penstock.server.tools.xml_values import ANY, NOTES, TEXT, kinds_of, resolved

_OF_ARGUMENTS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$id")
)
_OF_TEXT = frozenset(("type", "enum", "const", "pattern", "minLength", "maxLength"))
_UNIONS = ("anyOf", "oneOf")
_MAX_DEPTH = 16  # of alternatives of alternatives
_MAX_VALUES = 1 << 12
_KEY = re.compile(r"[^<>\r\n]{1,256}")
_END = f"\n{END_PARAMETER}"
# Nothing after the first end, or the value would end earlier than the grammar knows.
_UNTIL_END = r"/(?s:.*)\n<\/parameter>/ & ~/(?s:.*<\/parameter>.+)/"
_BOOLEANS = '("true" | "false" | "True" | "False")'


def call_rules(number: int, tool: Tool) -> list[str]:
    """The rule `call_<number>` and those that it needs, in Lark's format.

    Incomplete if they are longer than a grammar may be. Raises ConfigError if there is a schema
    that no grammar can promise.
    """
    return _CallGrammar(number, tool).rules()


class _CallGrammar:
    def __init__(self, number: int, tool: Tool) -> None:
        self._number = number
        self._tool = tool
        self._root = tool.parameters
        self._lines: list[str] = []
        self._num_chars = 0
        self._num_values = 0

    def rules(self) -> list[str]:
        arguments = resolved(self._root, self._root)
        if arguments is None:
            raise self._refuse("parameters that are a reference outside of $defs")
        strange = set(arguments) - _OF_ARGUMENTS - NOTES
        if strange:
            raise self._refuse(f"{min(strange)!r} beside its properties")
        properties = arguments.get("properties") or {}
        required = arguments.get("required") or []
        is_list = isinstance(required, list) and all(isinstance(each, str) for each in required)
        if not isinstance(properties, Mapping) or not is_list:
            raise self._refuse("properties or required that are not an object and a list of names")
        needed = frozenset(required)
        known = {**properties, **{key: {} for key in required if key not in properties}}
        parts = [json.dumps(f"{FUNCTION}{self._tool.name}>\n")]
        for place, (key, schema) in enumerate(known.items()):
            if self._num_chars > MAX_GRAMMAR_CHARS:
                break
            if not _KEY.fullmatch(key):
                raise self._refuse(f"the parameter {key!r}, whose name cannot be written")
            rule = f"p_{self._number}_{place}"
            value = self._value(f"v_{self._number}_{place}", key, schema)
            head = json.dumps(f"{PARAMETER}{key}>\n", ensure_ascii=False)
            self._add(f'{rule}: {head} {value} "\\n"')
            parts.append(rule if key in needed else f"{rule}?")
        parts.append(json.dumps(END_FUNCTION))
        return [f"call_{self._number}: {' '.join(parts)}", *self._lines]

    def _add(self, *lines: str) -> None:
        self._lines += lines
        self._num_chars += sum(map(len, lines))

    def _value(self, rule: str, key: str, schema: object, depth: int = 0) -> str:
        """The rule of a value and its end."""
        found = resolved(schema, self._root)
        if found is None:
            raise self._refuse(f"the parameter {key!r}, with a reference outside of $defs")
        if isinstance(schema, Mapping) and "$ref" in schema and set(schema) - {"$ref"} - NOTES:
            raise self._refuse(f"the parameter {key!r}, with keywords beside $ref")
        self._num_values += 1
        if depth > _MAX_DEPTH or self._num_values > _MAX_VALUES:
            raise self._refuse(f"the parameter {key!r}, with too many alternatives")
        union = next((found[name] for name in _UNIONS if name in found), None)
        if isinstance(union, list) and union:
            if len(union) > _MAX_VALUES:
                raise self._refuse(f"the parameter {key!r}, with too many alternatives")
            if set(found) - set(_UNIONS) - NOTES:
                raise self._refuse(f"the parameter {key!r}, with keywords beside anyOf")
            self._check_union(key, union)
            each = [
                self._value(f"{rule}_{n}", key, branch, depth + 1) for n, branch in enumerate(union)
            ]
            self._add(f"{rule}: {' | '.join(each)}")
            return rule
        kinds = kinds_of(found, self._root)
        if kinds == TEXT:
            self._text(rule, key, found)
        elif kinds == {"boolean"} and set(found) <= {"type", *NOTES}:
            self._add(f"{rule}: {_BOOLEANS} {json.dumps(_END)}")
        elif "string" not in kinds:
            self._json(rule, key, found)
        elif set(found) - {"type"} - NOTES:
            raise self._refuse(
                f"the parameter {key!r}, which may be a string or something else, with limits"
            )
        elif kinds == ANY:
            self._text(rule, key, {})  # what is read as JSON is allowed too
        else:
            others = [{"type": kind} for kind in sorted(kinds)]
            return self._value(rule, key, {"anyOf": others}, depth + 1)
        return rule

    def _check_union(self, key: str, union: list[Any]) -> None:
        """A string that reads like another kind is taken for that: it must then be allowed."""
        kinds = [kinds_of(branch, self._root) for branch in union]
        if not any("string" in each for each in kinds):
            return
        for each, branch in zip(kinds, union, strict=True):
            found = resolved(branch, self._root)
            is_free = found is not None and not set(found) - {"type"} - NOTES
            if each != TEXT and not is_free:
                raise self._refuse(
                    f"the parameter {key!r}, which may be a string or something else, with limits"
                )

    def _text(self, rule: str, key: str, schema: Mapping[str, Any]) -> None:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            values = values if isinstance(values, list) else []
            texts = [each for each in values if isinstance(each, str)]
            if not texts:
                raise self._refuse(f"the parameter {key!r}, which no value fits")
            if any(END_PARAMETER in text for text in texts):
                raise self._refuse(f"the parameter {key!r}, one of whose values ends a parameter")
            words = " | ".join(json.dumps(text + _END, ensure_ascii=False) for text in texts)
            self._add(f"{rule}: {words}")
            return
        strange = set(schema) - _OF_TEXT - NOTES
        pattern = _whole(schema["pattern"]) if "pattern" in schema else None
        if self._tool.strict and (strange or ("pattern" in schema and pattern is None)):
            keyword = min(strange) if strange else "pattern"
            raise self._refuse(f"the parameter {key!r}, with a {keyword} that is not supported")
        limits = [_UNTIL_END]
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        if low or high != "":
            limits.append(rf"/(?s:.{{{low},{high}}})\n<\/parameter>/")
        if pattern is not None:
            limits.append(rf"/(?:{pattern})\n<\/parameter>/")
        name = rule.upper()
        self._add(f"{rule}[lazy]: {name}", f"{name}: {' & '.join(limits)}")

    def _json(self, rule: str, key: str, schema: Mapping[str, Any]) -> None:
        style = {
            "item_separator": ", ",
            "key_separator": ": ",
            "whitespace_flexible": False,
            "lenient": not self._tool.strict,
        }
        whole = {**schema, "x-guidance": style}
        text = json.dumps(whole, ensure_ascii=False)
        if '"$ref"' in text:
            names = ("$defs", "definitions")
            defs = {name: self._root[name] for name in names if name in self._root}
            text = json.dumps({**defs, **whole}, ensure_ascii=False)
        if re.search(r'"\$ref": "(?!#/(\$defs|definitions)/)', text):
            raise self._refuse(f"the parameter {key!r}, with a reference outside of $defs")
        self._add(f"{rule}: {rule}_json {json.dumps(_END)}", f"{rule}_json: %json {text}")

    def _refuse(self, what: str) -> ConfigError:
        return ConfigError(
            f"the tool {self._tool.name!r} has {what[:200]}: calls of this model cannot be made to "
            'follow that, because they are not JSON; simplify it, or set tool_choice to "auto", '
            "without a response_format"
        )


def _whole(pattern: object) -> str | None:
    """The pattern as one for the whole text. None if that is not known."""
    if not isinstance(pattern, str) or "\n" in pattern:
        return None
    inner = pattern.removeprefix("^")
    is_begun = inner != pattern
    is_ended = inner.endswith("$") and not inner.endswith("\\$")
    inner = inner[:-1] if is_ended else inner
    bare = re.sub(r"\\.", "", inner)  # without what is escaped
    bare = re.sub(r"\[\^?\]?[^\]]*+\]?", "", bare)  # and without classes
    if any(char in bare for char in "^$") or (_alternates(bare) and (is_begun or is_ended)):
        return None
    slashed = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", inner, flags=re.DOTALL)
    around = "(?s:.*)"
    return f"{'' if is_begun else around}(?:{slashed}){'' if is_ended else around}"


def _alternates(bare: str) -> bool:
    """Whether there is an alternative outside of all groups."""
    depth = 0
    for char in bare:
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            return True
    return False
