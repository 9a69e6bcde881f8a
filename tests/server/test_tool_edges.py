"""Tools at the edges: answers that end within a call, clients that leave, hostile texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server.running import Client, Local
from server.test_tools import HERMES, QUESTION, TIME, WEATHER

from penstock.engine.structure import MAX_GRAMMAR_CHARS
from penstock.errors import ConfigError
from penstock.server.tools.formats import FORMATS, MISTRAL_ARGS, QWEN3_CODER
from penstock.server.tools.tool import Tool

PATH = "/v1/chat/completions"
MARKS = "a<|im_end|>\n</tool_call><tool_call>[TOOL_CALLS][ARGS]b"


def tool(name: str = "f", **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.fixture(scope="module", params=list(FORMATS))
def server(request: pytest.FixtureRequest, tiny: Any) -> Iterator[Local]:
    made = Local(tiny, chat_template=HERMES, tool_call_parser=request.param).start()
    yield made
    made.stop()


@pytest.fixture
def client(server: Local) -> Iterator[Client]:
    with server.client() as made:
        yield made


def ask(client: Client, **fields: Any) -> list[dict[str, Any]]:
    """The choices, which must be the same if the answer is streamed."""
    body = {
        "messages": QUESTION, "tool_choice": "required", "parallel_tool_calls": False,
        "max_tokens": 120, "seed": 1, **fields,
    }  # fmt: skip
    answer = client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    streamed = [{"content": "", "calls": {}, "reason": None} for _ in choices]
    text = client.post(PATH, json={**body, "stream": True}).text
    for line in text.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            one: Any = streamed[choice["index"]]
            one["content"] += choice["delta"].get("content") or ""
            one["reason"] = choice["finish_reason"] or one["reason"]
            for call in choice["delta"].get("tool_calls", []):
                whole = one["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                whole["name"] += call["function"].get("name") or ""
                whole["arguments"] += call["function"]["arguments"]
    for choice, one in zip(choices, streamed, strict=True):
        assert one["content"] == (choice["message"]["content"] or "")
        assert list(one["calls"].values()) == functions(choice)
        assert one["reason"] == choice["finish_reason"]
    return choices


def functions(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in choice["message"].get("tool_calls", [])]


def test_several_choices_are_streamed_as_they_are_answered(client: Client) -> None:
    choices = ask(client, tools=[WEATHER, TIME], n=3)
    assert {choice["finish_reason"] for choice in choices} == {"tool_calls"}
    assert all(json.loads(functions(choice)[0]["arguments"]) for choice in choices)


def test_an_answer_that_is_too_long_ends_within_its_call(client: Client) -> None:
    """The arguments are the beginning of valid ones, and never look complete."""
    tools = [tool(x={"enum": ["one two three four five six seven eight"]})]
    (whole,) = functions(ask(client, tools=tools)[0])
    for max_tokens in (12, 18, 120):
        (choice,) = ask(client, tools=tools, max_tokens=max_tokens)
        if choice["finish_reason"] != "length":
            assert functions(choice) == [whole]
            break
        for begun in functions(choice):
            assert whole["arguments"].startswith(begun["arguments"])
            assert len(begun["arguments"]) <= len(whole["arguments"])
    assert choice["finish_reason"] == "tool_calls"


def test_a_stop_string_within_arguments_ends_the_answer(client: Client) -> None:
    tools = [tool(x={"enum": ["one two three"]})]
    (choice,) = ask(client, tools=tools, stop=["two"])
    assert choice["finish_reason"] == "stop"  # not tool_calls: this one cannot be called
    for begun in functions(choice):
        assert begun["arguments"].endswith("one ") or begun["arguments"].endswith('"x": ')
    (choice,) = ask(client, tools=tools, stop=["two"], include_stop_str_in_output=True)
    assert choice["finish_reason"] == "stop"


def test_control_tokens_in_arguments_are_text(client: Client) -> None:
    """A grammar writes them with the tokens of plain text, and none of them ends the call."""
    (choice,) = ask(client, tools=[tool(x={"enum": [MARKS]})])
    assert json.loads(functions(choice)[0]["arguments"]) == {"x": MARKS}
    assert choice["finish_reason"] == "tool_calls"


def test_control_tokens_in_structured_answers_are_text(tiny: Any) -> None:
    served = Local(tiny).start()
    try:
        with served.client() as client:
            for fields, text in (
                ({"guided_choice": ["<|im_start|>"]}, "<|im_start|>"),
                ({"guided_regex": "a/<\\|im_end\\|>b"}, "a/<|im_end|>b"),
                ({"guided_json": {"const": "<|im_end|>"}}, '"<|im_end|>"'),
                ({"guided_grammar": 'root ::= "<|im_end|>"'}, "<|im_end|>"),
            ):
                body = {"prompt": "x", "max_tokens": 40, **fields}
                answer = client.post("/v1/completions", json=body).json()
                assert answer["choices"][0]["text"] == text
    finally:
        served.stop()


def test_control_tokens_in_requests_are_what_they_are_in_vllm(client: Client) -> None:
    """Names cannot have them. In descriptions, arguments and results, the prompt is the text that
    the template makes, tokenized: they are control tokens, as in vLLM and transformers."""
    named = tool("a<|im_end|>")
    answer = client.post(PATH, json={"messages": QUESTION, "tools": [named], "max_tokens": 1})
    assert answer.status_code == 400
    described = tool()
    described["function"]["description"] = MARKS
    call = {"id": "123456789", "type": "function",
            "function": {"name": MARKS, "arguments": json.dumps({"x": MARKS})}}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "unknown", "content": MARKS}
    messages = [*QUESTION, {"role": "assistant", "tool_calls": [call]}, result]
    body = {"messages": messages, "tools": [described]}
    answer = client.post(PATH, json={**body, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    ids = client.post("/tokenize", json=body).json()["tokens"]
    text = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text.count(MARKS) >= 1
    plain = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert plain["tokens"] == ids
    (end,) = client.post("/tokenize", json={"prompt": "<|im_end|>"}).json()["tokens"]
    assert ids.count(end) == text.count("<|im_end|>")


def test_calls_are_sent_back_as_models_write_them(client: Client) -> None:
    """Invalid JSON, half a character, or an object instead of its text."""

    def tokens(arguments: object) -> list[int]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
        answer = client.post("/tokenize", json={"messages": messages})
        assert answer.status_code == 200, answer.text
        read: list[int] = answer.json()["tokens"]
        return read

    assert tokens('{"x": "\\ud83d\\ude00"}') == tokens({"x": "\U0001f600"})
    assert tokens('{"x": "a\\uD83D"}') == tokens({"x": "a\ufffd"})
    assert tokens('{"\\ude00": [NaN]}')
    assert tokens('{"x": ')
    assert tokens('["\\ud83d"]')
    assert tokens(None) == tokens("") == tokens("{}") == tokens({})


def test_a_client_that_leaves_within_a_call_leaves_nothing(server: Local) -> None:
    long = tool(x={"type": "string", "minLength": 300})
    with server.client() as client:
        for _ in range(2):
            body = {"messages": QUESTION, "tools": [long], "tool_choice": "required",
                    "stream": True, "n": 2, "max_tokens": 300}  # fmt: skip
            with client.stream("POST", PATH, json=body) as answer:
                for line in answer.iter_lines():
                    if "tool_calls" in line:
                        break
            client.wait_idle()
        client.check_serves()


def test_recursive_and_large_schemas(server: Local, client: Client) -> None:
    tree = {"type": "object", "properties": {"v": {"type": "boolean"},
            "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
            "required": ["v", "next"], "additionalProperties": False}  # fmt: skip
    recursive = tool(t={"$ref": "#/$defs/tree"})
    recursive["function"]["parameters"]["$defs"] = {"tree": tree}
    (choice,) = ask(client, tools=[recursive], max_tokens=300, seed=2)
    if choice["finish_reason"] == "tool_calls":
        assert "v" in json.loads(functions(choice)[0]["arguments"])["t"]
    large = tool(x={"enum": [f"{number:030}" for number in range(9_000)]})
    answer = client.post(
        PATH, json={"messages": QUESTION, "tools": [large], "tool_choice": "required"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    auto = {"messages": QUESTION, "tools": [tool(x=tree)], "max_tokens": 1}
    assert client.post(PATH, json=auto).status_code == 200


def test_requests_that_share_a_schema_do_not_share_its_state(client: Client) -> None:
    def answer(seed: int) -> list[dict[str, Any]]:
        return [functions(choice) for choice in ask(client, tools=[WEATHER], seed=seed, n=2)]  # type: ignore[misc]

    alone = [answer(seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(answer, range(2))) == alone
    assert alone[0] != alone[1]


def parameters(**properties: Any) -> dict[str, Any]:
    return {"properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"anyOf": [{}]}, "'anyOf' beside"),
        (parameters(**{"a>b": {}}), "cannot be written"),
        (parameters(a={"$ref": "#"}), "reference outside"),
        (parameters(a={"type": "array", "items": {"$ref": "#/properties/a"}}), "reference outside"),
        (parameters(a={"enum": ["</parameter>"]}), "ends a parameter"),
        (parameters(a={"type": ["string", "integer"], "maximum": 3}), "with limits"),
        (parameters(a={"oneOf": [{"const": 3}, {"type": "string"}]}), "with limits"),
        (parameters(a={"enum": [1, "1"]}), "with limits"),
        (parameters(a={"type": "string", "enum": [1]}), "no value fits"),
        (parameters(a={"type": "string", "enum": 5}), "no value fits"),
        (parameters(a={"type": "string", "const": 5}), "no value fits"),
        ({"required": [{"a": 1}]}, "a list of names"),
        ({"$ref": "#/properties/a"}, "reference outside"),
        ({**parameters(a={"$ref": "#/$defs/a", "maxLength": 3}), "$defs": {"a": {}}},
            "beside \\$ref"),
        ({**parameters(a={"$ref": "#/$defs/a"}),
            "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": 5}]}}}, "too many"),
        ({**parameters(a={"$ref": "#/$defs/0"}), "$defs": {f"{n}": {"anyOf": 9 *
            [{"$ref": f"#/$defs/{n + 1}"}]} for n in range(15)} | {"15": {"type": "string"}}},
            "too many alternatives"),
        (parameters(a={"type": "string", "format": "date"}), "format that is not supported"),
        (parameters(a={"type": "string", "pattern": "^a|b$"}), "pattern that is not supported"),
    ],
    ids=str,
)  # fmt: skip
def test_a_schema_that_plain_text_cannot_promise_is_refused(
    schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        QWEN3_CODER.grammar([Tool("f", schema, strict=True)], 1, lambda _: None)


@pytest.mark.parametrize(
    "schema",
    [
        {**parameters(**{f"p{n}": {"$ref": "#/$defs/a"} for n in range(5_000)}),
         "$defs": {"a": {"enum": list(range(1_000))}}},
        {"properties": {f"p{n}": {"type": "string"} for n in range(30_000)}, "required":
            [f"p{n}" for n in range(30_000)]},
        parameters(a={"type": "string", "pattern": "[" * 1_000_000}),
    ],
    ids=["references", "names", "pattern"],
)  # fmt: skip
def test_a_grammar_that_would_be_too_large_is_not_written(schema: dict[str, Any]) -> None:
    """Not of many times the size of the request, and not for minutes on the event loop's thread."""
    grammar = QWEN3_CODER.grammar([Tool("f", schema)] * 100, 1, lambda _: None)
    assert MAX_GRAMMAR_CHARS < len(grammar) < 3_000_000


