"""Every field of OpenAI's requests is known here, and docs/server.md says what becomes of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from penstock.server.schema import ChatRequest, CompletionRequest, Ignored, Refused

PAGE = Path(__file__).parent.parent.parent / "docs" / "server.md"
REQUESTS = [
    (ChatRequest, chat_create_params.CompletionCreateParamsStreaming),
    (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
]
# Some values of these change nothing, and are taken.
IN_PART = {"tools", "tool_choice", "function_call", "response_format", "modalities", "best_of"}


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
    every = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert documented("Ignored") == fields_of(Ignored)
    assert documented("Rejected") == fields_of(Refused)
    assert documented("Partly supported") == IN_PART
    assert documented("Supported") == every - fields_of(Ignored) - fields_of(Refused) - IN_PART
