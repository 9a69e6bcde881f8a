"""Prompts computed from the front while their back is loaded: the tokens are the same."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiny import BLOCK_BYTES, BLOCK_TOKENS

from penstock.config import Config, HostConfig, RemoteConfig
from penstock.costs.choose import LoadChoice
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.residency import ResidencyConfig
from penstock.stores import memory
from penstock.stores.memory import MemoryClient
from penstock.types import Match

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
Engines = Callable[..., Engine]


@pytest.fixture
def store() -> Iterator[MemoryClient]:
    memory.forget_shared("meetings")
    yield memory.open_shared("memory://meetings", timeout_seconds=1.0)
    memory.forget_shared("meetings")


@pytest.fixture
def engines(
    loaded: LoadedModel, store: MemoryClient, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engines]:
    made: list[Engine] = []

    def make(
        *,
        meets: bool = True,
        num_blocks: int = 256,
        num_host: int = 256,
        lead: Callable[[Match], int] = lambda match: 0,
        slowly: float | None = None,
        cold: bool = False,
    ) -> Engine:
        def choose(self: Engine, match: Match, num_past: int) -> LoadChoice:
            if not meets:
                return LoadChoice(0)
            num_lead = lead(match)
            return LoadChoice(num_lead, num_two_ended=match.num_blocks - num_lead)

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "_choose", choose)
            tiers = Config(
                HostConfig(size_bytes=num_host * BLOCK_BYTES),
                remote=RemoteConfig(url="memory://meetings", lookup_deadline_seconds=10.0),
            )
            residency = ResidencyConfig(cold=cold)
            config = EngineConfig(num_blocks * BLOCK_BYTES, BLOCK_TOKENS, 32, residency=residency)
            made.append(Engine(loaded, config, tiers))
        store.bytes_per_second = float("inf") if slowly is None else slowly * BLOCK_BYTES
        return made[-1]

    yield make
    store.bytes_per_second = float("inf")
    for engine in made:
        engine.close()


def run(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    requests = [
        engine.add(f"{time.monotonic_ns()} {number}", prompt, GREEDY)
        for number, prompt in enumerate(prompts)
    ]
    end = time.monotonic() + 120
    while engine.has_work:
        engine.step()
        assert time.monotonic() < end
    settle(engine)
    return requests


def settle(engine: Engine) -> None:
    assert engine.offloader is not None
    end = time.monotonic() + 60
    while not engine.scheduler.idle:
        engine.step()
        assert time.monotonic() < end
    assert engine.offloader.drain(30)
    engine.step()
    engine.check()
    assert engine.pool.num_available == engine.pool.num_blocks, "a block is held by nobody"


def some_prompts(num: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 40_000) for _ in range(rng.randint(200, 400))] for _ in range(num)]


@pytest.fixture
def filled(engines: Engines) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts whose blocks lie in the store, and their answers."""
    prompts = some_prompts(5)
    prompts.append(prompts[0][: 10 * BLOCK_TOKENS])  # whole blocks: its last token is in one
    answers = [request.output_ids for request in run(engines(meets=False), prompts)]
    return prompts, answers


@pytest.mark.parametrize("slowly", [None, 2000.0, 300.0, 60.0])
def test_whatever_the_rate_the_tokens_are_the_same(
    engines: Engines, filled: Any, slowly: float | None
) -> None:
    prompts, answers = filled
    engine = engines(slowly=slowly)
    requests = [run(engine, [prompt])[0] for prompt in prompts]
    assert [request.output_ids for request in requests] == answers
    if slowly is None or slowly > 1000:
        assert sum(request.num_loaded_tokens for request in requests) > 0
    for request in requests:
        assert request.num_cached_tokens < len(request.prompt_ids)
        assert not request.num_recomputed_tokens


def test_many_at_once_with_leading_loads_and_a_pool_that_is_too_small(
    engines: Engines, filled: Any
) -> None:
    prompts, answers = filled
    for cold in (False, True):
        engine = engines(
            num_blocks=60, lead=lambda match: match.num_blocks // 3, slowly=1000.0, cold=cold
        )
        for _ in range(2):
            assert [request.output_ids for request in run(engine, prompts)] == answers


@pytest.mark.parametrize("fault", ["missing", "corrupt", "failing", "random"])
def test_a_piece_that_does_not_come_is_computed(
    engines: Engines, filled: Any, store: MemoryClient, fault: str
) -> None:
    prompts, answers = filled
    rng = random.Random(3)
    engine = engines(slowly=2000.0)
    for prompt, answer in zip(prompts, answers, strict=True):
        kept = dict(store.values)
        for name in list(store.values):
            if fault in ("missing", "random") and rng.random() < 0.1:
                del store.values[name]
            elif fault in ("corrupt", "random") and rng.random() < 0.1:
                store.values[name] = store.values[name][:-1] + b"\x55"
        request = engine.add(str(time.monotonic_ns()), prompt, GREEDY)
        while engine.has_work:
            engine.step()
            store.faults.failing = fault == "failing" and rng.random() < 0.5
        store.faults.failing = False
        assert request.output_ids == answer
        store.values.update(kept)
    settle(engine)


def test_a_request_may_end_at_any_moment(engines: Engines, filled: Any) -> None:
    prompts, answers = filled
    engine = engines(slowly=500.0)
    for num_steps in range(12):
        engine.add("goes", prompts[num_steps % 5], GREEDY)
        stays = engine.add("stays", prompts[(num_steps + 1) % 5], GREEDY)
        for _ in range(num_steps):
            engine.step()
        engine.abort("goes")
        while engine.has_work:
            engine.step()
        assert stays.output_ids == answers[(num_steps + 1) % 5]
        settle(engine)
        assert engine.offloader is not None
        engine.offloader.empty_host()
        engine.pool.forget()


def test_a_store_slower_than_computing_is_used_no_more(
    loaded: LoadedModel, store: MemoryClient, filled: Any
) -> None:
    """By the engine's own measure."""
    prompts, answers = filled
    tiers = Config(
        HostConfig(size_bytes=256 * BLOCK_BYTES),
        remote=RemoteConfig(url="memory://meetings", lookup_deadline_seconds=10.0),
    )
    engine = Engine(loaded, EngineConfig(256 * BLOCK_BYTES, BLOCK_TOKENS, 32), tiers)
    store.bytes_per_second = BLOCK_BYTES  # a second for a block that takes less than a millisecond
    run(engine, [some_prompts(1, seed=9)[0]])  # what computing takes is known by now
    assert run(engine, [prompts[0]])[0].output_ids == answers[0]
    for prompt, answer in zip(prompts[1:], answers[1:], strict=True):
        request = run(engine, [prompt])[0]
        assert request.output_ids == answer
        # None, but for a block from the back where this machine is busy, and computing slow.
        assert request.num_loaded_tokens <= len(prompt) // 4
    engine.close()
