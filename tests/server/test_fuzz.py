"""Requests made from /openapi.json, and broken ones: none is answered with a failure of ours."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from server.running import Local

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
MAX_NEW = 3
MAX_SEQUENCES = 2


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
        body.pop("tools", None)
        if body.get("max_tokens") is None:
            body["max_tokens"] = MAX_NEW
    if body.get("stream") is not True:
        body.pop("stream_options", None)
    if body.get("logprobs") is not True:
        body.pop("top_logprobs", None)
    body.pop("best_of", None)


@pytest.mark.parametrize(
    ("method", "path", "mode", "num_examples"),
    [
        ("POST", "/v1/chat/completions", GenerationMode.POSITIVE, 40),
        ("POST", "/v1/chat/completions", GenerationMode.NEGATIVE, 40),
        ("POST", "/v1/completions", GenerationMode.POSITIVE, 40),
        ("POST", "/v1/completions", GenerationMode.NEGATIVE, 40),
        ("GET", "/v1/models/{name}", GenerationMode.POSITIVE, 10),
    ],
    ids=str,
)
def test_no_request_is_a_failure(
    server: Local, method: str, path: str, mode: GenerationMode, num_examples: int
) -> None:
    statuses = set()

    @settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=SCHEMA[path][method].as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        shorten(case.body)
        response = case.call(base_url=server.url)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKED)

    send()
    with server.client() as client:
        client.check_serves()
    if method == "POST":
        assert 400 in statuses
        assert mode is GenerationMode.NEGATIVE or 200 in statuses
