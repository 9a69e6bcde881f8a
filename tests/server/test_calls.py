"""Tool calls in answers, however an answer is divided."""

from __future__ import annotations

import random

import pytest

from penstock.errors import ConfigError
from penstock.server.tools.answer import AnswerReader
from penstock.server.tools.calls import CallDelta, CallParser
from penstock.server.tools.formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN3_CODER,
    ToolFormat,
    find_format,
    format_of,
)
from penstock.server.tools.tool import Tool
from penstock.server.tools.use import ToolUse

TOOLS = [
    Tool(
        "f",
        {
            "properties": {
                "s": {"type": "string"},
                "i": {"$ref": "#/$defs/i"},
                "l": {"type": "array"},
                "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "b": {"type": ["boolean", "null"]},
                "e": {"enum": [1, "one"]},
            },
            "$defs": {"i": {"type": "integer"}},
        },
    ),
    Tool("g", {}),
]
Found = tuple[str, list[tuple[str, str]]]
CASES: list[tuple[ToolFormat, str, Found]] = [
    (
        HERMES,
        'Hi.\n<tool_call>\n{"name": "f", "arguments": {"x": "}\\"", "y": [1, {"a": 2}]}}\n'
        '</tool_call>\n<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>',
        ("Hi.", [("f", '{"x": "}\\"", "y": [1, {"a": 2}]}'), ("g", "{}")]),
    ),
    (HERMES, "plain < text <tool", ("plain < text <tool", [])),
    (HERMES, "<tool_call>no</tool_call> x", ("<tool_call>no</tool_call> x", [])),
    (HERMES, '<tool_call>{"name": 3}', ('<tool_call>{"name": 3}', [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')])),
    (HERMES, '<tool_call>{"name": "f"}</tool_call> after', ("after", [("f", "{}")])),
    (HERMES, "", ("", [])),
    (
        HERMES,
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        ('<tool_call>{"name": "\\ud800", "arguments": {}}', []),
    ),
    (HERMES, f'{" " * 1100}<tool_call>{{"name": "f"}}', (" " * 76, [("f", "{}")])),
    (HERMES, f"<tool_call>{' ' * 1100}{{}}", (f"<tool_call>{' ' * 1100}{{}}", [])),
    (
        LLAMA3_JSON,
        '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        ("", [("f", '{"x": 1}'), ("g", "{}")]),
    ),
    (LLAMA3_JSON, '<|python_tag|>{"name": "f", "parameters": {}}', ("", [("f", "{}")])),
    (LLAMA3_JSON, '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
    (
        LLAMA3_JSON,
        'So: {"name": "f", "parameters": {}}',
        ('So: {"name": "f", "parameters": {}}', []),
    ),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
        ("", [("f", '{"x": 1}'), ("g", "{}")]),
    ),
    (MISTRAL, 'ok[TOOL_CALLS][{"name": "f", "arguments": {}}]', ("ok", [("f", "{}")])),
    (MISTRAL, '[TOOL_CALLS]f{"x": 1}', ('[TOOL_CALLS]f{"x": 1}', [])),
    (MISTRAL, "a  \n", ("a  \n", [])),
    (
        MISTRAL_ARGS,
        'Hi. [TOOL_CALLS]f[ARGS]{"x": "[ARGS]}", "y": {}}[TOOL_CALLS]g [CALL_ID]a1B2c3D4e[ARGS] {}',
        ("Hi.", [("f", '{"x": "[ARGS]}", "y": {}}'), ("g", "{}")]),
    ),
    (MISTRAL_ARGS, '[TOOL_CALLS]f{"x": 1} so', ("so", [("f", '{"x": 1}')])),
    (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"x": [1', ("", [("f", '{"x": [1')])),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]", ("[TOOL_CALLS]f[ARGS]", [])),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS][1]{}", ("[TOOL_CALLS]f[ARGS][1]{}", [])),
    (MISTRAL_ARGS, "[TOOL_CALLS]é{}", ("[TOOL_CALLS]é{}", [])),
    (
        QWEN3_CODER,
        'Hi.\n<tool_call>\n<function=f>\n<parameter=s>\na < b\n\n</param> "é"\n</parameter>\n'
        "<parameter=i>\n5\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n"
        "</function>\n</tool_call>",
        ("Hi.", [("f", '{"s": "a < b\\n\\n</param> \\"é\\"", "i": 5}'), ("g", "{}")]),
    ),
    (
        QWEN3_CODER,
        "<tool_call><function=f><parameter=o>None</parameter><parameter=b>\nTrue\n</parameter>"
        "<parameter=e>one</parameter><parameter=i>many</parameter></function></tool_call> ok",
        ("ok", [("f", '{"o": null, "b": true, "e": "one", "i": "many"}')]),
    ),
    (
        QWEN3_CODER,
        '<tool_call><function=f><parameter=l>["</parameter>", 1]</parameter>\n<parameter=e>1'
        "</parameter><parameter=l>[1</parameter>\n</function></tool_call>",
        ("", [("f", '{"l": ["</parameter>", 1], "e": 1, "l": "[1"}')]),
    ),
    (
        QWEN3_CODER,
        "<tool_call><function=h>so <parameter=x>12</parameter><parameter=y>NaN</parameter>"
        "</tool_call>",
        ("", [("h", '{"x": 12, "y": "NaN"}')]),
    ),
    (
        QWEN3_CODER,
        "<tool_call><function=f><parameter=l>\n[" + '"</parameter></function>\\"", ' * 40 + "1]\n"
        "</parameter>\n</function>",
        ("", [("f", '{"l": [' + '"</parameter></function>\\"", ' * 40 + "1]}")]),
    ),
    (
        QWEN3_CODER,
        '<tool_call><function=f><parameter=l>["a\n</parameter><parameter=b>true</parameter>'
        "</function>",
        ("", [("f", '{"l": "[\\"a", "b": true}')]),
    ),
    (QWEN3_CODER, "<tool_call><function=f><parameter=s>ab</para", ("", [("f", '{"s": "ab')])),
    (QWEN3_CODER, "<tool_call><function=f><parameter=i>12", ("", [("f", '{"i": ')])),
    (QWEN3_CODER, "<tool_call><function=f <b>", ("<tool_call><function=f <b>", [])),
    (QWEN3_CODER, '<tool_call>{"name": "f"}', ('<tool_call>{"name": "f"}', [])),
    (QWEN3_CODER, "<tool_call><function=>", ("<tool_call><function=>", [])),
]


def read(form: ToolFormat, pieces: list[str], max_calls: int | None = None) -> Found:
    parser = CallParser(form, TOOLS, max_calls)
    found = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    calls: dict[int, tuple[str, str]] = {}
    for delta in found:
        if isinstance(delta, CallDelta):
            name, arguments = calls.get(delta.index, (delta.name or "", ""))
            calls[delta.index] = (name, arguments + delta.arguments)
    return "".join(each for each in found if isinstance(each, str)), list(calls.values())


@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=lambda given: str(given)[:30])
def test_calls_are_found_however_the_answer_is_divided(
    form: ToolFormat, text: str, expected: Found
) -> None:
    assert read(form, [text]) == expected
    assert read(form, list(text)) == expected
    rng = random.Random(5)
    for _ in range(100):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 6))))
        ends = zip([0, *cuts], [*cuts, len(text)], strict=True)
        assert read(form, [text[start:end] for start, end in ends]) == expected


def test_schemas_of_plain_text_may_contain_themselves() -> None:
    """The kinds of a value are found without going in circles."""
    defs = {
        "all": {"properties": {"t": {"$ref": "#/$defs/t"}, "s": {"type": "string"}}},
        "t": {"anyOf": [{"$ref": "#/$defs/t"}] * 9 + [{"$ref": "#/$defs/u"}, {"type": "integer"}]},
        "u": {"anyOf": [{"$ref": "#/$defs/t"}] * 9},
    }
    tools = [Tool("f", {"$ref": "#/$defs/all", "$defs": defs})]
    parser = CallParser(QWEN3_CODER, tools)
    text = "<tool_call><function=f><parameter=t>5</parameter><parameter=s>5</parameter></function>"
    told = "".join(each.arguments for each in parser.feed(text) if isinstance(each, CallDelta))
    assert told == '{"t": 5, "s": "5"}'


@pytest.mark.parametrize("text", [" ", '<tool_call>{"x": "', '<tool_call>{"name": "f"}'])
def test_what_is_held_is_bounded(text: str) -> None:
    """Else each token of an answer that only goes on would cost more than the one before it."""
    parser = CallParser(HERMES, TOOLS)
    parser.feed(text)
    for _ in range(70):
        parser.feed(" " * 1000)
    assert len(parser._held) + parser._reader.num_chars < 1 << 17


def test_calls_beyond_the_limit_are_left_out() -> None:
    _, text, (content, calls) = CASES[0]
    assert read(HERMES, [text], max_calls=1) == (content, calls[:1])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>{"name": "f", "arguments": {"i": 1}}', "tool_calls"),
        ('<tool_call>{"name": "f", "arguments": {"i": 1}}</tool_call> so', "tool_calls"),
        ('<tool_call>{"name": "f", "arguments": {"i": 1', "stop"),
        (
            '<tool_call>{"name": "g", "arguments": {}}<tool_call>{"name": "f", "arguments": {',
            "stop",
        ),
    ],
)
def test_an_answer_that_stops_within_a_call_is_not_one_with_calls(text: str, reason: str) -> None:
    reader = AnswerReader(ToolUse(HERMES, tuple(TOOLS), False, False, None, lambda _: None))
    reader.feed(text)
    reader.finish()
    assert reader.finish_reason("stop") == reason
    assert reader.finish_reason("length") == "length"


