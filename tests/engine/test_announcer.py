"""What a router is told is what the engine's books say, whatever happens to the blocks."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kv_events.router import CPU, DISK, GPU, SubscribedRouter
from tiny import BLOCK_BYTES, BLOCK_TOKENS

from penstock.config import Config, DiskConfig, HostConfig
from penstock.costs.choose import LoadChoice
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import Request
from penstock.engine.residency import ResidencyConfig
from penstock.engine.two_ended_loads import TwoEndedLoads
from penstock.kv_events.held import short_hash
from penstock.kv_events.publisher import KvEventPublisher
from penstock.types import Tier

HOT = ResidencyConfig(cold=False)
COLD = ResidencyConfig(prefix_tokens=16, tail_tokens=16, high_watermark=0.9, low_watermark=0.8)
TURNS = replace(HOT, turn_seconds=0.001)


@pytest.fixture
def publisher() -> Iterator[KvEventPublisher]:
    made = KvEventPublisher("tcp://127.0.0.1:*")
    yield made
    made.close()


@pytest.fixture
def router(publisher: KvEventPublisher) -> Iterator[SubscribedRouter]:
    made = SubscribedRouter(publisher.endpoint)
    yield made
    made.close()


def make_engine(
    loaded: LoadedModel,
    folder: Path,
    publisher: KvEventPublisher,
    residency: ResidencyConfig = HOT,
) -> Engine:
    tiers = Config(
        HostConfig(size_bytes=24 * BLOCK_BYTES, huge_pages=False),
        DiskConfig(path=str(folder / "kv"), size_bytes=64 * (BLOCK_BYTES + 512) + 65536),
    )
    settings = EngineConfig(
        18 * BLOCK_BYTES,
        BLOCK_TOKENS,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        residency=residency,
    )
    return Engine(loaded, settings, tiers, (publisher.held,), publisher)


def run(engine: Engine, seed: int, count: int) -> None:
    """Requests with shared prefixes, of three tenants. Some are aborted."""
    rng = random.Random(seed)
    heads = [[rng.randrange(1, 40_000) for _ in range(rng.randint(16, 96))] for _ in range(6)]
    live: list[str] = []
    while count or engine.has_work:
        if count and rng.random() < 0.4:
            count -= 1
            tail = [rng.randrange(1, 40_000) for _ in range(rng.randint(1, 60))]
            params = SamplingParams(temperature=0.0, max_tokens=rng.choice((1, 20, 40)))
            live.append(f"{seed}-{count}")
            tenant = rng.choice(("", "", "header:a", "header:b"))
            engine.add(live[-1], rng.choice(heads) + tail, params, tenant=tenant)
        if live and rng.random() < 0.02:
            engine.abort(live.pop(rng.randrange(len(live))))
        engine.step()
    end = time.monotonic() + 60
    while engine.is_moving:
        assert time.monotonic() < end
        engine.step()
    engine.check()


def truth(engine: Engine) -> dict[tuple[str, str | None], set[int]]:
    assert engine.offloader is not None
    ledgers = engine.offloader._stack.ledgers
    return {
        GPU: {short_hash(key) for key in engine.pool._slot_of},
        CPU: {short_hash(key) for key in ledgers.of(Tier.HOST).ready_keys()},
        DISK: {short_hash(key) for key in ledgers.of(Tier.DISK).ready_keys()},
    }


def check_router(engine: Engine, router: SubscribedRouter) -> None:
    expected = truth(engine)
    assert all(expected.values())
    end = time.monotonic() + 60
    while {place: router.held[place] for place in expected} != expected:
        assert time.monotonic() < end, "the router does not know the truth"
        router.wait()


@pytest.mark.parametrize("residency", [HOT, COLD, TURNS], ids=["preempted", "cold", "in turns"])
def test_the_router_knows_the_books(
    loaded: LoadedModel,
    tmp_path: Path,
    publisher: KvEventPublisher,
    router: SubscribedRouter,
    residency: ResidencyConfig,
) -> None:
    engine = make_engine(loaded, tmp_path, publisher, residency)
    for seed in range(3):
        run(engine, seed, 40)
        check_router(engine, router)
    placement = engine.scheduler.placement
    assert placement.num_left or not residency.cold
    engine.close()
    while any(router.held.values()):
        router.wait()


def test_blocks_of_two_ended_loads_are_published(
    loaded: LoadedModel, tmp_path: Path, publisher: KvEventPublisher, router: SubscribedRouter
) -> None:
    engine = make_engine(loaded, tmp_path, publisher)
    engine.scheduler._choose = lambda match, num_past: LoadChoice(0, num_two_ended=match.num_blocks)
    joins = 0
    join = TwoEndedLoads.try_to_join

    def count_joins(loads: TwoEndedLoads, request: Request) -> bool:
        nonlocal joins
        has_joined = join(loads, request)
        joins += has_joined
        return has_joined

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TwoEndedLoads, "try_to_join", count_joins)
        run(engine, 5, 60)
    assert joins
    check_router(engine, router)
    engine.close()


def test_after_a_fault_the_router_knows_what_is_left(
    loaded: LoadedModel, tmp_path: Path, publisher: KvEventPublisher, router: SubscribedRouter
) -> None:
    engine = make_engine(loaded, tmp_path, publisher)
    run(engine, 1, 40)
    check_router(engine, router)
    on_disk = truth(engine)[DISK]
    engine._rebuild(must_reopen=True)
    assert engine.offloader is not None
    engine.offloader.recover()
    engine.step()
    assert truth(engine) == {GPU: set(), CPU: set(), DISK: on_disk}
    run(engine, 1, 40)  # the same prompts: the blocks on disk are recognized
    expected = truth(engine)
    end = time.monotonic() + 60
    while not (
        router.held[GPU] == expected[GPU]
        and router.held[CPU] == expected[CPU]
        and router.held[DISK] <= expected[DISK]  # what nobody asked for again is not announced
    ):
        assert time.monotonic() < end, "the router does not know the truth"
        router.wait()
    assert router.held[DISK] & on_disk
    engine.close()
