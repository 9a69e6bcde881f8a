"""Bodies that weigh little and would cost much: refused at their first fault, within bounds."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest
from pydantic import BaseModel, model_validator
from server.running import Client
from starlette.requests import Request

from penstock.server.body import parse_body, read_body
from penstock.server.body_limits import MAX_CONTAINERS, MAX_NAMES, MAX_VALUES, check_structure
from penstock.server.errors import ApiError
from penstock.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    HintRequest,
    TokenizeRequest,
)

NUM_BYTES = 2_900_000
HOSTILE = {
    "empty messages": b'{"messages": [%s]}' % b",".join([b"{}"] * (NUM_BYTES // 3)),
    "numbers for messages": b'{"messages": [%s]}' % b",".join([b"1"] * (NUM_BYTES // 2)),
    "wrong roles": b'{"messages": [%s]}' % b",".join([b'{"role":"x"}'] * (NUM_BYTES // 13)),
    "half as wrong": b'{"messages": [%s]}' % b",".join([b'{"role":"user"}', b"1"] * 32_000),
    "many parts": b'{"messages": [{"role": "user", "content": [%s]}]}'
    % b",".join([b"1"] * (NUM_BYTES // 2)),
    "lists in a field nobody reads": b'{"metadata": [%s]}' % b",".join([b"[]"] * (NUM_BYTES // 3)),
    "unknown fields": b"{%s}" % b",".join(b'"%d":1' % i for i in range(NUM_BYTES // 10)),
    "biases": b'{"logit_bias": {%s}}' % b",".join(b'"%d":""' % i for i in range(120_000)),
    "stops": b'{"prompt": 5, "stop": [%s]}' % b",".join([b'""'] * (NUM_BYTES // 3)),
    "prompts": b'{"prompt": [%s]}' % b",".join([b'""'] * (NUM_BYTES // 3)),
    "deep": b'{"metadata": %s%s}' % (b"[" * (NUM_BYTES // 2), b"]" * (NUM_BYTES // 2)),
    "a long name": b'{"messages": [{"role": "user", "%s": 1}, 1]}' % (b"n" * NUM_BYTES),
    "a long wrong value": b'{"messages": "%s"}' % (b"v" * NUM_BYTES),
    "a long wrong role": b'{"messages": [{"role": "%s"}]}' % (b"r" * NUM_BYTES),
}
MODELS: list[type[BaseModel]] = [
    ChatRequest,
    CompletionRequest,
    HintRequest,
    TokenizeRequest,
    DetokenizeRequest,
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", HOSTILE)
def test_one_fault_is_told_in_few_words(model: type[BaseModel], name: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(HOSTILE[name], model)
    assert refused.value.status == 400
    assert len(refused.value.envelope()) < 1000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_a_server_refuses_it_and_goes_on(client: Client, path: str) -> None:
    for name in ("empty messages", "wrong roles", "deep", "a long name"):
        headers = {"Content-Type": "application/json"}
        answer = client.post(path, content=HOSTILE[name], headers=headers)
        assert (answer.status_code, len(answer.text) < 1000) == (400, True)
    client.check_serves()


MEASURE = """
import resource, sys
from penstock.server.body import parse_body
from penstock.server.errors import ApiError
from penstock.server.schema import ChatRequest

data = sys.stdin.buffer.read()
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")  # the peak starts anew from here

def peak_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

before = peak_kib()
try:
    parse_body(data, ChatRequest)
except ApiError:
    print(peak_kib() - before)
"""


@pytest.mark.parametrize("name", ["empty messages", "numbers for messages", "half as wrong"])
def test_the_memory_is_a_small_multiple_of_the_body(name: str) -> None:
    data = HOSTILE[name]
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE], input=data, capture_output=True, check=True
    )
    # Before there were bounds it was a hundred times the body and more.
    assert int(measured.stdout) * 1024 < 24 * len(data)


def test_limits_count_what_stands_outside_of_strings() -> None:
    text = json.dumps({"prompt": '{["\\,:' * MAX_VALUES}).encode()
    check_structure(text)
    for item, most, what in (
        (b"1", MAX_VALUES, "values"),
        (b'{"a":1}', MAX_CONTAINERS, "objects and lists"),
        (b"[]", MAX_CONTAINERS, "objects and lists"),
    ):
        check_structure(b"[%s]" % b",".join([item] * (most - 1)))
        with pytest.raises(ApiError, match=what):
            check_structure(b'["a", %s]' % b",".join([item] * (most + 1)))
    with pytest.raises(ApiError, match="names"):
        check_structure(b"{%s}" % b",".join([b'"a":1'] * (MAX_NAMES + 1)))
    for broken in (b'"', b'"\\', b'[,"'):  # no JSON: whatever is counted, it ends
        with suppress(ApiError):
            check_structure(broken * (MAX_VALUES + 1))


class _Where(BaseModel):
    """Notes the thread in which it is read."""

    prompt: str

    @model_validator(mode="before")
    @classmethod
    def _note(cls, data: Any) -> Any:
        THREADS.append(threading.get_ident())
        return data


THREADS: list[int] = []


async def _read(content: bytes) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    await read_body(Request(scope, receive), _Where, 1 << 25)  # type: ignore[arg-type]


def test_a_large_body_is_read_beside_the_loop() -> None:
    THREADS.clear()
    asyncio.run(_read(json.dumps({"prompt": "x" * 200_000}).encode()))
    asyncio.run(_read(json.dumps({"prompt": "x"}).encode()))
    large, small = THREADS
    assert large != threading.get_ident()
    assert small == threading.get_ident()
