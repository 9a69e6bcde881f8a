"""How models write tool calls. The names are vLLM's `--tool-call-parser`.

hermes        <tool_call>
              {"name": "f", "arguments": {"x": 1}}
              </tool_call>                                         Hermes, Qwen 2.5 and 3
llama3_json   {"name": "f", "parameters": {"x": 1}}                Llama 3.1 to 3.3
mistral       [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]  Mistral
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError

MAX_CALLS = 32  # in one answer whose calls are enforced
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written."""

    name: str
    begin: str  # before calls; "" if an answer that is an object is a call
    end: str  # after a call, or after all
    arguments: str  # the key of a call's arguments
    opening: str = ""  # may stand between the beginning and the first call
    separator: str = ""  # between calls; "" if each has its own beginning
    # What stands around and between calls in an answer that must have some, after `begin`.
    enforced: tuple[str, str, str] = ("", "", "")
    id_prefix: str = "call_"
    num_id_chars: int = 24

    def new_id(self) -> str:
        chars = "".join(secrets.choice(_ALPHABET) for _ in range(self.num_id_chars))
        return self.id_prefix + chars

    def grammar(
        self, tools: Sequence[Tool], max_calls: int, special_id: Callable[[str], int | None]
    ) -> str:
        """The rule `calls`, and those that it needs, in Lark's format.

        `special_id`: the id of a text that is one special token, which a grammar must name.
        """
        opens, between, closes = self.enforced
        calls = " | ".join(f"call_{number}" for number in range(len(tools)))
        more = f"({_quoted(between)} one){{0,{max_calls - 1}}}" if max_calls > 1 else ""
        parts = [_literal(self.begin, special_id), _quoted(opens), "one", more, _quoted(closes)]
        lines = [f"calls: {' '.join(filter(None, parts))}", f"one: {calls}"]
        for number, tool in enumerate(tools):
            head = f'{{"name": {json.dumps(tool.name)}, "{self.arguments}": '
            lines.append(f'call_{number}: {_quoted(head)} arguments_{number} "}}"')
            lines.append(f"arguments_{number}: %json {tool.schema_text}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    @property
    def schema_text(self) -> str:
        """The schema of the arguments, written in one line as chat templates write JSON."""
        style = {
            "item_separator": ", ",
            "key_separator": ": ",
            "whitespace_flexible": False,
            "lenient": not self.strict,
        }
        schema = {"type": "object", **self.parameters, "x-guidance": style}
        return json.dumps(schema, ensure_ascii=False)


HERMES = ToolFormat(
    "hermes",
    begin="<tool_call>",
    end="</tool_call>",
    arguments="arguments",
    enforced=("\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
)
LLAMA3_JSON = ToolFormat(
    "llama3_json",
    begin="",
    end="",
    arguments="parameters",
    opening="<|python_tag|>",
    separator=";",
    enforced=("", "; ", ""),
)
MISTRAL = ToolFormat(
    "mistral",
    begin="[TOOL_CALLS]",
    end="]",
    arguments="arguments",
    opening="[",
    separator=",",
    enforced=(" [", ", ", "]"),
    id_prefix="",  # its templates reject ids that are not nine letters and digits
    num_id_chars=9,
)
FORMATS = {each.name: each for each in (HERMES, LLAMA3_JSON, MISTRAL)}


def find_format(name: str) -> ToolFormat:
    """Raises ConfigError."""
    if name not in FORMATS:
        raise ConfigError(
            f"--tool-call-parser is {name!r}: expected one of {', '.join(FORMATS)}; correct it, or "
            "leave it out to choose it from the chat template."
        )
    return FORMATS[name]


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template asks the model for. None if it is not known."""
    if "<function=" in template or "[ARGS]" in template:
        return None  # Qwen3-Coder's XML, and Mistral's latest
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    is_llama = "<|python_tag|>" in template or "ipython" in template
    return LLAMA3_JSON if is_llama and "parameters" in template else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _literal(text: str, special_id: Callable[[str], int | None]) -> str:
    found = special_id(text) if text else None
    return _quoted(text) if found is None else f"<[{found}]>"
