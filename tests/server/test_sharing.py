"""Many at once: tenants that see nothing of each other, queues that fill, clients that leave."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from server.running import Client, Local, wait_until

from penstock.server.app import AppSettings
from penstock.server.tenants import TenantSource

STORY = "A penstock carries water from the reservoir to the turbine. " * 4
LONG = {"prompt": "Once", "max_tokens": 400, "n": 4}


def cached(client: Client, headers: dict[str, bytes] | None = None, **fields: Any) -> int:
    body = {"prompt": STORY, "max_tokens": 1, "temperature": 0, **fields}
    answer = client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    number: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def test_tenants_see_nothing_of_each_other(local: Callable[..., Local]) -> None:
    def header(name: str) -> dict[str, bytes]:
        return {"X-Penstock-Tenant": name.encode()}

    with local().client() as client:
        tenants: list[dict[str, Any]] = [
            {},
            {"headers": header("a")},
            {"headers": header("b")},
            {"headers": header("caf\u00e9")},
            {"cache_salt": "a"},
            {"cache_salt": "b"},
            {"headers": header("a"), "cache_salt": "a"},
            {"headers": header("cache_salt:a")},
        ]
        assert [cached(client, **tenant) for tenant in tenants] == [0] * len(tenants)
        assert all(cached(client, **tenant) >= 32 for tenant in tenants)
        assert cached(client, header(""), cache_salt="a") >= 32
        # A gateway names the user of each request, and templates are shared all the same.
        for name in ("alice", "bob"):
            assert cached(client, user=name) >= 32
            assert cached(client, prompt_cache_key=name) >= 32
            assert cached(client, header("a"), prompt_cache_key=name, user=name) >= 32
        too_long = client.post("/v1/completions", json={"prompt": "x"}, headers=header("x" * 257))
        assert too_long.status_code == 400


def test_a_client_cannot_name_a_tenant_beside_the_one_that_a_gateway_adds(server: Local) -> None:
    with server.client() as client:
        for names, status in ((("victim", "a"), 400), (("a", "victim"), 400), (("a", "a"), 200)):
            answer = client.post(
                "/v1/completions",
                json={"prompt": STORY, "max_tokens": 1},
                headers=[("X-Penstock-Tenant", name) for name in names],
            )
            assert answer.status_code == status, answer.text


def test_an_operator_may_have_users_kept_apart(local: Callable[..., Local]) -> None:
    server = local(settings=AppSettings(tenant_from=TenantSource.USER))
    with server.client() as client:
        tenants: list[dict[str, Any]] = [{}, {"user": "a"}, {"user": "b"}]
        tenants.append({"headers": {"X-Penstock-Tenant": b"a"}})
        assert [cached(client, **tenant) for tenant in tenants] == [0] * len(tenants)
        assert all(cached(client, **tenant) >= 32 for tenant in tenants)
        # The header goes before the field, and prompt_cache_key changes nothing.
        assert cached(client, {"X-Penstock-Tenant": b"a"}, user="new") >= 32
        assert cached(client, user="a", prompt_cache_key="new") >= 32
        too_long = client.post("/v1/completions", json={"prompt": "x", "user": "x" * 257})
        assert too_long.status_code == 400
        assert too_long.json()["error"]["param"] == "user"


@pytest.fixture
def busy(local: Callable[..., Local]) -> Iterator[tuple[Local, Client]]:
    """One sequence runs, and no more than one may wait."""
    server = local(max_num_seqs=1, max_waiting=1).slow_down()
    with server.client() as client, server.client() as streaming:
        body = {"prompt": "Once", "max_tokens": 480, "stream": True}
        with streaming.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # held: whoever drops it has left
            next(lines)
            yield server, client
        client.wait_idle()
        client.check_serves()


def test_a_full_queue_says_when_to_come_again(busy: tuple[Local, Client]) -> None:
    server, client = busy
    with (
        server.client() as waiting,
        waiting.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}),
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as ai,
    ):
        wait_until(lambda: client.metric("penstock_sequences", phase="waiting") == 1, "it waits")
        with pytest.raises(openai.RateLimitError) as refused:
            ai.completions.create(model="tiny", prompt="Hello")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.code == "rate_limit_exceeded"
        assert "1 request is waiting" in refused.value.message
        several = client.post("/v1/completions", json={"prompt": "x", "n": 2})
        assert several.status_code == 400  # it could never be taken, however long one waits
        assert "at most 1 in one request" in several.json()["error"]["message"]


def test_prompts_of_one_request_are_queued_together_or_not_at_all(
    local: Callable[..., Local],
) -> None:
    server = local(max_num_seqs=1, max_waiting=3).slow_down()
    with server.client() as client, server.client() as streaming:
        body = {"prompt": ["a", "b"], "max_tokens": 480, "stream": True}
        with streaming.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            wait_until(
                lambda: client.metric("penstock_sequences", phase="waiting") == 1, "it waits"
            )
            refused = client.post("/v1/completions", json={"prompt": ["c", "d", "e"]})
            assert refused.status_code == 429
            wait_until(
                lambda: client.metric("penstock_sequences", phase="waiting") == 1, "it is left"
            )
        client.wait_idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_blocks(
    local: Callable[..., Local], path: str, streams: bool
) -> None:
    server = local().slow_down()
    body = {**LONG, "stream": streams}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    with server.client() as client:
        leaving = server.client()
        request = leaving.build_request("POST", path, json=body)
        if streams:
            lines = leaving.send(request, stream=True).iter_lines()
            next(lines)
            leaving.close()
        else:
            _send_and_leave(server, path, request.read(), client)
        client.wait_idle()
        wait_until(
            lambda: client.metric("penstock_sequences", phase="running") == 0, "they still run"
        )
        client.check_serves()


def _send_and_leave(server: Local, path: str, content: bytes, client: Client) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        connection.sendall(head.encode() + content)
        wait_until(lambda: client.metric("penstock_sequences", phase="running") == 4, "they begin")


def test_a_client_that_leaves_while_it_waits(busy: tuple[Local, Client]) -> None:
    server, client = busy
    for streams in (True, False):
        leaving = server.client()
        body = {"prompt": "x", "stream": streams}
        if streams:
            leaving.send(leaving.build_request("POST", "/v1/completions", json=body), stream=True)
            leaving.close()
        else:
            leaving.timeout = 0.3
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/completions", json=body)
            leaving.close()
        wait_until(lambda: client.metric("penstock_sequences", phase="waiting") == 0, "it waits")


def test_many_at_once_are_each_answered_right(server: Local) -> None:
    prompts = [f"{number} plus" for number in range(12)]
    with server.client() as client, ThreadPoolExecutor(12) as threads:

        def ask(prompt: str) -> str:
            body = {"prompt": prompt, "temperature": 0, "max_tokens": 6}
            text: str = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            return text

        together = list(threads.map(ask, prompts))
        assert together == [ask(prompt) for prompt in prompts]
