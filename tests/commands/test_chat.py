"""`penstock chat`, embedded and against a server."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server.running import Local, make_tiny

from penstock import LLM
from penstock.commands.speakers import ChatFailed, Embedded, Remote, Wishes
from penstock.errors import ConfigError
from penstock.server.app import AppSettings

WISHES = Wishes(max_tokens=20, temperature=0, seed=1)
HELLO = [{"role": "user", "content": "Hello"}]
KEY = "s3cret"


@pytest.fixture(scope="module")
def server(cache: Path) -> Iterator[Local]:
    made = Local(make_tiny(cache), settings=AppSettings(api_key=KEY)).start()
    yield made
    made.stop()


@pytest.fixture
def chat(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run_chat(lines: str, *arguments: object) -> Any:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return run("chat", "--max-tokens", 5, "--temperature", 0, *arguments)

    return run_chat


def test_a_conversation_with_a_server(chat: Callable[..., Any], server: Local) -> None:
    where = ("--url", server.url, "--api-key", KEY)
    lines = chat(
        "Hello there\nAnd then?\n/clear\nHello there\n/nonsense\n", *where, "--json"
    ).stdout.splitlines()
    answers = [json.loads(line) for line in lines]
    first, second, again = (answer["content"] for answer in answers)
    assert first == again != second
    assert answers[1]["usage"]["prompt_tokens"] > answers[0]["usage"]["prompt_tokens"]
    assert answers[2]["usage"]["prompt_tokens"] == answers[0]["usage"]["prompt_tokens"]
    assert answers[2]["usage"]["cached_tokens"] >= 16
    ran = chat("Hello there\n\nAnd then?\n/quit\nnever read\n", *where)
    assert ran.code == 0
    assert ran.stdout == f"{first}\n{second}\n"
    assert ran.stderr.count("5 tokens in ") == 2
    assert "prompt tokens from the cache" in ran.stderr
    told = chat("Hello there\n", *where, "--json", "--system", "Be brief.").stdout
    assert json.loads(told)["content"] != first


def test_a_conversation_with_the_embedded_engine(
    chat: Callable[..., Any], cache: Path, server: Local
) -> None:
    engine = ("--kv-offloading-size", 0, "--device-kv-gib", 0.02, "--block-tokens", 16)
    ran = chat("Hello there\nAnd then?\n", "--model", make_tiny(cache), *engine, "--json")
    embedded = [json.loads(line) for line in ran.stdout.splitlines()]
    assert embedded[1]["usage"]["cached_tokens"] >= 16
    ran = chat("Hello there\nAnd then?\n", "--url", server.url, "--api-key", KEY, "--json")
    remote = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [answer["content"] for answer in embedded] == [answer["content"] for answer in remote]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "127.0.0.1:8000"], "the URL is '127.0.0.1:8000'"),
        (["--url", "ftp://host"], "expected one such as"),
        (["--url", "http://127.0.0.1:99999"], "expected one such as"),
        (["--url", "http://127.0.0.1:1"], "does not answer: Connection refused"),
        (["--model", "/no/such/model"], "there is no model at"),
    ],
    ids=str,
)
def test_nobody_to_talk_to(chat: Callable[..., Any], arguments: list[str], words: str) -> None:
    ran = chat("Hello\n", *arguments)
    assert (ran.code, ran.stdout) == (2, "")
    assert words in ran.stderr.splitlines()[-1]


def test_a_server_that_refuses(chat: Callable[..., Any], server: Local) -> None:
    assert "the server answers 401: the API key" in chat("x\n", "--url", server.url).refusal
    where = ("--url", server.url, "--api-key", KEY)
    long = chat("word " * 600 + "\n", *where).refusal
    assert "the server answers 400: This model's maximum context length is 512 tokens" in long
    assert "404: there is no model 'gpt-5'" in chat("x\n", *where, "--model", "gpt-5").refusal
    assert "not valid text" in chat("bad \udcff\n", *where).refusal


def test_urls_with_and_without_their_path(server: Local) -> None:
    for path in ("", "/", "/v1", "/v1/"):
        assert Remote(server.url + path, KEY).name == "tiny"
    with pytest.raises(ChatFailed, match="404"):
        Remote(f"{server.url}/elsewhere", KEY)
    with pytest.raises(ConfigError):
        Remote("http://", KEY)


def test_an_answer_that_is_cut_off(cache: Path) -> None:
    server = Local(make_tiny(cache), grace_seconds=0.0).start().slow_down()
    speaker = Remote(server.url, None)
    heard: list[str] = []

    def hear(text: str) -> None:
        heard.append(text)
        server.process.stop()

    with pytest.raises(ChatFailed, match="in mid-answer"):
        speaker.answer(HELLO, Wishes(400, 0, None), hear)
    server.join()
    assert heard


def test_an_interrupt_stops_an_answer_and_the_engine_goes_on(cache: Path) -> None:
    with LLM(str(make_tiny(cache)), kv_offloading_size=0, device_kv_gib=0.02) as llm:
        speaker = Embedded(llm)
        heard: list[str] = []

        def hear(text: str) -> None:
            heard.append(text)
            signal.raise_signal(signal.SIGINT)  # noted: the step it came in is finished first

        with pytest.raises(KeyboardInterrupt):
            speaker.answer(HELLO, WISHES, hear)
        assert len(heard) == 1
        assert not llm.engine.has_work
        llm.engine.check()
        whole: list[str] = []
        figures = speaker.answer(HELLO, WISHES, whole.append)
        assert figures.num_new_tokens == 20
        assert whole[0] == heard[0]