def test_a_call_that_is_left_out_may_be_incomplete() -> None:
    reader = AnswerReader(ToolUse(HERMES, tuple(TOOLS), False, False, 1, lambda _: None))
    call = '<tool_call>{"name": "f", "arguments": {}}'
    (_, told) = reader.feed(f"{call}</tool_call>{call[:-2]}")
    assert (told, reader.finish()) == (CallDelta(0, "{}"), [])
    assert reader.finish_reason("stop") == "tool_calls"


def test_the_format_is_chosen_from_the_template() -> None:
    assert format_of("{{ tools }} <tool_call>") is HERMES
    assert format_of("{{ tools }} <tool_call><function={{ name }}><parameter=") is QWEN3_CODER
    assert format_of("{{ tools }} <function={{ name }}>{}</function>") is None
    assert format_of("{{ tools }} [TOOL_CALLS]{{ name }}[ARGS]") is MISTRAL_ARGS
    assert find_format("mistral", "[TOOL_CALLS]{{ name }}[ARGS]") is MISTRAL_ARGS
    assert find_format("mistral") is MISTRAL
    assert format_of("{{ tools }} [TOOL_CALLS]") is MISTRAL
    assert format_of('{{ tools }} ipython {"name": …, "parameters": …}') is LLAMA3_JSON
    assert format_of("{{ tools }}") is None
    with pytest.raises(ConfigError, match="expected one of hermes"):
        find_format("qwen")
