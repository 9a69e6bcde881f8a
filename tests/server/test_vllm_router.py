"""The real vllm-router before two `penstock serve`: what docs/routing.md says of it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server.running import TIMEOUT_SECONDS, Client, Local, Spawned, wait_until

from penstock.server.app import AppSettings
from servers import free_port, is_skipped
from servers.vllm_router import WHY_NOT, VllmRouter

pytestmark = pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))

KEY = "s3cret"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 4}
LETTER = "The letter was long, and every line of it spoke of water, of mills and of their wheels. "
# By default a server is checked once a minute; after ten errors it is not asked for a minute.
CHECK_OFTEN = (
    *("--health-check-interval-secs", 1, "--cb-timeout-duration-secs", 1),
    *("--health-failure-threshold", 1, "--health-success-threshold", 1),
)


class Worker:
    """`penstock serve` that keeps its port when it is started again."""

    def __init__(self, cache: Path, model: Path) -> None:
        self._cache = cache
        self._arguments = (
            *(model, "--served-model-name", "tiny", "--port", free_port()),
            *("--kv-offloading-size", 0.05, "--device-kv-gib", 0.02),
            *("--block-tokens", 16, "--dtype", "float32"),
        )
        self.start()

    def start(self) -> None:
        self.process = Spawned(self._cache, *self._arguments, PENSTOCK_API_KEY=KEY)

    def wait_ready(self) -> Worker:
        self.process.wait_ready()
        return self

    def num_answers(self) -> int:
        with self.process.client() as client:
            return int(client.metric("penstock_requests_total", reason="length"))


@pytest.fixture(scope="module")
def workers(cache: Path, tiny: Path) -> Iterator[list[Worker]]:
    made = [Worker(cache, tiny) for _ in range(2)]
    try:
        yield [worker.wait_ready() for worker in made]
    finally:
        for worker in made:
            worker.process.end(signal.SIGKILL)


@pytest.fixture
def route(workers: list[Worker], tmp_path: Path) -> Iterator[Callable[..., openai.OpenAI]]:
    """Starts a router, and returns a client of it."""
    made: list[tuple[VllmRouter, openai.OpenAI]] = []

    def start(policy: str, *options: object) -> openai.OpenAI:
        urls = [worker.process.url for worker in workers]
        router = VllmRouter(tmp_path / str(len(made)), urls, policy, *options)
        made.append((router, client_of(router.url)))
        return made[-1][1]

    yield start
    for router, client in made:
        client.close()
        router.kill()


def client_of(url: str, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize("policy", ["cache_aware", "consistent_hash", "round_robin"])
def test_ordinary_traffic(
    route: Callable[..., openai.OpenAI], workers: list[Worker], policy: str
) -> None:
    routed = route(policy)
    assert [model.id for model in routed.models.list().data] == ["tiny"]
    with client_of(workers[0].process.url) as direct:
        expected = direct.completions.create(prompt=LETTER, **GREEDY).choices[0].text
        chat: list[Any] = [{"role": "user", "content": LETTER}]
        answer = direct.chat.completions.create(messages=chat, **GREEDY).choices[0].message.content
    assert routed.completions.create(prompt=LETTER, **GREEDY).choices[0].text == expected
    pieces = routed.completions.create(prompt=LETTER, **GREEDY, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == expected
    whole = routed.chat.completions.create(messages=chat, **GREEDY)
    assert whole.choices[0].message.content == answer
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 4
    chunks = list(
        routed.chat.completions.create(
            messages=chat, **GREEDY, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4
    both = routed.completions.create(prompt=["One two", LETTER], **GREEDY)
    assert both.choices[1].text == expected
    assert routed.completions.create(prompt=[100, 200, 300], **GREEDY).choices[0].text


def test_errors_keep_their_bodies(route: Callable[..., openai.OpenAI]) -> None:
    routed = route("cache_aware")
    with pytest.raises(openai.BadRequestError) as refused:
        routed.completions.create(prompt="x", suffix="y", **GREEDY)
    assert refused.value.param == "suffix"
    assert refused.value.code == "unsupported_parameter"
    assert "suffix is not supported by this server; leave it out." in refused.value.message
    with pytest.raises(openai.BadRequestError) as too_long:
        routed.completions.create(prompt=[100] * 600, **GREEDY)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        routed.completions.create(prompt="x", **{**GREEDY, "model": "other"})
    assert missing.value.code == "model_not_found"
    with (
        client_of(str(routed.base_url).removesuffix("/v1/"), "wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.completions.create(prompt="x", **GREEDY)
    # With other requests, the router does not pass the key on.
    with pytest.raises(openai.AuthenticationError):
        routed.post("/penstock/hints", body={"action": "release", "session": "x"}, cast_to=object)


def test_what_the_router_adds_is_named_once(
    route: Callable[..., openai.OpenAI], workers: list[Worker]
) -> None:
    routed = route("round_robin")
    for _ in range(4):
        routed.completions.create(prompt="One two", **GREEDY)
    for worker in workers:
        told = worker.process.stderr
        assert len(re.findall(r"ignored unknown fields: .*\bno_stop_trim\b", told)) == 1


def cached_tokens(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def talk(client: openai.OpenAI, name: str, num_turns: int, **options: Any) -> list[int]:
    """A conversation that grows; how many tokens of each turn's prompt were in the cache."""
    messages: list[Any] = [{"role": "user", "content": f"{name}. {LETTER}"}]
    cached = []
    for _ in range(num_turns):
        answer = client.chat.completions.create(messages=messages, **GREEDY, **options)
        cached.append(cached_tokens(answer))
        said = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "More?"}]
    return cached


