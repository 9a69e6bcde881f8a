"""Hints through the engine: what is kept changes, and no token does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.test_engine import prompts, run
from tiny import BLOCK_BYTES, BLOCK_TOKENS, always_load

from penstock.config import Config, DiskConfig, HostConfig
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.residency import ResidencyConfig
from penstock.engine.service import Service, Stopped
from penstock.errors import ConfigError
from penstock.hints import Hint
from penstock.keys import KeyChain
from penstock.types import BlockKey, Tier

Engines = Callable[..., Engine]


@pytest.fixture
def engines(loaded: LoadedModel, tmp_path: Path) -> Iterator[Engines]:
    made: list[Engine] = []

    def make(num_host: int = 64, num_blocks: int = 64, *, cold: bool = False) -> Engine:
        """With little DRAM, much disk, and a policy that is not the subject here."""
        residency = ResidencyConfig(cold, prefix_tokens=16, tail_tokens=16)
        config = EngineConfig(num_blocks * BLOCK_BYTES, BLOCK_TOKENS, 64, residency=residency)
        disk = DiskConfig(str(tmp_path / str(len(made))), size_bytes=1024 * (BLOCK_BYTES + 512))
        host = HostConfig(size_bytes=num_host * BLOCK_BYTES, policy="lru")
        made.append(Engine(loaded, config, Config(host, disk)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def params(**hints: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, kv_hints=hints or None)


def keys_of(engine: Engine, ids: list[int]) -> list[BlockKey]:
    return KeyChain(engine.namespace, ids).keys


def num_in(engine: Engine, tier: Tier, ids: list[int]) -> int:
    assert engine.offloader is not None
    return engine.offloader.match(keys_of(engine, ids)).num_from(tier)


def flood(engine: Engine, seed: int = 5) -> None:
    """More than DRAM holds, all of it new."""
    for number in range(12):
        run(engine, prompts(1, seed * 100 + number, shared=140), params())


PROMPT = prompts(1, 3, shared=160)[0][:165]  # ten full blocks


def test_an_agents_kv_is_in_dram_after_its_pause_and_others_is_not(engines: Engines) -> None:
    engine, plain = engines(), engines()
    hinted = run(engine, [PROMPT], params(session="agent", retain_seconds=3600))
    assert run(plain, [PROMPT], params()) == hinted
    for each in (engine, plain):
        flood(each)
    assert num_in(engine, Tier.HOST, PROMPT) == 10
    assert num_in(plain, Tier.HOST, PROMPT) == 0
    for each in (engine, plain):
        assert run(each, [PROMPT], params()) == hinted
    assert engine.hint(Hint("release", "agent")) == 10
    flood(engine, 6)
    assert num_in(engine, Tier.HOST, PROMPT) == 0
    engine.check()


def test_a_prefetch_brings_a_session_up_before_its_next_request(engines: Engines) -> None:
    engine = engines()
    first = run(engine, [PROMPT], params(session="agent"))
    flood(engine)
    assert num_in(engine, Tier.DISK, PROMPT) == 10
    assert engine.hint(Hint("prefetch", "nobody")) == 0
    assert engine.hint(Hint("prefetch", "agent"), tenant="another") == 0
    assert engine.hint(Hint("prefetch", "agent")) == 10
    assert engine.offloader is not None
    while engine.offloader.is_prefetching:
        engine.step()
        engine.offloader.pause(0.001)
    assert num_in(engine, Tier.HOST, PROMPT) == 10
    always_load(engine)
    request = engine.add("next", PROMPT, params())
    while engine.has_work:
        engine.step()
    assert request.output_ids == first[0]
    assert request.found[Tier.DISK] == 0
    assert request.found[Tier.HOST] > 0


def test_a_request_may_name_the_session_that_comes_next(engines: Engines) -> None:
    engine = engines()
    run(engine, [PROMPT], params(session="agent"))
    flood(engine)
    run(engine, prompts(1, 77, shared=10), params(prefetch=["agent", "nobody"]))
    assert num_in(engine, Tier.HOST, PROMPT) == 10


def test_a_request_given_up_while_it_waits_leaves_what_is_known_of_its_session(
    engines: Engines,
) -> None:
    engine = engines()
    run(engine, [PROMPT], params(session="agent"))
    engine.add("gone", PROMPT, params(session="agent"))
    engine.abort("gone")
    assert engine.hint(Hint("retain", session="agent", retain_seconds=60)) == 10


def test_hints_for_a_prefix_need_no_session(engines: Engines) -> None:
    engine = engines()
    run(engine, [PROMPT], params())
    assert engine.hint(Hint("retain", None, 600.0), PROMPT) == 10
    flood(engine)
    assert num_in(engine, Tier.HOST, PROMPT) == 10
    assert engine.hint(Hint("release"), PROMPT, tenant="another") == 0
    assert engine.hint(Hint("release"), PROMPT) == 10
    assert engine.hint(Hint("demote"), PROMPT) == 10
    for number in range(3):  # far less than DRAM holds
        run(engine, prompts(1, 900 + number, shared=100), params())
    assert num_in(engine, Tier.HOST, PROMPT) < 10


def test_what_is_used_once_can_go_first(engines: Engines) -> None:
    engine = engines(num_host=40)
    keep, once = prompts(1, 11, shared=160)[0][:165], prompts(1, 12, shared=160)[0][:165]
    run(engine, [keep], params())
    run(engine, [once], params(on_end="demote"))
    run(engine, [prompts(1, 13, shared=340)[0][:345]], params())
    assert num_in(engine, Tier.HOST, keep) == 10
    assert num_in(engine, Tier.HOST, once) == 9


def test_all_that_may_be_retained_keeps_nobody_from_running(engines: Engines) -> None:
    """A sequence that needs nearly all of DRAM, to be read there, beside one that is retained."""
    engine = engines(num_host=48, num_blocks=12, cold=True)
    first = run(engine, [PROMPT], params(session="agent", retain_seconds=3600))
    assert engine.offloader is not None
    assert engine.offloader.num_retained == 10
    long = prompts(1, 21, shared=800)[0][:800]  # 50 blocks of 60
    answer = run(engine, [long], params())
    assert engine.offloader.num_retained < 10, "it gave way"
    assert answer == run(engines(num_host=256, num_blocks=256), [long], params())
    assert run(engine, [PROMPT], params()) == first
    engine.check()


def test_without_tiers_hints_do_nothing(loaded: LoadedModel) -> None:
    engine = Engine(loaded, EngineConfig(64 * BLOCK_BYTES, BLOCK_TOKENS))
    run(engine, [PROMPT], params(session="agent", retain_seconds=10, prefetch=["x"]))
    assert engine.hint(Hint("retain", "agent", 10.0)) == 0
    engine.close()


def test_wrong_hints_are_refused_with_the_parameters() -> None:
    with pytest.raises(ConfigError, match="hint on_end is 'x'"):
        params(on_end="x")


def test_a_service_follows_hints_until_it_stops(engines: Engines) -> None:
    async def main() -> None:
        service = Service(engines())
        async with await service.submit(PROMPT, params(session="agent")) as stream:
            async for _ in stream:
                pass
        assert await service.hint(Hint("retain", "agent", 60.0)) == 10
        assert await service.hint(Hint("release", "agent"), tenant="another") == 0
        await service.close()
        with pytest.raises(Stopped):
            await service.hint(Hint("release", "agent"))

    asyncio.run(main())
