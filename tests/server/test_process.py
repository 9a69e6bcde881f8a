"""The life of a server: listening before it has loaded, serving, finishing, gone."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server.running import TIMEOUT_SECONDS, Client, Local, wait_until

from penstock.errors import ConfigError
from penstock.server.listening import bind, url_of

LONG: dict[str, Any] = {"prompt": "Once", "max_tokens": 480, "temperature": 0}


def test_it_answers_while_it_loads(local: Callable[..., Local], tiny: Path) -> None:
    server = Local(tiny)
    server.may_load.clear()
    server.start(wait=False)
    try:
        with server.client() as client:
            assert client.get("/health").json() == {"status": "ok", "phase": "loading"}
            assert client.get("/metrics").status_code == 200
            for answer in (
                client.get("/ready"),
                client.get("/v1/models"),
                client.post("/v1/completions", content=b"not looked at"),
            ):
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) > 0
                assert answer.json()["error"]["code"] == "loading"
            server.may_load.set()
            wait_until(lambda: client.get("/ready").status_code == 200, "it loads")
            assert client.get("/health").json()["phase"] == "serving"
            client.check_serves()
    finally:
        server.may_load.set()
        server.stop()
    assert server.told[:2] == ["starting the engine", f"loading {tiny}"]


def test_stopped_while_it_loads(tiny: Path) -> None:
    server = Local(tiny)
    server.may_load.clear()
    server.start(wait=False)
    with server.client() as client:
        assert client.get("/health").status_code == 200
    server.stop()  # does not wait for the loader
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)
    server.may_load.set()  # which then finds that nobody wants what it has loaded
    wait_until(lambda: "penstock-load" not in {t.name for t in threading.enumerate()}, "it loads")
    wait_until(lambda: "penstock-engine" not in {t.name for t in threading.enumerate()}, "it ends")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"device_kv_gib": 1e-6}, "less than one block"),
        ({"device_kv_gib": 1e6}, "does not fit"),
    ],
    ids=str,
)
def test_a_load_that_fails_ends_it(tiny: Path, options: dict[str, Any], words: str) -> None:
    server = Local(tiny, **options)
    server.start(wait=False)
    server.join()
    assert isinstance(server.failure, ConfigError)
    assert words in str(server.failure)
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


def test_a_model_without_a_tokenizer_is_refused(tiny: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (bare / name).write_bytes((tiny / name).read_bytes())
    server = Local(bare)
    server.start(wait=False)
    server.join()
    assert "has no tokenizer" in str(server.failure)


def _stream(client: Client, **body: Any) -> Any:
    return client.stream("POST", "/v1/completions", json={**LONG, "stream": True, **body})


def test_what_runs_may_finish_and_nothing_new_begins(local: Callable[..., Local]) -> None:
    server = local(grace_seconds=TIMEOUT_SECONDS).slow_down()
    body = {"max_tokens": 60}
    with server.client() as client, server.client() as other, _stream(client, **body) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        server.process.stop()
        wait_until(lambda: other.get("/ready").status_code == 503, "it begins to stop")
        assert other.get("/ready").json()["error"]["code"] == "stopping"
        assert other.get("/health").json() == {"status": "ok", "phase": "stopping"}
        refused = other.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        *_, last, done = lines
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert done == "data: [DONE]"
    server.join()
    assert server.failure is None


def test_after_the_grace_what_runs_is_told_and_cut(local: Callable[..., Local]) -> None:
    server = local(grace_seconds=0.0).slow_down()
    with server.client() as client, _stream(client) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        server.stop()
        *_, last = lines
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopped"


def test_the_official_client_raises_what_a_cut_stream_says(local: Callable[..., Local]) -> None:
    server = local(grace_seconds=0.0).slow_down()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as ai:
        stream = ai.completions.create(
            model="tiny", prompt="Once", max_tokens=480, n=4, stream=True
        )
        next(stream)
        server.process.stop()
        with pytest.raises(openai.APIError, match="stopped"):
            list(stream)


def test_an_upload_that_never_ends_does_not_keep_it(local: Callable[..., Local]) -> None:
    server = local()
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), TIMEOUT_SECONDS) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        with server.client() as client:
            client.check_serves()
        server.stop()
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 503")


def test_an_engine_that_dies_is_said_and_does_not_hang(local: Callable[..., Local]) -> None:
    server = local().slow_down()
    assert server.serving is not None
    engine = server.serving.service.engine

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a secret prompt")

    with server.client() as client, server.client() as other, _stream(client) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        engine.step = fail  # type: ignore[method-assign, assignment]
        *_, last = lines
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        wait_until(lambda: _has_failed(other), "it notices")
    server.join()  # whoever supervises the process starts another


def _has_failed(client: Client) -> bool:
    """It says so for as long as it is there."""
    try:
        answer = client.get("/health")
    except httpx.TransportError:
        return True
    return answer.status_code == 503 and answer.json()["error"]["code"] == "failed"


def test_a_failure_of_ours_is_an_envelope_and_keeps_prompts_out_of_the_log(
    local: Callable[..., Local], caplog: pytest.LogCaptureFixture
) -> None:
    server = local()
    assert server.serving is not None

    async def fail(text: str, **_: object) -> list[int]:
        raise RuntimeError(text)

    with server.client() as client:
        server.serving.prompts.encode = fail  # type: ignore[method-assign]
        headers = {"X-Request-Id": "the-one"}
        answer = client.post("/v1/completions", json={"prompt": "my secret"}, headers=headers)
        assert answer.status_code == 500
        assert answer.headers["x-request-id"] == "the-one"
        assert answer.json()["error"]["code"] == "internal"
        assert "secret" not in answer.text
    (record,) = caplog.records
    assert "request the-one failed with RuntimeError at" in record.getMessage()
    assert "secret" not in caplog.text
    caplog.clear()


# The port.


def test_a_port_that_is_taken() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1: another process"):
            bind("127.0.0.1", port)
    bind("127.0.0.1", port).close()


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("203.0.113.1", 0, "Cannot assign requested address"),
        ("no.such.host.invalid", 0, "has no address"),
        ("127.0.0.1", 70000, "port 70000"),
    ],
)
def test_an_address_that_cannot_be_had(host: str, port: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bind(host, port)


def test_urls() -> None:
    with bind("localhost", 0) as listener:
        assert url_of(listener).startswith(("http://127.0.0.1:", "http://[::1]:"))
