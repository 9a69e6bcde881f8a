"""A step of the engine that fails: 500 for its requests, and the server serves the next."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server.running import Client, Local, Spawned, wait_until

from penstock.engine.runner import TorchRunner

BODY: dict[str, Any] = {
    "prompt": "One two three four five six seven",
    "max_tokens": 8,
    "temperature": 0,
    "logprobs": 3,
    "seed": 1,
}

BREAKS_AT_THE_THIRD_STEP = """
from penstock.engine.runner import TorchRunner

run, num_calls = TorchRunner.run, 0


def breaks(*given, **options):
    global num_calls
    num_calls += 1
    if num_calls > 2:
        raise RuntimeError("the device is gone")
    return run(*given, **options)


TorchRunner.run = breaks
"""


def ask(client: Client) -> dict[str, Any]:
    answer = client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_failed_step_is_a_500_and_the_next_request_is_served(
    local: Callable[..., Local], monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    fresh, server = local(), local()
    with fresh.client() as client:
        expected = ask(client)
    assert server.serving is not None
    engine = server.serving.service.engine
    with server.client() as client:
        run, num_calls = engine.runner.run, 0

        def breaks(*given: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 3:
                raise RuntimeError("injected")
            return run(*given)

        monkeypatch.setattr(engine.runner, "run", breaks)
        answer = client.post("/v1/completions", json={**BODY, "stream": is_streamed})
        assert "engine_fault" in answer.text
        assert "Retry the request" in answer.text
        assert is_streamed or answer.status_code == 500
        assert ask(client) == expected
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 200
        assert client.metric("penstock_engine_faults_total") == 1
        assert client.metric("penstock_requests_total", reason="error") == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_beyond_the_vocabulary_are_a_400(server: Local, path: str) -> None:
    body = {"min_tokens": 1, "max_tokens": 2, "stop_token_ids": [2_000_000_000]}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "Hello"}]  # type: ignore[assignment]
    else:
        body["prompt"] = "Hello"  # type: ignore[assignment]
    with server.client() as client:
        answer = client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert "stop_token_ids has token ids from 2000000000" in answer.text
        client.check_serves()
        assert client.metric("penstock_engine_faults_total") == 0


def test_an_engine_that_cannot_recover_ends_the_server(
    local: Callable[..., Local], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = local()

    def gone(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(TorchRunner, "run", gone)
    with server.client() as client:
        answer = client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503, answer.text
    server.join()
    assert server.failure is None
    assert server.backend.phase == "failed"


def test_the_process_ends_with_a_code_of_its_own(
    spawn: Callable[..., Spawned], tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAKS_AT_THE_THIRD_STEP)

    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    options = ["--kv-offloading-size", "0", "--device-kv-gib", "0.02", "--dtype", "float32"]
    server = spawn(tiny, *options, PYTHONPATH=path)
    server.wait_ready()
    with server.client() as client:
        answer = client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503, answer.text
    wait_until(lambda: server.process.poll() is not None, "it ends by itself")
    assert server.process.returncode == 70
    assert "could not recover" in server.stderr
