"""The official client against `penstock serve` with the real SmolLM2."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from server.running import TIMEOUT_SECONDS, Local, Spawned, wait_until

from penstock.config import load_config

KEY = "s3cret"
MODEL = "smollm2-135m"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def served(cache: Path, disk: Path) -> Iterator[Spawned]:
    spawned = Spawned(
        cache,
        *("--kv-offloading-size", 0.25, "--device-kv-gib", 0.1, "--block-tokens", 16),
        *("--disk-path", disk, "--disk-size", 0.25, "--dtype", "float32"),
        PENSTOCK_API_KEY=KEY,
    )
    facts = spawned.wait_ready()
    assert facts["models"] == [MODEL]
    assert facts["pid"] == spawned.process.pid
    yield spawned
    assert spawned.end(signal.SIGTERM) == 0, spawned.stderr
    told = spawned.stderr
    for words in (
        "listening on http://127.0.0.1:",
        "loading smollm2-135m",
        "allocating memory",
        "stopped",
    ):
        assert words in told
    for secret in (KEY, "capital of France"):
        assert secret not in told


@pytest.fixture(scope="module")
def ai(served: Spawned) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_SECONDS
    ) as client:
        yield client


def test_models(ai: openai.OpenAI) -> None:
    (model,) = ai.models.list().data
    assert model.id == MODEL
    assert ai.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        ai.models.retrieve("gpt-5")


def test_a_chat_whole_and_in_pieces(ai: openai.OpenAI) -> None:
    whole = ai.chat.completions.create(messages=QUESTION, **GREEDY)
    (choice,) = whole.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.completion_tokens <= 8

    chunks = list(
        ai.chat.completions.create(
            messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == choice.finish_reason
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    last = chunks[-1].usage
    assert last is not None
    assert last.completion_tokens == whole.usage.completion_tokens
    assert last.prompt_tokens == whole.usage.prompt_tokens
    # The same prompt again: all whole blocks but that of the last token.
    assert last.prompt_tokens_details is not None
    assert last.prompt_tokens_details.cached_tokens == (last.prompt_tokens - 1) // 16 * 16


def test_without_options_a_stream_has_no_usage(ai: openai.OpenAI) -> None:
    chunks = list(ai.chat.completions.create(messages=QUESTION, stream=True, **GREEDY))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_a_second_turn_finds_the_first(ai: openai.OpenAI) -> None:
    story = "A penstock carries water from the reservoir to the turbine. " * 6
    messages: list[Any] = [{"role": "user", "content": story}]
    first = ai.chat.completions.create(messages=messages, **GREEDY)
    messages.append(first.choices[0].message.model_dump())
    messages.append({"role": "user", "content": "Why?"})
    second = ai.chat.completions.create(messages=messages, **GREEDY)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert first.usage.prompt_tokens - 16 <= cached < second.usage.prompt_tokens


def test_stop_strings_end_the_text_before_them(ai: openai.OpenAI) -> None:
    wishes = {**GREEDY, "prompt": "One, two, three,", "stop": ["five", "zzz"]}
    stopped = ai.completions.create(**wishes).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == " four, "
    chunks = ai.completions.create(stream=True, **wishes)
    assert "".join(c.choices[0].text for c in chunks) == " four, "


def test_logprobs_of_a_chat(ai: openai.OpenAI) -> None:
    wishes = {**GREEDY, "max_tokens": 3, "logprobs": True, "top_logprobs": 3}
    choice = ai.chat.completions.create(messages=QUESTION, **wishes).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert len(content) == 3
    assert "".join(token.token for token in content) == choice.message.content
    for token in content:
        assert bytes(token.bytes or []).decode() == token.token
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (top.logprob for top in token.top_logprobs), reverse=True
        )
        assert len(token.top_logprobs) == 3
        # Greedy: the first is the one that was taken.
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == token.logprob
        assert math.exp(token.logprob) <= 1


def test_errors_are_the_clients_own(ai: openai.OpenAI, served: Spawned) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        ai.chat.completions.create(messages=QUESTION, model=MODEL, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        ai.completions.create(prompt=[5] * 9000, model=MODEL)
    assert long.value.code == "context_length_exceeded"
    assert "maximum context length is 8192 tokens. However, you requested" in long.value.message
    assert "9000" in long.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        ai.chat.completions.create(messages=QUESTION, model="gpt-5")
    assert missing.value.code == "model_not_found"
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="no", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as denied,
    ):
        stranger.models.list()
    assert denied.value.code == "invalid_api_key"


def test_clients_at_once_get_what_each_would_get_alone(ai: openai.OpenAI) -> None:
    prompts = ["One, two, three,", "The capital of France is"]

    def ask(prompt: str) -> str:
        stream = ai.completions.create(prompt=prompt, stream=True, **{**GREEDY, "max_tokens": 3})
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(ask, prompts))
    assert together == [ask(prompt) for prompt in prompts]


def test_a_client_that_leaves_frees_its_blocks(ai: openai.OpenAI, served: Spawned) -> None:
    with served.client() as client:
        stream = ai.completions.create(
            prompt="Once upon a time", model=MODEL, max_tokens=2000, stream=True
        )
        next(stream)
        assert client.metric("penstock_leased_blocks", tier="device") > 0
        stream.close()
        client.wait_idle()
        wait_until(lambda: client.metric("penstock_sequences", phase="running") == 0, "it runs")


def test_the_servers_own_pages(served: Spawned) -> None:
    with served.client() as client:
        assert client.get("/health").json() == {"status": "ok", "phase": "serving"}
        assert client.head("/ready").status_code == 200
        metrics = client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=")
        assert "penstock_lookups_total" in metrics.text
        assert client.get("/openapi.json").json()["info"]["title"] == "Penstock"


def test_stopped_in_order_the_next_server_answers_from_disk(
    served: Spawned,
    ai: openai.OpenAI,
    disk: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last one here: it ends the server."""
    body = {**GREEDY, "prompt": "The river is low in summer, and in spring it is high. " * 4}
    before = ai.completions.create(**body)
    assert served.end(signal.SIGTERM) == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    settings = {"host.size": "256MiB", "disk.path": str(disk), "disk.size": "256MiB"}
    config = load_config(env={}, overrides=settings)
    server = Local(
        MODEL, config, names=(MODEL,), kv_offloading_size=None, device_kv_gib=0.1, dtype="float32"
    )
    server.start()
    try:
        with server.client() as client:
            wait_until(
                lambda: client.metric("penstock_recovered_ratio", tier="disk") == 1, "it reads"
            )
            after = client.post("/v1/completions", json=body).json()
    finally:
        server.stop()
    assert after["choices"][0]["text"] == before.choices[0].text
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
