"""Two vLLM engines, each a process of its own, share a real Redis."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from conftest import BLOCK, Faults, Start, Vllm, tokens

from servers import is_skipped
from servers.redis_server import WHY_NOT, RedisServer

pytestmark = pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


def num_values(server: RedisServer) -> int:
    import redis

    client = redis.Redis(port=server.port)
    return client.dbsize()  # type: ignore[return-value]


def test_one_engine_loads_what_another_saved(
    start: Start, plain: Vllm, faults: Faults, server: RedisServer
) -> None:
    prompts = [tokens(6 * BLOCK + 3, 300), tokens(9 * BLOCK + 5, 301)]
    expected = plain.answers(prompts)
    a = start(remote=server.url, always_load=True, set={"remote.lookup_deadline_seconds": 10})
    assert a.answers(prompts) == expected
    end = time.monotonic() + 60
    while num_values(server) < 15:
        assert time.monotonic() < end
        time.sleep(0.1)
    b = start(remote=server.url, always_load=True, set={"remote.lookup_deadline_seconds": 10})
    for prompt, answer in zip(prompts, expected, strict=True):
        full = (len(prompt) - 1) // BLOCK * BLOCK
        assert b.answer(prompt) == (answer, {"remote": full})
    # A server that hangs, and one that is gone: what is not here is computed.
    server.pause()
    others = [tokens(4 * BLOCK + 1, seed) for seed in (302, 303)]
    assert b.answers(others) == plain.answers(others)
    server.resume()
    server.kill()
    others = [tokens(4 * BLOCK + 1, seed) for seed in (304, 305)]
    assert b.answers(others) == plain.answers(others)
    server.start()