def test_a_session_stays_with_its_server(
    route: Callable[..., openai.OpenAI], workers: list[Worker]
) -> None:
    routed = route("consistent_hash")
    before = [worker.num_answers() for worker in workers]
    for number in range(12):
        name = f"session {number} of those with a name"
        header = {"X-Session-Id": name}
        _, *later = talk(routed, name, 3, extra_headers=header)
        assert all(later), "each later turn finds the one before it"
    answered = [worker.num_answers() - was for worker, was in zip(workers, before, strict=True)]
    assert sum(answered) == 36
    assert all(answered), "the sessions are spread over both"
    # Of a chat without such a header, it hashes something that all chats have.
    before = [worker.num_answers() for worker in workers]
    for number in range(12):
        talk(routed, f"{number} is a chat without a name", 1)
    answered = [worker.num_answers() - was for worker, was in zip(workers, before, strict=True)]
    assert sorted(answered) == [0, 12]


def test_hints_reach_the_server_of_their_session(
    local: Callable[..., Local], tmp_path: Path
) -> None:
    urls = [local(kv_offloading_size=0.05).url for _ in range(2)]
    router = VllmRouter(tmp_path / "router", urls, "consistent_hash")
    try:
        with Client(router.url) as routed:
            for number in range(6):
                session = f"session {number}"
                header = {"X-Session-Id": session}
                body = {
                    **GREEDY,
                    "messages": [{"role": "user", "content": f"{session}. {LETTER}"}],
                    "penstock": {"session": session},
                }
                answer = routed.post("/v1/chat/completions", json=body, headers=header)
                assert answer.status_code == 200, answer.text
                hint = {"action": "retain", "session": session, "retain_seconds": 60}
                applied = routed.post("/v1/penstock/hints", json=hint, headers=header)
                assert applied.json()["tokens"] > 0, applied.text
    finally:
        router.kill()


def test_prompts_that_begin_alike_meet_without_a_header(
    route: Callable[..., openai.OpenAI], workers: list[Worker]
) -> None:
    routed = route("cache_aware")
    before = [worker.num_answers() for worker in workers]
    topics = ("Alpha ", "Beta ", "Gamma ", "Delta ", "Epsilon ", "Zeta ", "Eta ", "Theta ")

    def ask(topic: str) -> list[int]:
        answers = [
            routed.completions.create(prompt=f"{topic * 80} {turn}", **GREEDY) for turn in range(4)
        ]
        return [cached_tokens(answer) for answer in answers]

    # At once: a router without load sends all to one server.
    with ThreadPoolExecutor(len(topics)) as pool:
        for _, *later in pool.map(ask, topics):
            assert all(later), "each finds what the one before it left"
    answered = [worker.num_answers() - was for worker, was in zip(workers, before, strict=True)]
    assert sum(answered) == 32
    assert all(answered), "the topics are spread over both"


def test_a_client_that_leaves(local: Callable[..., Local], tmp_path: Path) -> None:
    server = local().slow_down()
    router = VllmRouter(tmp_path / "router", [server.url], "round_robin")
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 480, "ignore_eos": True}
    try:
        with server.client() as direct, Client(router.url) as routed:
            with routed.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
                assert next(stream.iter_lines()).startswith("data: ")
            wait_until(
                lambda: direct.metric("penstock_requests_total", reason="abort") == 1,
                "the server learns that the stream is not read any more",
            )
            with pytest.raises(Exception, match="timed out"):
                routed.post("/v1/completions", json=body, timeout=3.0)
            wait_until(
                lambda: direct.metric("penstock_requests_total", reason="abort") == 2,
                "the server learns that nobody waits for the answer",
            )
            direct.wait_idle()
            routed.check_serves()
    finally:
        router.kill()


def test_the_name_that_clients_use_is_passed_on(
    local: Callable[..., Local], tmp_path: Path
) -> None:
    name = "llm.example.com"
    strict, told = local(), local(settings=AppSettings(allowed_hosts=(name,)))
    for number, (server, status) in enumerate([(strict, 403), (told, 200)]):
        router = VllmRouter(tmp_path / str(number), [server.url], "round_robin")
        try:
            with Client(router.url) as routed:
                body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
                answer = routed.post("/v1/completions", json=body, headers={"Host": name})
                assert answer.status_code == status, answer.text
        finally:
            router.kill()


@pytest.mark.parametrize("policy", ["round_robin", "consistent_hash"])
def test_a_server_that_dies_and_comes_back(
    route: Callable[..., openai.OpenAI], workers: list[Worker], policy: str
) -> None:
    routed = route(policy, *CHECK_OFTEN)

    def ask(session: int) -> str:
        header = {"X-Session-Id": f"session {session}"}
        answer = routed.completions.create(prompt=LETTER, **GREEDY, extra_headers=header)
        return answer.choices[0].text

    expected = ask(0)
    workers[1].process.end(signal.SIGKILL)
    if policy == "consistent_hash":  # it asks the dead one until a check has failed
        url = f"{str(routed.base_url).removesuffix('/v1/')}/readiness"
        wait_until(lambda: httpx.get(url).json()["healthy_workers"] == 1, "a check has failed")
    assert {ask(session) for session in range(12)} == {expected}
    workers[1].start()
    workers[1].wait_ready()

    def is_back() -> bool:
        assert {ask(session) for session in range(12)} == {expected}
        return workers[1].num_answers() > 0

    wait_until(is_back, "the router uses it again")
