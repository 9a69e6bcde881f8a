"""How models write tool calls. The names are vLLM's `--tool-call-parser`.

hermes        <tool_call>
              {"name": "f", "arguments": {"x": 1}}
              </tool_call>                                         Hermes, Qwen 2.5 and 3
llama3_json   {"name": "f", "parameters": {"x": 1}}                Llama 3.1 to 3.3
mistral       [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]  Mistral
mistral_args  [TOOL_CALLS]f[ARGS]{"x": 1}                          Mistral's latest
qwen3_coder   <tool_call>
              <function=f>
              <parameter=x>
              1
              </parameter>
              </function>
              </tool_call>                                         Qwen3-Coder

vLLM names both of Mistral's `mistral`, which here also means the one that the template has.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from penstock.engine.structure import MAX_GRAMMAR_CHARS
from penstock.errors import ConfigError
from penstock.server.tools.json_object import ObjectReader
from penstock.server.tools.named_call import ARGS, CALL_ID, NAME, NamedReader
from penstock.server.tools.reading import CallReader
from penstock.server.tools.tool import Tool
from penstock.server.tools.xml_call import FUNCTION, XmlReader
from penstock.server.tools.xml_grammar import call_rules

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
    body: Literal["object", "named", "xml"] = "object"  # how one call is written
    inner_marks: tuple[str, ...] = ()  # within a call

    @property
    def marks(self) -> list[str]:
        """The texts that tokenizers may have special tokens for."""
        return [mark for mark in (self.begin, self.opening, self.end, *self.inner_marks) if mark]

    def starts(self, text: str) -> bool | None:
        """Whether a call may begin like this. None if more of it is needed."""
        if self.body == "object":
            return text.startswith("{")
        if self.body == "xml":
            return text.startswith(FUNCTION) or (None if FUNCTION.startswith(text) else False)
        return re.match(NAME, text) is not None

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        if self.body == "object":
            return ObjectReader()
        if self.body == "named":
            return NamedReader()
        return XmlReader({tool.name: tool.parameters for tool in tools})

    def new_id(self) -> str:
        chars = "".join(secrets.choice(_ALPHABET) for _ in range(self.num_id_chars))
        return self.id_prefix + chars

    def grammar(
        self, tools: Sequence[Tool], max_calls: int, special_id: Callable[[str], int | None]
    ) -> str:
        """The rule `calls`, and those that it needs, in Lark's format.

        `special_id`: the id of a text that is one special token, which a grammar must name.
        What is longer than a grammar may be is incomplete.
        Raises ConfigError if such calls cannot be made to follow a tool's schema.
        """
        literal = partial(_literal, marks=self.marks, special_id=special_id)
        opens, between, closes = map(literal, self.enforced)
        calls = " | ".join(f"call_{number}" for number in range(len(tools)))
        more = f"({between} one){{0,{max_calls - 1}}}" if max_calls > 1 else ""
        parts = [literal(self.begin), opens, "one", more, closes]
        lines = [f"calls: {' '.join(filter(None, parts))}", f"one: {calls}"]
        num_chars = 0
        for number, tool in enumerate(tools):
            rules = self._call_rules(number, tool, special_id)
            lines += rules
            num_chars += sum(map(len, rules))
            if num_chars > MAX_GRAMMAR_CHARS:
                break  # it is refused
        return "\n".join(lines)

    def _call_rules(
        self, number: int, tool: Tool, special_id: Callable[[str], int | None]
    ) -> list[str]:
        if self.body == "xml":
            return call_rules(number, tool)
        arguments = f"arguments_{number}"
        if self.body == "named":
            literal = partial(_literal, marks=self.marks, special_id=special_id)
            has_id = special_id(CALL_ID) is not None
            call_id = f"({literal(CALL_ID)} /[a-zA-Z0-9]{{9}}/)?" if has_id else ""
            call = f"{_quoted(tool.name)} {call_id} {literal(ARGS)} {arguments}"
        else:
            head = f'{{"name": {json.dumps(tool.name)}, "{self.arguments}": '
            call = f'{_quoted(head)} {arguments} "}}"'
        return [f"call_{number}: {call}", f"{arguments}: %json {tool.schema_text}"]


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
MISTRAL_ARGS = ToolFormat(
    "mistral_args",
    begin="[TOOL_CALLS]",
    end="",
    arguments="",
    enforced=("", "[TOOL_CALLS]", ""),
    id_prefix="",
    num_id_chars=9,
    body="named",
    inner_marks=(ARGS, CALL_ID),
)
QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    begin="<tool_call>",
    end="</tool_call>",
    arguments="",
    enforced=("\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    body="xml",
)
FORMATS = {each.name: each for each in (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS, QWEN3_CODER)}


def find_format(name: str, template: str = "") -> ToolFormat:
    """Raises ConfigError. The template decides between two formats of the same name in vLLM."""
    if name == MISTRAL.name and format_of(template) is MISTRAL_ARGS:
        return MISTRAL_ARGS
    if name not in FORMATS:
        raise ConfigError(
            f"--tool-call-parser is {name!r}: expected one of {', '.join(FORMATS)}; correct it, or "
            "leave it out to choose it from the chat template."
        )
    return FORMATS[name]


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template asks the model for. None if it is not known."""
    if FUNCTION in template:
        return QWEN3_CODER if "<tool_call>" in template and "<parameter=" in template else None
    if ARGS in template:
        return MISTRAL_ARGS if "[TOOL_CALLS]" in template else None
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    is_llama = "<|python_tag|>" in template or "ipython" in template
    return LLAMA3_JSON if is_llama and "parameters" in template else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _literal(text: str, *, marks: Sequence[str], special_id: Callable[[str], int | None]) -> str:
    """The text in Lark's format, with its special tokens."""
    special = {mark: found for mark in marks if (found := special_id(mark)) is not None}
    if not special:
        return _quoted(text)
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text)
    return " ".join(
        f"<[{special[part]}]>" if part in special else _quoted(part) for part in parts if part
    )
