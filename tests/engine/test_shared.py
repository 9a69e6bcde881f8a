"""Engines that share a real Redis: one loads what another computed, and the tokens are the same."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import BLOCK_BYTES, BLOCK_TOKENS, always_load

from penstock.config import ENV_REMOTE_SECRET, Config, HostConfig, RemoteConfig
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.residency import ResidencyConfig
from penstock.events import Event, Lost, Moved
from penstock.types import Tier
from servers import is_skipped
from servers.redis_server import WHY_NOT, RedisServer

pytestmark = pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
Engines = Callable[..., Engine]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


@pytest.fixture
def engines(loaded: LoadedModel, server: RedisServer) -> Iterator[Engines]:
    made: list[Engine] = []

    def make(
        num_host: int = 256,
        num_blocks: int = 256,
        residency: ResidencyConfig | None = None,
        **remote: Any,
    ) -> Engine:
        settings: dict[str, Any] = {"url": server.url, "lookup_deadline_seconds": 5.0, **remote}
        tiers = Config(
            HostConfig(size_bytes=num_host * BLOCK_BYTES), remote=RemoteConfig(**settings)
        )
        config = EngineConfig(
            num_blocks * BLOCK_BYTES,
            BLOCK_TOKENS,
            128,
            residency=residency or ResidencyConfig(),
        )
        made.append(Engine(loaded, config, tiers))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> Callable[[list[list[int]]], list[list[int]]]:
    def answers(prompts: list[list[int]]) -> list[list[int]]:
        return run(Engine(loaded, EngineConfig(256 * BLOCK_BYTES, BLOCK_TOKENS, 128)), prompts)

    return answers


def run(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    requests = [
        engine.add(f"{time.monotonic_ns()} {number}", prompt, GREEDY)
        for number, prompt in enumerate(prompts)
    ]
    end = time.monotonic() + 120
    while engine.has_work:
        engine.step()
        assert time.monotonic() < end
    return [request.output_ids for request in requests]


def some_prompts(num: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    head = [rng.randrange(1, 40_000) for _ in range(64)]
    return [
        head + [rng.randrange(1, 40_000) for _ in range(rng.randint(50, 300))] for _ in range(num)
    ]


def drained(engine: Engine) -> None:
    assert engine.offloader is not None
    assert engine.offloader.drain(30)
    engine.check()


def watch(engine: Engine) -> list[Event]:
    seen: list[Event] = []
    assert engine.offloader is not None
    engine.offloader.observe(seen.append)
    return seen


def num_loaded(seen: list[Event]) -> int:
    return sum(e.num_blocks for e in seen if isinstance(e, Moved) and e.source is Tier.REMOTE)


def test_one_loads_what_another_computed(engines: Engines, plain: Any) -> None:
    prompts = some_prompts(6)
    expected = plain(prompts)
    a, b = engines(), engines()
    assert run(a, prompts) == expected
    drained(a)
    always_load(b)
    seen = watch(b)
    assert run(b, prompts) == expected
    drained(b)
    assert num_loaded(seen) > 30


def test_what_fell_out_of_dram_comes_back_from_there(engines: Engines, plain: Any) -> None:
    prompts = some_prompts(8)
    engine = engines(num_host=32, num_blocks=64)
    always_load(engine)
    assert run(engine, prompts) == plain(prompts)
    drained(engine)
    seen = watch(engine)
    assert run(engine, prompts) == plain(prompts)
    assert num_loaded(seen) > 10


@pytest.mark.parametrize("trouble", ["killed", "hangs", "evicts", "empty"])
def test_whatever_becomes_of_the_server_the_tokens_are_the_same(
    engines: Engines, plain: Any, server: RedisServer, trouble: str
) -> None:
    import redis

    prompts = some_prompts(10, seed=2)
    expected = plain(prompts)
    a = engines()
    assert run(a, prompts) == expected
    drained(a)
    b = engines(timeout_seconds=0.5, lookup_deadline_seconds=0.2)
    client = redis.Redis(port=server.port)

    def disturb() -> None:
        time.sleep(0.02)
        if trouble == "killed":
            server.kill()
        elif trouble == "hangs":
            server.pause()
        elif trouble == "evicts":
            held: Any = client.keys()
            client.delete(*held[::3])
        else:
            client.flushall()

    thread = threading.Thread(target=disturb)
    thread.start()
    assert run(b, prompts) == expected
    assert run(b, some_prompts(4, seed=3)) == plain(some_prompts(4, seed=3))
    thread.join()
    client.close()
    if trouble == "hangs":
        server.resume()
    drained(b)


def test_tenants_share_nothing(engines: Engines, plain: Any) -> None:
    prompts = some_prompts(2)
    a, b = engines(), engines()
    a.add("a", prompts[0], GREEDY, tenant="one")
    while a.has_work:
        a.step()
    drained(a)
    seen = watch(b)
    b.add("b", prompts[0], GREEDY, tenant="two")
    while b.has_work:
        b.step()
    assert num_loaded(seen) == 0


def test_a_request_that_waits_for_an_answer_holds_up_no_other(
    engines: Engines, plain: Any, server: RedisServer
) -> None:
    prompts = some_prompts(2)
    engine = engines(lookup_deadline_seconds=60.0, timeout_seconds=60.0)
    server.pause()
    waiting = engine.add("waits", prompts[0], GREEDY)
    assert engine.offloader is not None
    # Another that asks for nothing: it is too short for one block.
    other = engine.add("short", prompts[1][: BLOCK_TOKENS - 1], GREEDY)
    end = time.monotonic() + 60
    while other.finish_reason is None:
        engine.step()
        assert time.monotonic() < end
    assert not waiting.output_ids
    server.resume()
    while engine.has_work:
        engine.step()
    assert waiting.output_ids == plain([prompts[0]])[0]


def test_an_aborted_request_waits_for_no_answer(engines: Engines, server: RedisServer) -> None:
    engine = engines(lookup_deadline_seconds=60.0, timeout_seconds=1.0)
    server.pause()
    engine.add("waits", some_prompts(1)[0], GREEDY)
    engine.step()
    engine.abort("waits")
    assert not engine.has_work
    server.resume()
    drained(engine)


def test_encrypted_blocks_that_were_saved_again_are_their_tenants(
    engines: Engines, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_REMOTE_SECRET, "a secret of sixteen or more characters")
    prompts = some_prompts(5)
    expected = plain(prompts)
    # Shared at its second use, which is when it is copied to DRAM again.
    small = ResidencyConfig(prefix_tokens=16, tail_tokens=16)
    a = engines(num_blocks=24, residency=small, encrypt=True, admit="second-use")
    assert a.offloader is not None
    for number, prompt in enumerate(prompts):
        a.add(str(number), prompt, GREEDY, tenant="north")
    while a.has_work:
        a.step()
        assert a.offloader.drain(30)
        a.offloader.empty_host()  # what leaves the device is copied to DRAM, and down, once more
    drained(a)
    a.close()
    b = engines(encrypt=True)
    always_load(b)
    seen = watch(b)
    requests = [
        b.add(str(number), prompt, GREEDY, tenant="north") for number, prompt in enumerate(prompts)
    ]
    while b.has_work:
        b.step()
    drained(b)
    assert [request.output_ids for request in requests] == expected
    assert [event for event in seen if isinstance(event, Lost)] == []
    assert num_loaded(seen) > 0
