"""Tools and structured answers, with the official client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from server.running import TIMEOUT_SECONDS, Local

from penstock.engine.grammar import Grammar

# As Qwen's and Hermes' templates write tools, calls and results.
HERMES = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
Answer with <tool_call> JSON </tool_call>.<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "maxLength": 12, "pattern": "^[a-z ]+$"},
                "days": {"$ref": "#/$defs/days"},
            },
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "time", "strict": True, "parameters": {
    "type": "object", "properties": {"zone": {"enum": ["CET", "UTC"]}}, "required": ["zone"],
    "additionalProperties": False}}}  # fmt: skip
QUESTION: Any = [{"role": "user", "content": "How is the weather?"}]
FORMATS = {
    "hermes": HERMES,
    "llama3_json": HERMES,
    "mistral": HERMES,
    "mistral_args": HERMES,
    "qwen3_coder": HERMES,
}


class Person(BaseModel):
    model_config = {"extra": "forbid"}

    name: str = Field(max_length=10)
    age: int = Field(ge=0, le=120)
    kind: Literal["a", "b"]


@pytest.fixture(scope="module", params=list(FORMATS))
def server(request: pytest.FixtureRequest, tiny: Any) -> Iterator[Local]:
    made = Local(tiny, chat_template=HERMES, tool_call_parser=request.param).start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def hermes(tiny: Any) -> Iterator[Local]:
    """Its format is found in its template."""
    made = Local(tiny, chat_template=HERMES).start()
    yield made
    made.stop()


def official(server: Local) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=TIMEOUT_SECONDS
    )


def check_call(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert set(arguments) == {"place", "days"}
        assert 1 <= arguments["days"] <= 9
    else:
        assert call.function.name == "time"
        assert arguments["zone"] in ("CET", "UTC")


def test_calls_that_are_required_follow_their_schemas(server: Local) -> None:
    with official(server) as ai:
        answer = ai.chat.completions.create(
            model="tiny", messages=QUESTION, tools=[WEATHER, TIME], tool_choice="required",
            parallel_tool_calls=False, n=3, seed=1, max_tokens=100, logprobs=True,
        )  # fmt: skip
        for choice in answer.choices:
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            assert choice.message.tool_calls is not None
            (call,) = choice.message.tool_calls
            check_call(call)
        assert (
            len({c.message.tool_calls[0].id for c in answer.choices if c.message.tool_calls}) == 3
        )

        again: list[Any] = [*QUESTION, answer.choices[0].message.model_dump(exclude_none=True)]
        result = {"role": "tool", "tool_call_id": call.id, "content": "Rain"}
        after = ai.chat.completions.create(
            model="tiny", messages=[*again, result], tools=[WEATHER, TIME], max_tokens=4,
            tool_choice="none",
        )  # fmt: skip
        assert after.choices[0].message.tool_calls is None


def test_calls_are_streamed(server: Local) -> None:
    with official(server) as ai:
        asked: Any = {
            "model": "tiny", "messages": QUESTION, "tools": [WEATHER, TIME], "max_tokens": 120,
            "tool_choice": "required", "seed": 5, "temperature": 0.7, "parallel_tool_calls": False,
        }  # fmt: skip
        whole = ai.chat.completions.create(**asked).choices[0]
        with ai.chat.completions.stream(**asked) as stream:
            done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
            final = stream.get_final_completion().choices[0]
        assert whole.message.tool_calls
        assert final.message.tool_calls
        assert len(done) == len(final.message.tool_calls)
        for one, other in zip(whole.message.tool_calls, final.message.tool_calls, strict=True):
            assert one.function.name == other.function.name
            assert one.function.arguments == other.function.arguments
        assert final.finish_reason == whole.finish_reason


def test_a_named_tool_is_called_once(server: Local) -> None:
    with official(server) as ai:
        choice = ai.chat.completions.create(
            model="tiny", messages=QUESTION, tools=[WEATHER, TIME], max_tokens=100,
            tool_choice={"type": "function", "function": {"name": "time"}},
        ).choices[0]  # fmt: skip
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.function.name == "time"
    check_call(call)
    assert choice.finish_reason == "stop"


def test_an_answer_follows_a_pydantic_model(hermes: Local) -> None:
    with official(hermes) as ai:
        parsed = ai.chat.completions.parse(
            model="tiny", messages=QUESTION, response_format=Person, seed=3, max_tokens=100
        )
        assert isinstance(parsed.choices[0].message.parsed, Person)
        tools = [openai.pydantic_function_tool(Person)]
        choice = ai.chat.completions.parse(
            model="tiny", messages=QUESTION, tools=tools, tool_choice="required", max_tokens=200,
            parallel_tool_calls=False,
        ).choices[0]  # fmt: skip
        assert choice.message.tool_calls is not None
        assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Person)


def test_vllms_words_for_the_structure(hermes: Local) -> None:
    with hermes.client() as client:
        for fields, is_right in (
            ({"guided_choice": ["red", "blue"]}, lambda text: text in ("red", "blue")),
            ({"guided_regex": "[0-9]{3}"}, lambda text: text.isdecimal() and len(text) == 3),
            ({"structured_outputs": {"json": True, "regex": None}}, lambda _: True),
            ({"structured_outputs": {"choice": ["x"]}}, lambda text: text == "x"),
            ({"guided_grammar": 'root ::= "y" | "n"'}, lambda text: text in "yn"),
            ({"guided_json": '{"type": "boolean"}'}, lambda text: text in ("true", "false")),
        ):
            answer = client.post("/v1/completions", json={"prompt": "x", "seed": 1, **fields})
            assert answer.status_code == 200, answer.text
            assert is_right(answer.json()["choices"][0]["text"]), answer.text


def test_text_is_answered_beside_tools_and_a_schema(hermes: Local) -> None:
    with official(hermes) as ai:
        for seed in range(3):
            choice = ai.chat.completions.parse(
                model="tiny", messages=QUESTION, response_format=Person, seed=seed, max_tokens=200,
                tools=[TIME], parallel_tool_calls=False,
            ).choices[0]  # fmt: skip
            if choice.message.tool_calls:
                check_call(choice.message.tool_calls[0])
            else:
                assert isinstance(choice.message.parsed, Person)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "need each other"),
        ({"response_format": {"type": "xml"}}, "json_schema"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "exactly one"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "given together"),
        ({"guided_regex": "("}, "regular expression"),
        ({"guided_regex": "(" * 5000}, "regular expression"),
        ({"guided_grammar": "start: start"}, "grammar"),
        ({"guided_json": {"type": "strange"}}, "Invalid type"),
        ({"guided_json": {"not": {}}}, "Unimplemented"),
        ({"guided_json": {"$ref": "http://example.com/schema"}}, "JSON schema"),
        ({"guided_json": json.loads('{"items":' * 190 + "{}" + "}" * 190)}, "JSON schema"),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "262144"),
        ({"guided_json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"enum": [1]}}}
            for j in range(4)]} for i in range(10)]}}, "too large"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "one of the tools"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": [{"type": "function"}]}, "missing"),
        ({"tools": [{"type": "web_search"}]}, "not supported"),
        ({"tools": [WEATHER], "guided_regex": "a"}, "together"),
    ],
    ids=lambda given: str(given)[:60],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(
    hermes: Local, fields: dict[str, Any], words: str
) -> None:
    with hermes.client() as client:
        body = {"messages": QUESTION, "max_tokens": 4, **fields}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] is not None
        client.check_serves()


def test_hostile_structures_end_with_an_answer(hermes: Local) -> None:
    nested = {"$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}},
              "required": ["c"], "additionalProperties": False}}, "$ref": "#/$defs/n"}  # fmt: skip
    with hermes.client() as client:
        for fields in (
            {"guided_json": nested},
            {"guided_regex": "(((a{1,999}){1,999}){1,999}b)*c"},
            {"guided_regex": "(.*a){30}"},
            {"guided_json": {"type": "string", "pattern": "^(a+)+$"}},
            {"guided_json": {"enum": [f"x{n}" for n in range(5000)]}},
        ):
            body = {"prompt": "x", "max_tokens": 5, **fields}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code in (200, 400), answer.text
        client.check_serves()
        client.wait_idle()


def test_a_grammar_that_reaches_a_limit_ends_its_own_request(
    hermes: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Grammar.advance

    def break_at(grammar: Grammar, token_id: int) -> None:
        grammar._bits = bytes(1)  # as if nothing were allowed
        advance(grammar, token_id)

    with hermes.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(Grammar, "advance", break_at)
            body = {"prompt": "x", "max_tokens": 5, "guided_regex": "a+"}
            answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "structure_too_complex"
        client.check_serves()
        client.wait_idle()


def test_too_many_schemas_at_once_are_refused_for_a_while(
    hermes: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hermes.serving is not None
    monkeypatch.setattr(hermes.serving.service.engine.grammars, "_num_compiling", 1 << 20)
    with hermes.client() as client:
        body = {"prompt": "x", "max_tokens": 1, "guided_regex": "a"}
        answer = client.post("/v1/completions", json=body)
        assert (answer.status_code, "Retry-After" in answer.headers) == (429, True)


def test_a_model_whose_template_has_no_tools_says_so(local: Callable[..., Local]) -> None:
    with local().client() as client:
        body = {"messages": QUESTION, "tools": [WEATHER]}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "chat template" in answer.json()["error"]["message"]
        ok = {**body, "tool_choice": "none", "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=ok).status_code == 200


def test_the_kv_of_a_structured_answer_is_the_same(hermes: Local) -> None:
    """Masks are applied at sampling only: a prompt's KV is shared with plain requests."""
    prompt = "The weather of the coming days will be as follows. " * 8
    with hermes.client() as client:
        plain = {"prompt": prompt, "max_tokens": 1}
        client.post("/v1/completions", json=plain)
        answer = client.post("/v1/completions", json={**plain, "guided_choice": ["rain"]})
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