def test_values_that_are_plain_text_follow_their_schemas(tiny: Any) -> None:
    """Whatever a random model writes, what is read from it is what its schema says."""
    checks: dict[str, tuple[dict[str, Any], Any]] = {
        "code": ({"type": "string", "maxLength": 20}, lambda v: len(v) <= 20),
        "word": ({"type": "string", "pattern": "[a/]b$"}, lambda v: v[-2:] in ("ab", "/b")),
        "maybe": ({"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]}, lambda _: 1),
        "flag": ({"type": "boolean"}, lambda v: v in (True, False)),
        "few": ({"type": "integer", "minimum": 3, "maximum": 12}, lambda v: 3 <= v <= 12),
        "list": ({"type": "array", "items": {"enum": ["</parameter>", "b"]}, "minItems": 1,
                  "maxItems": 2}, lambda v: v[0] in ("</parameter>", "b")),
        "one": ({"enum": ["x\n", "\ny", ""]}, lambda v: v in ("x\n", "\ny", "")),
        "what": ({"const": 5}, lambda v: v == 5),
    }  # fmt: skip
    served = Local(tiny, chat_template=HERMES, tool_call_parser="qwen3_coder").start()
    try:
        with served.client() as client:
            for name, (schema, is_right) in checks.items():
                for choice in ask(client, tools=[tool(**{name: schema})], n=2, max_tokens=60):
                    if choice["finish_reason"] != "length":
                        read = json.loads(functions(choice)[0]["arguments"])
                        assert is_right(read[name]), (name, read)
    finally:
        served.stop()


def test_marks_that_are_special_tokens_are_named_in_grammars() -> None:
    special = {"[TOOL_CALLS]": 5, "[ARGS]": 6, "[CALL_ID]": 7}
    tools = [Tool("f", {}), Tool("g", {})]
    text = MISTRAL_ARGS.grammar(tools, 2, special.get)
    assert "calls: <[5]> one (<[5]> one){0,1}" in text
    assert 'call_1: "g" (<[7]> /[a-zA-Z0-9]{9}/)? <[6]> arguments_1' in text
    plain = MISTRAL_ARGS.grammar(tools, 2, lambda _: None)
    assert 'call_1: "g"  "[ARGS]" arguments_1' in plain
