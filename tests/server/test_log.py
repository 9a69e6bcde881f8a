"""What the log says of requests: fields nobody knows, a line each, the throughput. No prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from server.running import Client, Local, wait_until

from penstock.server import throughput
from penstock.server.access import Access
from penstock.server.schema import ChatRequest, CompletionRequest
from penstock.server.throughput import ThroughputLog, throughput_line
from penstock.server.unknown_fields import UnknownFields
from penstock.watch.samples import Samples

HELLO = [{"role": "user", "content": "Hello"}]
# What vllm-router 0.1.16 makes of a request, field by field.
ROUTED_CHAT = {
    "model": "tiny",
    "messages": HELLO,
    "stream": False,
    "max_tokens": 3,
    "logprobs": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
}
ROUTED_COMPLETION = {
    "model": "tiny",
    "prompt": "Hello",
    "max_tokens": 3,
    "stream": False,
    "echo": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines of the server's log at info level, as they come."""
    caplog.set_level(logging.INFO, "penstock.server")
    return lambda: [record.getMessage() for record in caplog.records]


def lines(told: Callable[[], list[str]], words: str, num: int = 1) -> list[str]:
    def found() -> list[str]:
        return [line for line in told() if words in line]

    wait_until(lambda: len(found()) >= num, words)
    return found()


@pytest.mark.parametrize("body", [ROUTED_CHAT, ROUTED_COMPLETION], ids=["chat", "completion"])
def test_what_a_router_adds_is_no_fault(client: Client, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_a_field_nobody_knows_is_named_once(
    local: Callable[..., Local], told: Callable[[], list[str]]
) -> None:
    with local().client() as client:
        for _ in range(3):
            body = {"prompt": "x", "max_tokens": 1, "temprature": 0, "no_stop_trim": False}
            assert client.post("/v1/completions", json=body).status_code == 200
        chat = {"messages": [{**HELLO[0], "contnet": "x"}], "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        lines(told, "POST /v1/chat/completions")
    ignored = [line for line in told() if line.startswith("ignored unknown fields")]
    assert len(ignored) == 2
    assert "temprature (did you mean temperature?)" in ignored[0]
    assert "no_stop_trim" in ignored[0]
    assert "messages.contnet (did you mean content?)" in ignored[1]


def test_names_of_fields_neither_fill_the_log_nor_forge_it(told: Callable[[], list[str]]) -> None:
    noted = UnknownFields()
    forged = "x\nINFO penstock: all is well" + "y" * 500
    noted.note(CompletionRequest.model_validate({"prompt": "x", forged: 1}))
    (line,) = told()
    assert "\n" not in line
    assert len(line) < 200
    for number in range(1000):
        noted.note(ChatRequest.model_validate({"messages": HELLO, f"field {number}": 1}))
    assert len(told()) == 257
    assert told()[-1] == "256 unknown fields were named; others are ignored silently"
    many = {f"field {number}": 1 for number in range(100_000)}
    UnknownFields().note(CompletionRequest.model_validate({"prompt": "x", **many}))
    assert len(told()) == 259
    assert len(told()[-2]) < 10_000


def test_a_line_for_each_request(
    local: Callable[..., Local], told: Callable[[], list[str]]
) -> None:
    server = local()
    with server.client() as client:
        body = {"prompt": "secret words " * 20, "max_tokens": 4, "temperature": 0}
        headers = {"X-Request-Id": "one"}
        for _ in range(2):
            assert client.post("/v1/completions?q=hidden", json=body, headers=headers).is_success
        first, second = lines(told, "[one]", 2)
        usage = client.post("/v1/completions", json=body).json()["usage"]
        num_prompt = usage["prompt_tokens"]
        assert first.startswith(
            f"POST /v1/completions 200, {num_prompt} tokens in (0 cached), 4 out, "
        )
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert f"({cached} cached)" in second
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            request_id = stream.headers["x-request-id"]
            stream.read()
        (streamed,) = lines(told, f"[{request_id}]")
        assert ", 4 out, " in streamed
        assert client.post("/v1/completions", json={}, headers=headers).status_code == 400
        assert lines(told, "[one]", 3)[-1].startswith("POST /v1/completions 400, 0.")
        assert client.get("/v1/models").is_success
        lines(told, "GET /v1/models 200")
        client.get("/health")
        client.get("/metrics")
        server.slow_down()
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            next(stream.iter_lines())
    lines(told, "the client left")
    everything = "\n".join(told())
    for hidden in ("secret words", "hidden", "/health", "/metrics"):
        assert hidden not in everything


LONG = {"prompt": "Once", "max_tokens": 480, "ignore_eos": True}


def test_a_line_cannot_be_forged() -> None:
    access = Access({"method": "GET", "path": "/a\nINFO b" + "c" * 500}, "id")
    line = access.line(0.5)
    assert line.startswith("GET /a\\nINFO bccc")
    assert "\n" not in line
    assert line.endswith(" no answer, 0.500 s [id]")
    assert len(line) < 300


def test_the_throughput(
    monkeypatch: pytest.MonkeyPatch, tiny: Any, told: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(throughput, "EVERY_SECONDS", 0.05)
    monkeypatch.setattr(ThroughputLog.__init__, "__defaults__", (0.05,))
    server = Local(tiny).start()
    try:
        with server.client() as client:
            assert not [line for line in told() if line.startswith("throughput")]
            body = {"prompt": "One two three", "max_tokens": 20, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).is_success
            line = lines(told, "throughput: ")[0]
    finally:
        server.stop()
    assert "prompts " in line
    assert "answers " in line
    assert "device KV in use" in line


def test_how_the_throughput_is_counted() -> None:
    def labels(**given: str) -> frozenset[tuple[str, str]]:
        return frozenset(given.items())

    late = Samples(
        {
            ("penstock_prompt_tokens_total", labels(source="computed")): 100.0,
            ("penstock_prompt_tokens_total", labels(source="device")): 200.0,
            ("penstock_prompt_tokens_total", labels(source="loaded")): 100.0,
            ("penstock_sequences", labels(phase="running")): 3.0,
            ("penstock_sequences", labels(phase="waiting")): 2.0,
            ("penstock_sequences", labels(phase="loading")): 1.0,
            ("penstock_capacity_blocks", labels(tier="device")): 8.0,
            ("penstock_used_blocks", labels(tier="device")): 2.0,
        }
    )
    assert throughput_line(late, 50, 10.0) == (
        "throughput: prompts 10.0 tokens/s computed, answers 5.0 tokens/s, running 3, waiting 3, "
        "device KV in use 25.0%, prompt tokens from cache 75.0%"
    )
    assert throughput_line(Samples({}), 0, 10.0) is None


def test_without_readers_nothing_is_counted() -> None:
    async def start() -> None:
        made = ThroughputLog(None)  # type: ignore[arg-type]  # never looked at
        made.start()
        assert made._task is None
        await made.close()

    logging.getLogger("penstock.server").setLevel(logging.WARNING)
    try:
        asyncio.run(start())
    finally:
        logging.getLogger("penstock.server").setLevel(logging.NOTSET)
