"""Requests made from /openapi.json, and broken ones: none is answered with a failure of ours."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from server.running import TIMEOUT_SECONDS, Local

from penstock.metrics import Metrics
from penstock.server.app import AppSettings, make_app
from penstock.server.backend import Backend

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
MAX_NEW = 3
MAX_SEQUENCES = 2


STRUCTURES = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


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
        for name in ("tools", "tool_choice"):  # the model's template has none
            body.pop(name, None)
        if body.get("max_tokens") is None:
            body["max_tokens"] = MAX_NEW
    if body.get("stream") is not True:
        body.pop("stream_options", None)
    if body.get("logprobs") is not True:
        body.pop("top_logprobs", None)
    for name in ("best_of", *STRUCTURES):  # schemas and expressions that mean something
        body.pop(name, None)


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

    @settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        statuses.add(check(case))

    def check(case: Case) -> int:
        shorten(case.body)
        response = case.call(base_url=server.url, timeout=TIMEOUT_SECONDS)
        case.validate_response(response, checks=CHECKED)
        return response.status_code

    send()
    assert statuses
    if body := KNOWN.get(path):
        assert check(operation.Case(body=dict(body), media_type="application/json")) == 200
        wrong = {**body, "temperature": "hot"}
        assert check(operation.Case(body=wrong, media_type="application/json")) == 400
    with server.client() as client:
        client.check_serves()
