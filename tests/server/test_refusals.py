"""Whatever is sent: OpenAI's envelope, a status that fits, and a server that goes on."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.running import MAX_TOKENS, Client, Local, wait_until

from penstock.server.app import AppSettings

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def _still_serves(client: Client) -> Any:
    yield
    client.check_serves()


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    assert error["type"] == kinds.get(status, "invalid_request_error")
    assert error["message"]
    return error


def refuse(client: Client, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    given = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    return error_of(client.post(path, json={**given, "max_tokens": 1, **body}), 400)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',  # a surrogate in UTF-8
        rb'{"prompt": "\ud800"}',
        rb'{"prompt": "\udc00 \ud800"}',
        rb'{"prompt": ["fine", "\ud800"]}',
        rb'{"prompt": "fine", "user": "\ud800"}',
        b'{"prompt": "fine", "temperature": NaN}',
        b'{"prompt": "fine", "temperature": Infinity}',
        b'{"prompt": "fine", "temperature": 1e999}',
        b'{"prompt": "fine", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "fine", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b"[" * 100_000,
        b"[]",
        b"null",
        b'"prompt"',
        b"7",
        b"{}",
    ],
    ids=lambda content: repr(content[:30]),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bodies_that_are_no_request(client: Client, path: str, content: bytes) -> None:
    error_of(client.post(path, content=content, headers=JSON), 400)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 100, "prompt": ["a", "b"]}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": MAX_TOKENS}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"penstock": {"sesion": "a"}}, "penstock.sesion"),
        ({"kv_residency": {"never": True}}, "kv_residency.never"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"priority": 1.5}, "priority"),
        ({"user": 5}, "user"),
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"model": 5}, "model"),
    ],
    ids=str,
)
def test_fields_that_are_wrong_are_named(client: Client, body: dict[str, Any], param: str) -> None:
    assert refuse(client, **body)["param"] == param


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "Hello"}, "messages", "array"),
        ({"messages": ["Hello"]}, "messages[0]", "object"),
        ({"messages": [{"content": "Hello"}]}, "messages[0].role", "missing"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
            "text only",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function",
            "missing",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"response_format": {"type": "image"}}, "response_format.type", "text only"),
        ({"modalities": ["audio"]}, "modalities[0]", "text only"),
        ({"audio": {"voice": "x"}}, "audio", "not supported"),
        ({"web_search_options": {"a": 1}}, "web_search_options", "not supported"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "requires logprobs=true"),
        ({"logprobs": 2}, "logprobs", "boolean"),
        ({"max_completion_tokens": 2}, "max_tokens", "differ"),
        ({"min_tokens": 3}, None, "max_tokens"),
        ({"messages": HELLO * 16385}, "messages", "at most 16384"),
        ({"chat_template": "{{ messages }}"}, "chat_template", "not supported"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "is reserved"),
        ({"chat_template_kwargs": ["x"]}, "chat_template_kwargs", "object"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "both true",
        ),
        ({"continue_final_message": True}, "continue_final_message", "not the assistant's"),
    ],
    ids=str,
)
def test_wrong_chats_are_explained(
    client: Client, body: dict[str, Any], param: str | None, words: str
) -> None:
    error = refuse(client, CHAT, **body)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"messages": [*HELLO, {"role": "tool", "tool_call_id": "a", "content": "x"}]},
        {"response_format": {"type": "text"}, "modalities": ["text"], "tools": [], "audio": None},
        {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "logit_bias": {}},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}]},
        {"messages": [*HELLO, {"role": "assistant", "content": None, "refusal": None}, *HELLO]},
        {"max_completion_tokens": 1},
        {"n": None, "temperature": None, "stop": None, "stream_options": None},
        {"user": "x" * 1000, "prompt_cache_key": "x" * 1000},
        {"guided_json": None, "use_beam_search": False, "bad_words": [], "echo": False},
        {"messages": [{"role": "user", "content": "x", "contnet": "x", "id": {"a": [1]}}]},
        {"stream_options": {"usage": 1}, "stream": True},
    ],
    ids=str,
)
def test_what_can_be_honoured_or_changes_nothing_is_accepted(
    client: Client, body: dict[str, Any]
) -> None:
    answer = client.post(CHAT, json={"messages": HELLO, "max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("prompt", ["", [""], ["fine", ""]], ids=str)
def test_an_empty_prompt(client: Client, prompt: Any) -> None:
    error = refuse(client, prompt=prompt)
    assert "empty" in error["message"]


def test_a_prompt_longer_than_the_model(client: Client) -> None:
    error = refuse(client, prompt=[100] * 2 * MAX_TOKENS)
    assert error["code"] == "context_length_exceeded"
    # As OpenAI says it: clients look for these words, and for the numbers in their places.
    assert error["message"].startswith(
        f"This model's maximum context length is {MAX_TOKENS} tokens. However, you requested "
        f"{2 * MAX_TOKENS + 1} tokens ({2 * MAX_TOKENS} in the prompt, "
    )


def test_a_prompt_longer_than_is_worth_reading(client: Client) -> None:
    error = refuse(client, prompt="word " * 2_000_000)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        f"This model's maximum context length is {MAX_TOKENS} tokens. However, "
    )
    assert "10000000 characters" in error["message"]


def test_token_ids_that_the_model_does_not_have(client: Client) -> None:
    assert "49151" in refuse(client, prompt=[10**6])["message"]
    assert "49151" in refuse(client, logit_bias={"49152": 1})["message"]
    error = error_of(client.post("/detokenize", json={"tokens": [49152]}), 400)
    assert (error["param"], "49151" in error["message"]) == ("tokens", True)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_another_model(client: Client, path: str) -> None:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    error = error_of(client.post(path, json={**body, "model": "gpt-5"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "expected tiny" in error["message"]
    assert error_of(client.get("/v1/models/a/b"), 404)["code"] == "model_not_found"
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_another_content_type(client: Client, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    error_of(client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers), 415)


def test_content_types_with_parameters(client: Client) -> None:
    headers = {"Content-Type": "application/JSON; charset=utf-8"}
    content = b'{"prompt": "a", "max_tokens": 1}'
    assert client.post(COMPLETIONS, content=content, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/%ff%00", 404),
        ("GET", CHAT, 405),
        ("DELETE", COMPLETIONS, 405),
        ("POST", "/health", 405),
        ("OPTIONS", CHAT, 405),
    ],
)
def test_paths_and_methods_that_are_not_there(
    client: Client, method: str, path: str, status: int
) -> None:
    response = client.request(method, path)
    error_of(response, status)
    assert ("allow" in response.headers) == (status == 405)


def test_a_template_that_refuses(local: Callable[..., Local]) -> None:
    server = local()
    assert server.serving is not None
    tokenizer = server.serving.prompts._tokenizer
    with server.client() as client:
        for template, words in (
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages[99].content.x }}", "rejects these messages"),
            ("{% for", "rejects these messages"),
            (None, "no chat template"),
        ):
            tokenizer.chat_template = template
            assert words in refuse(client, CHAT)["message"]
        client.check_serves()


# The size of a body.


@pytest.fixture(scope="module")
def small(tiny: Path) -> Iterator[Client]:
    server = Local(tiny, settings=AppSettings(max_body_bytes=4096)).start()
    with server.client() as client:
        yield client
    server.stop()


@pytest.mark.parametrize("num_bytes", [4097, 8000, 8193, 1_000_000])
def test_a_body_that_is_too_large(small: Client, num_bytes: int) -> None:
    body = json.dumps({"prompt": "x"}).ljust(num_bytes).encode()
    try:
        error_of(small.post(COMPLETIONS, content=body, headers=JSON), 413)
    except (httpx.ReadError, httpx.WriteError):
        assert num_bytes > 8192  # cut off in the middle of far too much
    small.check_serves()


def test_a_body_of_unknown_size_is_bounded_while_it_is_read(small: Client) -> None:
    num_sent = 0

    def chunks() -> Any:
        nonlocal num_sent
        for _ in range(6):
            num_sent += 1
            yield b" " * 1000

    error_of(small.post(COMPLETIONS, content=chunks(), headers=JSON), 413)
    assert num_sent == 6
    small.check_serves()


def test_a_body_of_just_the_size(small: Client) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).ljust(4096).encode()
    assert small.post(COMPLETIONS, content=body, headers=JSON).status_code == 200


@pytest.mark.parametrize(
    "declared", [b"Content-Length: 50", b"Transfer-Encoding: chunked"], ids=["length", "chunked"]
)
def test_a_body_that_ends_early(
    server: Local, declared: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.server")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\n"
        connection.sendall(head + declared + b'\r\n\r\n5\r\n{"pro')
    wait_until(
        lambda: any("POST /v1/completions 400" in line for line in caplog.messages),
        "the request is refused",
    )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with server.client() as client:
        client.check_serves()


# The key, and ids.


def test_the_key(local: Callable[..., Local]) -> None:
    server = local(settings=AppSettings(api_key="s3cret-é"))
    wrong = [{}, *({"Authorization": value} for value in ("Bearer s3cret", "s3cret-é", "Basic x"))]
    wrong.append({"Authorization": "Bearer s3cret-é2"})
    with server.client() as client:
        for headers in wrong:
            encoded = {name: value.encode() for name, value in headers.items()}
            posts = (CHAT, COMPLETIONS, "/tokenize", "/detokenize")
            for method, path in (("GET", "/v1/models"), *(("POST", path) for path in posts)):
                response = client.request(method, path, headers=encoded, content=b"{}")
                assert error_of(response, 401)["code"] == "invalid_api_key"
        for value in ("Bearer s3cret-é", "bearer  s3cret-é"):
            right = {"Authorization": value.encode()}
            assert client.get("/v1/models", headers=right).status_code == 200
        for path in ("/health", "/ready", "/ping", "/version", "/metrics", "/openapi.json"):
            assert client.get(path).status_code == 200


def test_request_ids(client: Client) -> None:
    given = client.get("/health", headers={"X-Request-Id": "a-b_c.1:2"})
    assert given.headers["x-request-id"] == "a-b_c.1:2"
    made = {client.get("/health").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    for strange in ("x" * 200, "a b", 'a"b', "<script>", "a\tb"):
        answer = client.get("/health", headers={"X-Request-Id": strange})
        assert answer.headers["x-request-id"].startswith("req-")
