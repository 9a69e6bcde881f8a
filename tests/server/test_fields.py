"""Every field of OpenAI's requests is known here, and docs/server.md says what becomes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from penstock.server.body import parse_body
from penstock.server.errors import ApiError
from penstock.server.schema import ChatRequest, CompletionRequest, Ignored, Refused

PAGE = Path(__file__).parent.parent.parent / "docs" / "server.md"
REQUESTS = [
    (ChatRequest, chat_create_params.CompletionCreateParamsStreaming),
    (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
]
# Some values of these change nothing, and are taken.
IN_PART = {"function_call", "modalities", "best_of"}


@pytest.mark.parametrize(("ours", "theirs"), REQUESTS, ids=["chat", "completions"])
def test_no_field_of_the_official_client_is_unknown(ours: Any, theirs: Any) -> None:
    assert set(get_type_hints(theirs)) <= set(ours.model_fields)


def documented(title: str) -> set[str]:
    (part,) = re.findall(rf"^### {title}\n(.*?)(?=^##)", PAGE.read_text(), re.M | re.S)
    return set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \|", part, re.M))))


def fields_of(kind: Any) -> set[str]:
    return {
        name
        for model in (ChatRequest, CompletionRequest)
        for name, field in model.model_fields.items()
        if _is(kind, field)
    }


def _is(kind: Any, field: Any) -> bool:
    marks = get_args(kind)[1:]
    if kind is Ignored:
        return bool(field.description == marks[0].description)
    return marks[0] in field.metadata


def test_the_page_says_what_becomes_of_each_field() -> None:
    supported = {  # by one of the two at least: a chat has no echo
        name
        for model in (ChatRequest, CompletionRequest)
        for name, field in model.model_fields.items()
        if not (_is(Ignored, field) or _is(Refused, field))
    }
    assert documented("Ignored") == fields_of(Ignored)
    assert documented("Rejected") == fields_of(Refused)
    assert documented("Partly supported") == IN_PART
    assert documented("Supported") == supported - IN_PART


REFUSED = [
    (model, name)
    for model in (ChatRequest, CompletionRequest)
    for name, field in model.model_fields.items()
    if _is(Refused, field)
]


@pytest.mark.parametrize(("model", "name"), REFUSED, ids=lambda v: getattr(v, "__name__", v))
def test_a_field_that_would_change_the_answer_is_refused_unless_it_is_empty(
    model: Any, name: str
) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    for value in (True, 1, "x", [1], {"a": 1}):
        with pytest.raises(ApiError) as caught:
            parse_body(json.dumps({**body, name: value}).encode(), model)
        assert caught.value.status == 400
        assert caught.value.param == name
        assert caught.value.code == "unsupported_parameter"
        assert f"{name} is not supported by this server; leave it out." in str(caught.value)
    for empty in (None, False, "", [], {}):
        parse_body(json.dumps({**body, name: empty}).encode(), model)
