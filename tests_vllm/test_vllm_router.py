"""The real vllm-router before `vllm serve` with Penstock: docs/routing.md, docs/disaggregation.md.

Three servers: one that only saves (`kv_producer`) and one that only loads (`kv_consumer`), on one
node; and one that does both, and reaches the node's remote store, a Redis, from elsewhere.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from conftest import BLOCK, Tokens, tokens
from node_process import NodeProcess
from served import (
    MAX_TOKENS,
    Answer,
    Served,
    ask,
    cached_tokens,
    comes_to,
    post,
    wait_until,
)

from servers import is_skipped
from servers.redis_server import WHY_NOT as NO_REDIS
from servers.redis_server import RedisServer
from servers.vllm_router import WHY_NOT as NO_ROUTER
from servers.vllm_router import VllmRouter

WHY_NOT = NO_REDIS or NO_ROUTER
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT)),
]

LETTER = "The letter was long, and every line of it spoke of water, of mills and of their wheels. "
CHECK_OFTEN = (
    *("--health-check-interval-secs", 1, "--cb-timeout-duration-secs", 1),
    *("--health-failure-threshold", 1, "--health-success-threshold", 1),
)


class Fleet(NamedTuple):
    node: NodeProcess
    producer: Served
    consumer: Served
    both: Served


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    redis = RedisServer(folder / "redis")
    node = NodeProcess(folder / "node.sock", folder / "kv", redis.url)
    common: dict[str, Any] = {"always_load": True}
    late = {"remote.lookup_deadline_seconds": 10}  # on a busy machine
    made = [
        Served(folder / "producer", role="kv_producer", node=node.url, **common),
        Served(folder / "consumer", role="kv_consumer", node=node.url, **common),
        Served(folder / "both", kv_offloading_size=0.25, remote=redis.url, set=late, **common),
    ]
    try:
        yield Fleet(node, *[server.wait_ready() for server in made])
        node.check()
    finally:
        for server in made:
            server.kill()
        node.kill()
        redis.kill()


Route = Callable[..., str]


@pytest.fixture
def route(tmp_path: Path) -> Iterator[Route]:
    """Starts a router, and returns its URL."""
    made: list[VllmRouter] = []

    def start(
        *options: object, policy: str = "round_robin", workers: list[str] | None = None
    ) -> str:
        made.append(VllmRouter(tmp_path / str(len(made)), workers or [], policy, *options))
        return made[-1].url

    yield start
    for router in made:
        router.kill()


def apart(prefill: Served, decode: Served) -> tuple[str, ...]:
    return ("--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url)


def alone(server: Served, prompt: Tokens) -> Answer:
    """What one server answers after a hit in its own cache, of KV that it has computed itself.

    Under a salt, so that nobody else's KV is found, and this is found by nobody else.
    """
    assert ask(server.url, prompt, cache_salt="alone").num_loaded == 0
    return ask(server.url, prompt, cache_salt="alone")


@pytest.mark.parametrize("through", ["node", "redis"])
def test_the_decoder_computes_no_block_of_a_prompt(
    fleet: Fleet, route: Route, through: str
) -> None:
    prefill = fleet.producer if through == "node" else fleet.both
    router = route(*apart(prefill, fleet.consumer))
    num_whole = 0
    for seed in range(100, 110):
        prompt = tokens(6 * BLOCK + 11, seed + 1000 * (through == "redis"))
        before = prefill.num_computed, fleet.consumer.num_computed
        answer = ask(router, prompt)
        expected = alone(fleet.both, prompt)
        assert answer.tokens == expected.tokens
        # On a busy machine the decoder may lose its patience, and compute.
        if answer.num_loaded == 6 * BLOCK:
            num_whole += 1
            assert answer.logprobs == expected.logprobs  # bit for bit
            assert comes_to(lambda: fleet.consumer.num_computed, before[1] + 11)
            if through == "node":  # the other one also computes what is expected
                assert comes_to(lambda: prefill.num_computed, before[0] + len(prompt))
        if num_whole == 2:
            break
    assert num_whole == 2
    fleet.node.check()


def test_chats_and_streams(fleet: Fleet, route: Route) -> None:
    router = route(*apart(fleet.producer, fleet.consumer))
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": LETTER * 8}]}
    salted = {**chat, "cache_salt": "alone"}
    expected = post(fleet.both.url, salted).json()["choices"][0]["message"]["content"]
    whole = post(router, chat)
    assert whole.json()["choices"][0]["message"]["content"] == expected
    streamed = post(router, {**chat, "stream": True}).text
    pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)
    assert text == expected
    # What vLLM reports is what the prefiller had in its cache: all whole blocks, the second time.
    again = post(router, chat)
    num_tokens = again.json()["usage"]["prompt_tokens"]
    assert cached_tokens(whole) == 0
    assert cached_tokens(again) == num_tokens // BLOCK * BLOCK


def test_many_at_once(fleet: Fleet, route: Route) -> None:
    router = route(*apart(fleet.producer, fleet.consumer))
    prompts = [tokens(3 * BLOCK + 5, seed) for seed in range(300, 304)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: ask(router, prompt), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == ask(fleet.both.url, prompt, cache_salt="alone").tokens
    fleet.node.check()


def test_a_request_that_is_refused(fleet: Fleet, route: Route) -> None:
    router = route(*apart(fleet.producer, fleet.consumer))
    refused = post(router, {"prompt": [100] * (MAX_TOKENS + 1)})
    assert refused.status_code == 400
    assert "maximum context length" in refused.text
    late = {"prompt": [100] * (MAX_TOKENS + 1), "kv_transfer_params": {"do_remote_prefill": True}}
    assert post(fleet.consumer.url, late).status_code == 400
    prompt = tokens(BLOCK + 3, 400)
    assert ask(router, prompt).tokens == ask(fleet.both.url, prompt, cache_salt="alone").tokens


def test_a_prompt_that_nobody_computes(fleet: Fleet) -> None:
    prompt = tokens(3 * BLOCK + 3, 410)
    expected = ask(fleet.both.url, prompt, cache_salt="alone")
    before = fleet.consumer.num_computed
    answer = ask(fleet.consumer.url, prompt, kv_transfer_params={"do_remote_prefill": True})
    assert answer.tokens == expected.tokens
    assert comes_to(lambda: fleet.consumer.num_computed, before + len(prompt))


def talk(url: str, name: str, num_turns: int, **headers: str) -> tuple[list[int], list[str]]:
    """A conversation that grows: the tokens of each turn that were cached, and the answers."""
    messages = [{"role": "user", "content": f"{name}. {LETTER * 3}"}]
    cached, said = [], []
    for _ in range(num_turns):
        answer = post(url, {"messages": messages, "max_tokens": 4}, **headers)
        assert answer.status_code == 200, answer.text
        cached.append(cached_tokens(answer))
        said.append(answer.json()["choices"][0]["message"]["content"])
        messages += [
            {"role": "assistant", "content": said[-1]},
            {"role": "user", "content": "And?"},
        ]
    return cached, said


@pytest.mark.parametrize("policy", ["consistent_hash", "cache_aware"])
def test_conversations_stay_with_their_server(fleet: Fleet, route: Route, policy: str) -> None:
    servers = [fleet.producer, fleet.both]
    router = route(policy=policy, workers=[server.url for server in servers])
    hits = "vllm:prompt_tokens_cached_by_source_total"
    before = [(server.num_answers, server.metric(hits, source="device")) for server in servers]
    names = [f"{policy} {number}" for number in range(6)]
    if policy == "cache_aware":
        names = [f"{name} " * 12 for name in ("Alpha", "Beta", "Gamma", "Delta", "Epsilon", "Zeta")]

    def converse(name: str) -> tuple[list[int], list[str]]:
        header = {"X-Session-Id": name} if policy == "consistent_hash" else {}
        return talk(router, name, 2, **header)

    # At once: a router without load sends all to one server.
    with ThreadPoolExecutor(len(names)) as pool:
        told = list(pool.map(converse, names))
    for name, (cached, said) in zip(names, told, strict=True):
        assert cached[1] >= cached[0] + BLOCK, "the second turn finds the first"
        assert said == talk(fleet.consumer.url, name, 2)[1]
    assert comes_to(
        lambda: sum(server.num_answers for server in servers),
        sum(was for was, _ in before) + 2 * len(names),
    )
    for server, (was, _) in zip(servers, before, strict=True):
        assert server.num_answers > was, "the conversations are spread over both"
    if policy == "consistent_hash":
        # On the device itself: nothing had to be loaded, because the server was the same. With the
        # other policy the router may prefer an idle server, which loads what the first has saved.
        assert comes_to(
            lambda: sum(server.metric(hits, source="device") for server in servers),
            sum(was for _, was in before) + sum(sum(cached) for cached, _ in told),
        )


def test_the_prefiller_is_killed_in_the_middle(fleet: Fleet, route: Route) -> None:
    """The last test: it is not started again."""
    router = route(
        *("--vllm-pd-disaggregation", "--decode", fleet.consumer.url),
        *("--prefill", fleet.producer.url, "--prefill", fleet.both.url, *CHECK_OFTEN),
    )
    prompt = tokens(28 * BLOCK + 7, 500)
    before = fleet.node.num_used
    failed: list[httpx.Response | Exception] = []

    def hand_over() -> None:
        body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        try:
            failed.append(post(fleet.producer.url, body))
        except httpx.HTTPError as error:
            failed.append(error)

    asking = threading.Thread(target=hand_over)
    asking.start()
    # The newest of them are still being written, and are dropped with the one who writes.
    wait_until(lambda: fleet.node.num_used >= before + 12, "some blocks are saved")
    fleet.producer.kill()
    asking.join()
    assert isinstance(failed[0], httpx.HTTPError), "it was in the middle of it"
    fleet.node.check()
    # The decoder takes what there is, and computes the rest.
    before = fleet.consumer.num_computed
    answer = ask(fleet.consumer.url, prompt, kv_transfer_params={"do_remote_prefill": True})
    assert 0 < answer.num_loaded < 28 * BLOCK
    num_left = len(prompt) - answer.num_loaded
    assert comes_to(lambda: fleet.consumer.num_computed, before + num_left)
    assert answer.tokens == ask(fleet.both.url, prompt, cache_salt="alone").tokens
    # Through the router, once it has noticed: by way of the prefiller that is left.
    wait_until(
        lambda: post(router, {"prompt": tokens(BLOCK, 501)}).status_code == 200, "it has noticed"
    )
    for seed in range(502, 504):
        prompt = tokens(2 * BLOCK + 7, seed)
        assert ask(router, prompt).tokens == ask(fleet.both.url, prompt, cache_salt="alone").tokens
    fleet.node.check()
