"""Requests made from /openapi.json, and broken ones: none is answered with a failure of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from server.running import TIMEOUT_SECONDS, Local
from server.test_tools import HERMES

from penstock.errors import ConfigError
from penstock.metrics import Metrics
from penstock.server.app import AppSettings, make_app
from penstock.server.backend import Backend
from penstock.server.tools.calls import CallDelta, CallParser
from penstock.server.tools.formats import QWEN3_CODER
from penstock.server.tools.tool import Tool

load_all_checks()
CHECKED = CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    ]
)
SCHEMA = schemathesis.openapi.from_dict(make_app(Backend(Metrics()), AppSettings()).openapi())
KNOWN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
}
JSON = "application/json"
SETTINGS = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
MAX_NEW = 3
MAX_SEQUENCES = 2


STRUCTURES = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
NAMES = st.sampled_from(["a", "b", "$ref", "x-guidance", "\u00e9", "</tool_call>"])
LEAVES = st.sampled_from([None, True, 0, -1, 2.5, 1e300, "a", "^a*$", "(", "#/$defs/a", "string"])
# Keywords that belong together are drawn together more often than chance alone would.
SCHEMAS = st.recursive(
    st.sampled_from(["string", "integer", "number", "boolean", "null", "object"]).map(
        lambda kind: {"type": kind}
    )
    | st.builds(lambda values: {"enum": values}, st.lists(LEAVES, max_size=3))
    | st.just({"$ref": "#/$defs/a"})
    | st.dictionaries(
        st.sampled_from(["type", "pattern", "maxLength", "minimum", "multipleOf", "required"]),
        LEAVES,
        max_size=2,
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array"]),
            "properties": st.dictionaries(NAMES, inner, max_size=2),
            "required": st.lists(NAMES, max_size=2),
            "additionalProperties": inner | st.booleans(),
            "items": inner,
            "anyOf": st.lists(inner, max_size=2),
            "$defs": st.dictionaries(NAMES, inner, max_size=2),
        },
    ),
    max_leaves=6,
)
EXPRESSIONS = st.text("ab(|)*+?[]{}^$\\.0,9-", max_size=12)
STRUCTURED = st.one_of(
    SCHEMAS.map(lambda schema: {"guided_json": schema}),
    st.builds(
        lambda schema, strict: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema, "strict": strict},
            }
        },
        SCHEMAS,
        st.booleans(),
    ),
    EXPRESSIONS.map(lambda text: {"structured_outputs": {"regex": text}}),
    st.text('ab: |"/\n()<>%=', max_size=12).map(lambda text: {"guided_grammar": f"start: {text}"}),
)
TOOLS = st.builds(
    lambda schema, strict, choice, parallel: {
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": each, "strict": strict}}
            for name, each in zip(("f", "g"), (schema, {}), strict=True)
        ],
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
    },
    SCHEMAS,
    st.booleans(),
    st.sampled_from(
        ["auto", "required", "none", {"type": "function", "function": {"name": "g"}}, {"name": "f"}]
    ),
    st.none() | st.booleans(),
)


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Local]:
    """Its model has tools."""
    made = Local(tiny, chat_template=HERMES).start()
    yield made
    made.stop()


def shorten(body: Any) -> None:
    """Ask for little, of the model that is there, and for nothing that only goes with another."""
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    for name, most in (("max_tokens", MAX_NEW), ("n", MAX_SEQUENCES)):
        if isinstance(body.get(name), int):
            body[name] = min(body[name], most)
    if "messages" in body:
        body.pop("max_completion_tokens", None)
        if body.get("max_tokens") is None:
            body["max_tokens"] = MAX_NEW
    if body.get("stream") is not True:
        body.pop("stream_options", None)
    if body.get("logprobs") is not True:
        body.pop("top_logprobs", None)
    for name in [name for name in STRUCTURES if body.get(name) is not None][1:]:
        del body[name]  # two are refused
    body.pop("best_of", None)


@pytest.mark.parametrize(
    ("method", "path", "mode", "num_examples"),
    [
        ("POST", "/v1/chat/completions", GenerationMode.POSITIVE, 40),
        ("POST", "/v1/chat/completions", GenerationMode.NEGATIVE, 40),
        ("POST", "/v1/completions", GenerationMode.POSITIVE, 40),
        ("POST", "/v1/completions", GenerationMode.NEGATIVE, 40),
        ("POST", "/tokenize", GenerationMode.POSITIVE, 20),
        ("POST", "/tokenize", GenerationMode.NEGATIVE, 20),
        ("POST", "/detokenize", GenerationMode.POSITIVE, 20),
        ("GET", "/v1/models/{name}", GenerationMode.POSITIVE, 10),
    ],
    ids=str,
)
def test_no_request_is_a_failure(
    server: Local, method: str, path: str, mode: GenerationMode, num_examples: int
) -> None:
    """What chance brings is not asserted: hypothesis also draws constants that it finds in the
    modules of this process, so that even derandomized examples depend on which tests run in it."""
    operation = SCHEMA[path][method]
    statuses = set()

    @settings(SETTINGS, max_examples=num_examples)
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        shorten(case.body)
        statuses.add(check(case, server))

    send()
    assert statuses
    if body := KNOWN.get(path):
        assert check(operation.Case(body={**body, "max_tokens": 1}, media_type=JSON), server) == 200
        wrong = {**body, "temperature": "hot"}
        assert check(operation.Case(body=wrong, media_type=JSON), server) == 400
    with server.client() as client:
        client.check_serves()


def test_no_structure_is_a_failure(server: Local) -> None:
    """Schemas, expressions and grammars that mean something, beside tools."""
    statuses = set()

    @settings(SETTINGS, max_examples=40)
    @given(
        structured=st.just({}) | STRUCTURED,
        tools=st.just({}) | TOOLS,
        others=st.fixed_dictionaries(
            {}, optional={"stream": st.just(True), "n": st.just(2), "logprobs": st.just(True)}
        ),
    )
    def send(**given: dict[str, Any]) -> None:
        path = "/v1/chat/completions"
        body = {**KNOWN[path], "max_tokens": MAX_NEW}
        for fields in given.values():
            body |= fields
        statuses.add(check(SCHEMA[path]["POST"].Case(body=body, media_type=JSON), server))

    send()
    assert {200, 400} <= statuses
    with server.client() as client:
        client.check_serves()
        client.wait_idle()


KEYWORDS = st.dictionaries(
    st.sampled_from(
        ["type", "enum", "const", "required", "properties", "anyOf", "$ref", "$defs", "pattern",
         "minLength", "maxLength", "additionalProperties"]
    ),
    LEAVES | SCHEMAS | st.lists(LEAVES | SCHEMAS, max_size=2),
    max_size=4,
)  # fmt: skip


@settings(SETTINGS, max_examples=300)
@given(
    schema=KEYWORDS | st.builds(lambda a, rest: {"properties": {"a": a}} | rest, KEYWORDS, KEYWORDS)
)
def test_any_parameters_are_followed_or_refused_in_plain_text(schema: dict[str, Any]) -> None:
    """Their grammar is written before the request is queued, where a failure is one of ours."""
    tool = Tool("f", schema, strict=len(schema) % 2 == 0)
    with suppress(ConfigError):
        QWEN3_CODER.grammar([tool], 1, lambda _: None)
    told = CallParser(QWEN3_CODER, [tool]).feed(
        "<tool_call><function=f><parameter=a>5</parameter></function></tool_call>"
    )
    read = json.loads("".join(each.arguments for each in told if isinstance(each, CallDelta)))
    assert read in ({"a": 5}, {"a": "5"})


def check(case: Case, server: Local) -> int:
    response = case.call(base_url=server.url, timeout=TIMEOUT_SECONDS)
    case.validate_response(response, checks=CHECKED)
    return response.status_code
