"""Hints over HTTP: with a request, between requests, and never across tenants."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server.running import Client, Local, wait_until
from server.test_tools import HERMES, WEATHER

from penstock.config import Config, DiskConfig, HostConfig
from penstock.server.app import AppSettings

HINTS = "/v1/penstock/hints"
COMPLETIONS = "/v1/completions"
STORY = "A penstock carries water from the reservoir to the turbine. " * 16
MARK = {"penstock": {"reuse": "anywhere"}}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16  # layers, K and V, heads, head_dim, fp32, tokens


@pytest.fixture
def tiered(local: Callable[..., Local], tmp_path: Path) -> Local:
    """Hardly any DRAM, and much disk."""
    host = HostConfig(size_bytes=64 * BLOCK_BYTES, policy="lru")
    disk = DiskConfig(str(tmp_path / "kv"), size_bytes=2048 * (BLOCK_BYTES + 512))
    return local(Config(host, disk), kv_offloading_size=None, device_kv_gib=0.0005)


@pytest.fixture
def asking(tiered: Local) -> Iterator[Client]:
    with tiered.client() as client:
        yield client


def ask(client: Client, prompt: Any = STORY, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    answer = client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def hint(client: Client, action: str, **fields: Any) -> int:
    answer = client.post(HINTS, json={"action": action, **fields})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["object"] == "penstock.hint"
    assert found["action"] == action
    assert found["tokens"] == 16 * found["blocks"]
    return int(found["blocks"])


def flood(client: Client) -> None:
    for number in range(12):
        ask(client, f"{chr(97 + number)} " * 300)


def hits(client: Client, tier: str) -> float:
    return client.metric("penstock_hit_blocks_total", tier=tier)


def test_a_sessions_kv_waits_in_dram_while_its_agent_waits_for_a_tool(asking: Client) -> None:
    first = ask(asking, penstock={"session": "agent", "retain_seconds": 600})
    wait_until(lambda: asking.metric("penstock_retained_blocks") >= 10, "it is retained")
    flood(asking)
    before = hits(asking, "host")
    again = ask(asking)
    assert again["choices"] == first["choices"]
    assert hits(asking, "host") - before >= 10
    assert hint(asking, "release", session="agent") >= 10
    wait_until(lambda: asking.metric("penstock_retained_blocks") == 0, "it is released")
    assert hint(asking, "release", session="agent") == 0


def test_a_session_is_brought_up_before_it_is_asked_again(asking: Client) -> None:
    first = ask(asking, penstock={"session": "agent"})
    flood(asking)
    num_blocks = hint(asking, "prefetch", session="agent", retain_seconds=60)
    assert num_blocks >= 10
    wait_until(
        lambda: asking.metric("penstock_prefetched_blocks_total", result="ok") == num_blocks,
        "it is brought up",
    )
    from_disk = hits(asking, "disk")
    assert ask(asking)["choices"] == first["choices"]
    assert hits(asking, "disk") == from_disk


def test_a_prefix_is_named_by_its_prompt_or_by_its_messages(asking: Client) -> None:
    messages = [{"role": "user", "content": STORY}]
    ask(asking)
    chat = {"messages": messages, "max_tokens": 1, "temperature": 0}
    assert asking.post("/v1/chat/completions", json=chat).status_code == 200
    for prefix in ({"prompt": STORY}, {"messages": messages}):
        num_blocks = hint(asking, "retain", retain_seconds=60, **prefix)
        assert num_blocks >= 8
        assert hint(asking, "release", **prefix) == num_blocks
        assert hint(asking, "demote", **prefix) == num_blocks
    assert hint(asking, "retain", prompt=[1, 2, 3], retain_seconds=60) == 0


def test_a_chat_with_tools_is_named_by_both(local: Callable[..., Local]) -> None:
    """Templates write tools before messages: without them it would be another prefix."""
    chat = {"messages": [{"role": "user", "content": STORY}], "tools": [WEATHER]}
    with local(kv_offloading_size=0.01, chat_template=HERMES).client() as client:
        body = {**chat, "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert hint(client, "retain", retain_seconds=60, **chat) >= 8
        del chat["tools"]
        assert hint(client, "retain", retain_seconds=60, **chat) <= 1
        wrong = {"action": "release", "prompt": STORY, "tools": [WEATHER]}
        assert "requires messages" in client.post(HINTS, json=wrong).text


def test_segments_of_a_prompt_or_of_messages_are_reached(asking: Client) -> None:
    document = {"text": STORY, **MARK}
    prompt = {"segments": ["Read this: ", document, "What is it about?"]}
    fields = {"kv_mending": {"link_tokens": 8}}
    assert ask(asking, prompt, cache_salt="a", **fields)["usage"]
    parts = [{"type": "text", "text": "Another text. "}, {"type": "text", **document}]
    elsewhere = {"messages": [{"role": "user", "content": parts}]}
    for prefix in ({"prompt": {"segments": [document, "."]}}, {"prompt": prompt}, elsewhere):
        assert hint(asking, "retain", retain_seconds=60, **prefix) == 0, "it is another tenant's"
        mine = {**prefix, "cache_salt": "a"}
        num_blocks = hint(asking, "retain", retain_seconds=60, **mine)
        assert num_blocks >= 8
        flood(asking)
        assert hint(asking, "prefetch", **mine) == 0, "it is in DRAM"
        assert hint(asking, "release", **mine) == num_blocks
        flood(asking)
        assert hint(asking, "prefetch", **mine) >= num_blocks


def test_tenants_do_not_reach_each_other(asking: Client) -> None:
    ask(asking, cache_salt="a", penstock={"session": "s", "retain_seconds": 600})
    wait_until(lambda: asking.metric("penstock_retained_blocks") >= 10, "it is retained")
    for other in ({}, {"cache_salt": "b"}, {"user": "a"}, {"prompt_cache_key": "a"}):
        for action in ("release", "demote", "prefetch"):
            assert hint(asking, action, session="s", **other) == 0
            assert hint(asking, action, prompt=STORY, **other) == 0
    header = {"X-Penstock-Tenant": "a"}
    answer = asking.post(HINTS, json={"action": "release", "session": "s"}, headers=header)
    assert answer.json()["blocks"] == 0
    assert asking.metric("penstock_retained_blocks") >= 10
    assert hint(asking, "release", session="s", cache_salt="a") >= 10


@pytest.mark.parametrize(
    ("hints", "param"),
    [
        ({"sesion": "x"}, "penstock.sesion"),
        ({"session": ""}, "penstock.session"),
        ({"session": "x" * 257}, "penstock.session"),
        ({"session": 7}, "penstock.session"),
        ({"retain_seconds": 0}, "penstock.retain_seconds"),
        ({"retain_seconds": 86401}, "penstock.retain_seconds"),
        ({"retain_seconds": "300"}, "penstock.retain_seconds"),
        ({"on_end": "forget"}, "penstock.on_end"),
        ({"on_end": "release"}, "penstock"),
        ({"on_end": "demote", "retain_seconds": 3}, "penstock"),
        ({"prefetch": "x"}, "penstock.prefetch"),
        ({"prefetch": ["x"] * 17}, "penstock.prefetch"),
        ("retain", "penstock"),
    ],
)
def test_wrong_hints_are_refused(client: Client, hints: Any, param: str) -> None:
    body = {"prompt": "Hello", "max_tokens": 1, "penstock": hints}
    answer = client.post(COMPLETIONS, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert re.search(r"expected|should have at|did you mean session\?", error["message"])


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"action": "retain"},
        {"action": "forget", "session": "s"},
        {"action": "release"},
        {"action": "release", "session": "s", "prompt": "x"},
        {"action": "release", "session": "s", "retain_seconds": 3},
        {"action": "retain", "session": "s"},
        {"action": "retain", "session": "s", "retain_seconds": -1},
        {"action": "retain", "session": "s", "retain_seconds": 1e9},
        {"action": "release", "prompt": []},
        {"action": "release", "prompt": ["a", "b"]},
        {"action": "release", "prompt": ""},
        {"action": "release", "prompt": {}},
        {"action": "release", "prompt": {"segments": []}},
        {"action": "release", "prompt": {"segments": ["a"], "x": 1}},
        {"action": "release", "prompt": {"segments": [{"text": "a", "penstock": {"reuse": "b"}}]}},
        {"action": "release", "prompt": {"segments": [{"text": "a", **MARK}] * 1025}},
        {"action": "release", "prompt": [{"segments": ["a"]}]},
        {"action": "release", "messages": []},
        {"action": "release", "messages": [{"role": "nobody", "content": "x"}]},
        {"action": "release", "session": "s", "when": "now"},
        {"action": "release", "session": "s", "cache_salt": "x" * 1025},
    ],
    ids=lambda body: str(body)[:80],
)
def test_wrong_hints_between_requests_are_refused(client: Client, body: dict[str, Any]) -> None:
    answer = client.post(HINTS, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_where_nothing_is_offloaded_hints_do_nothing(client: Client) -> None:
    fields = {"session": "s", "retain_seconds": 60, "prefetch": ["t"]}
    plain = ask(client, "Hello", seed=1)
    assert ask(client, "Hello", seed=1, penstock=fields)["choices"] == plain["choices"]
    assert hint(client, "retain", session="s", retain_seconds=60) == 0
    assert client.post(HINTS, json={"action": "release", "session": "s"}).status_code == 200
    other = {"action": "release", "session": "s", "model": "another"}
    assert client.post(HINTS, json=other).status_code == 404


def test_hints_want_the_key_where_there_is_one(local: Callable[..., Local]) -> None:
    with local(settings=AppSettings(api_key="secret")).client() as client:
        body = {"action": "release", "session": "s"}
        assert client.post(HINTS, json=body).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert client.post(HINTS, json=body, headers=key).status_code == 200


def test_the_official_client_sends_them_beside_its_own_fields(tiered: Local) -> None:
    with (
        tiered.client() as client,
        openai.OpenAI(base_url=f"{tiered.url}/v1", api_key="any", max_retries=0) as ai,
    ):
        ai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": STORY}],
            max_tokens=1,
            extra_body={"penstock": {"session": "agent", "retain_seconds": 60}},
        )
        wait_until(lambda: client.metric("penstock_retained_blocks") >= 8, "it is retained")
