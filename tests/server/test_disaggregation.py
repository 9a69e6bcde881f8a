"""One server computes prompts, another generates: what docs/disaggregation.md says of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server.running import TIMEOUT_SECONDS, Client, Spawned

from servers import is_skipped
from servers.redis_server import WHY_NOT as NO_REDIS
from servers.redis_server import RedisServer
from servers.vllm_router import WHY_NOT as NO_ROUTER
from servers.vllm_router import VllmRouter
from tests.node.node_process import NodeProcess

WHY_NOT = NO_REDIS or NO_ROUTER
pytestmark = pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))

BLOCK_TOKENS = 16
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}
DECODE_THERE = {"do_remote_decode": True, "do_remote_prefill": False}


def prompt_of(number: int, num_tokens: int = 200) -> list[int]:
    return [10 + (number * 7919 + place * 31) % 400 for place in range(num_tokens)]


Spawn = Callable[..., Spawned]


Shared = tuple[object, ...]


@pytest.fixture(scope="module", params=["redis", "node"])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared]:
    """The options of servers that share their tiers, through a store or on one machine."""
    own = ("--kv-offloading-size", 0.05)
    if request.param == "redis":
        server = RedisServer(tmp_path_factory.mktemp("redis"))
        yield (*own, "--remote", server.url)
        server.kill()
    else:
        node = NodeProcess("--socket", tmp_path_factory.mktemp("node") / "node.sock")
        yield ("--node", f"unix://{node.path}")
        node.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def start(cache: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spawn]:
    patient = tmp_path_factory.mktemp("patient")  # a busy machine may stall for seconds
    (patient / "sitecustomize.py").write_text(
        "from penstock.costs import patience\npatience.MIN_SECONDS = 10.0\n"
    )
    path = os.pathsep.join([str(patient), os.environ.get("PYTHONPATH", "")])
    made: list[Spawned] = []

    def spawn(*options: object) -> Spawned:
        common = (
            *(tiny, "--served-model-name", "tiny"),
            *("--device-kv-gib", 0.02, "--block-tokens", BLOCK_TOKENS, "--dtype", "float32"),
            *("--max-num-batched-tokens", 32),
        )
        made.append(Spawned(cache, *common, *options, PYTHONPATH=path))
        return made[-1]

    yield spawn
    for process in made:
        process.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def servers(start: Spawn, shared: Shared) -> tuple[Spawned, Spawned, Spawned]:
    """A prefiller, a decoder, and one that shares nothing."""
    made = (
        start("--role", "prefill", *shared),
        start("--role", "decode", *shared),
        start("--kv-offloading-size", 0.05),
    )
    for process in made:
        process.wait_ready()
    return made


def ask(client: Client, prompt: list[int], **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": prompt, **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def num_cached(answer: dict[str, Any]) -> int:
    num: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num


@pytest.mark.parametrize("stream", [False, True])
def test_through_the_router(
    servers: tuple[Spawned, Spawned, Spawned], tmp_path: Path, stream: bool
) -> None:
    prefill, decode, plain = servers
    roles = ("--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url)
    router = VllmRouter(tmp_path, [], "round_robin", *roles)
    try:
        with openai.OpenAI(
            base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS
        ) as client:
            for number in range(4):
                prompt = prompt_of(100 * stream + number)
                with plain.client() as alone:
                    expected = text_of(ask(alone, prompt))
                if stream:
                    pieces = client.completions.create(prompt=prompt, **GREEDY, stream=True)
                    assert "".join(piece.choices[0].text for piece in pieces) == expected
                else:
                    whole = client.completions.create(prompt=prompt, **GREEDY)
                    assert whole.choices[0].text == expected
                    assert whole.usage is not None
                    details: Any = whole.usage.prompt_tokens_details
                    # All complete blocks: the decoder computed none of them.
                    assert details.cached_tokens == len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
                chat: list[Any] = [{"role": "user", "content": f"{number} " + "and so on " * 20}]
                spoken = client.chat.completions.create(messages=chat, **GREEDY)
                with plain.client() as alone:
                    body = {"messages": chat, **GREEDY}
                    said = alone.post("/v1/chat/completions", json=body).json()
                assert spoken.choices[0].message.content == said["choices"][0]["message"]["content"]
    finally:
        router.kill()


def test_the_prefiller_is_killed_after_it_has_answered(
    servers: tuple[Spawned, Spawned, Spawned], start: Spawn, shared: Shared
) -> None:
    _, decode, plain = servers
    prompt = prompt_of(7, 480)
    with plain.client() as alone:
        expected = text_of(ask(alone, prompt))
    dying = start("--role", "prefill", *shared)
    dying.wait_ready()
    with dying.client() as client:
        early = ask(client, prompt, max_tokens=1, kv_transfer_params=DECODE_THERE)
    os.kill(dying.process.pid, signal.SIGKILL)
    assert text_of(early) == ""
    passed_on = early["kv_transfer_params"]
    assert passed_on["do_remote_prefill"] is True
    with decode.client() as client:
        answer = ask(client, prompt, kv_transfer_params=passed_on)
        client.wait_idle()
    assert text_of(answer) == expected
    # The router's own words for a prefiller that failed: the decoder computes.
    with decode.client() as client:
        answer = ask(client, prompt_of(8), kv_transfer_params=None)
        with plain.client() as alone:
            assert text_of(answer) == text_of(ask(alone, prompt_of(8)))


def test_a_prompt_that_is_handed_over_is_computed(
    servers: tuple[Spawned, Spawned, Spawned],
) -> None:
    prefill, _, plain = servers
    prompt = prompt_of(9)
    with prefill.client() as client:
        answer = ask(client, prompt, max_tokens=1, kv_transfer_params=DECODE_THERE)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        client.wait_idle()
        again = ask(client, prompt)
    assert num_cached(again) == len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
    with plain.client() as alone:
        assert text_of(again) == text_of(ask(alone, prompt))


@pytest.mark.parametrize(
    "params", [{}, {"do_remote_prefill": None, "x": {"y": [1]}}, {"remote_block_ids": [1, 2]}]
)
def test_fields_of_routers_that_mean_nothing_here(
    servers: tuple[Spawned, Spawned, Spawned], params: dict[str, Any]
) -> None:
    for process in servers[:2]:
        with process.client() as client:
            assert text_of(ask(client, prompt_of(11), kv_transfer_params=params))


def test_a_role_needs_a_shared_tier(cache: Path, tiny: Path) -> None:
    process = Spawned(cache, tiny, "--role", "decode", "--kv-offloading-size", 0.05)
    try:
        assert process.process.wait(60) == 2
    finally:
        process.end(signal.SIGKILL)


def test_a_wrong_flag_is_refused(servers: tuple[Spawned, Spawned, Spawned]) -> None:
    body = {"prompt": [1, 2, 3], **GREEDY, "kv_transfer_params": {"do_remote_decode": "yes"}}
    answer = httpx.post(f"{servers[1].url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400
    assert "do_remote_decode" in answer.text
