"""What a structured answer must look like, in the words of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from penstock.engine.structure import GrammarSource, UnusableStructure

_MAX_REASON_CHARS = 300
# The first rule, after comments and empty lines.
_GBNF = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*[ \t]*[\w-]+[ \t]*::=")
# Where only one text can follow, llguidance tokenizes it and allows the first token alone. If the
# text spells a special token, that would be the special token, which it then refuses.
_UNFORCED = '%llguidance {"no_forcing": true}'


def grammar_text(source: GrammarSource, special: Collection[str]) -> str:
    """The source in llguidance's words. `special`: the texts of special tokens.

    Raises UnusableStructure.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        if source.kind == "grammar":
            text = gbnf_to_lark(source.text) if _GBNF.match(source.text) else source.text
            text = text.replace("%llguidance {}", "", 1)  # a converter's, without any effect
            if _may_spell(text, special) and "%llguidance" not in text:
                text = f"{_UNFORCED}\n{text}"
            return LLMatcher.grammar_from_lark(text)
        if source.kind == "regex":
            if _may_spell(source.text, special):
                return LLMatcher.grammar_from_lark(f"{_UNFORCED}\nstart: /{_slashed(source.text)}/")
            return LLMatcher.grammar_from_regex(source.text)
        options = json.loads(source.options)
        if _may_spell(source.text, special):
            schema = json.dumps({**json.loads(source.text), "x-guidance": options})
            return LLMatcher.grammar_from_lark(f"{_UNFORCED}\nstart: %json {schema}")
        return LLMatcher.grammar_from_json_schema(source.text, overrides=options)
    except Exception as error:  # a converter in Python, which may fail in any way
        raise invalid(source, str(error)) from None


def _may_spell(text: str, special: Collection[str]) -> bool:
    bare = text.replace("\\", "")  # as expressions write them
    return any(mark in text or mark in bare for mark in special)


def _slashed(expression: str) -> str:
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", expression, flags=re.DOTALL)


def invalid(source: GrammarSource, reason: str) -> UnusableStructure:
    what = {"json": "the JSON schema", "regex": "the regular expression"}
    return UnusableStructure(
        f"{what.get(source.kind, 'the grammar')} cannot be used ({first_line(reason)}); correct "
        "or simplify it."
    )


def first_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return (lines or ["no reason given"])[0][:_MAX_REASON_CHARS]
