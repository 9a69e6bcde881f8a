"""A request's story: what it did when, where its KV came from; and who is in the engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tiny import BLOCK_BYTES, BLOCK_TOKENS, always_load
from tools import flip_bit

from penstock.config import Config, DiskConfig, HostConfig
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.residency import ResidencyConfig
from penstock.events import Event, RequestStory
from penstock.types import Origin, Tier, Verdict

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def ids(num: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 40_000) for _ in range(num)]


class Stage:
    """An engine, and what it has told."""

    def __init__(self, loaded: LoadedModel, num_blocks: int, tiers: Config | None = None) -> None:
        self.told: list[RequestStory] = []
        config = EngineConfig(
            num_blocks * BLOCK_BYTES, BLOCK_TOKENS, residency=ResidencyConfig(cold=False)
        )
        self.engine = Engine(loaded, config, tiers, (self._hear,))

    def _hear(self, event: Event) -> None:
        if isinstance(event, RequestStory):
            self.told.append(event)

    def ask(self, name: str, prompt: list[int], **options: Any) -> RequestStory:
        self.engine.add(name, prompt, PARAMS, **options)
        while self.engine.has_work:
            self.engine.step()
        if self.engine.offloader is not None:
            assert self.engine.offloader.drain(30)
            self.engine.step()
        return self.told[-1]


@pytest.fixture
def stages(loaded: LoadedModel) -> Any:
    made: list[Stage] = []

    def make(*args: Any) -> Stage:
        made.append(Stage(loaded, *args))
        return made[-1]

    yield make
    for stage in made:
        stage.engine.close()


def dram(num: int, folder: Path | None = None) -> Config:
    disk = DiskConfig()
    if folder is not None:
        disk = DiskConfig(path=str(folder), size_bytes=512 * (BLOCK_BYTES + 512) + 65536)
    return Config(HostConfig(size_bytes=num * BLOCK_BYTES), disk)


def test_a_prompt_nobody_knows(stages: Any) -> None:
    told = stages(64).ask("one", ids(70), origin=Origin("mine"), tenant="somebody")
    assert (told.request_id, told.origin.request_id) == ("one", "mine")
    assert [stage.phase for stage in told.stages] == ["waiting", "running"]
    assert told.stages[0].start == 0.0
    assert told.stages[1].start <= told.first_token_seconds <= told.seconds
    assert (told.num_prompt, told.num_output, told.num_cached) == (70, 12, 0)
    assert (told.matched, told.found, told.lost) == ((), (), ())
    assert told.reason == "length"
    assert (told.block_tokens, told.block_bytes) == (BLOCK_TOKENS, BLOCK_BYTES)
    assert "somebody" not in repr(told)


def test_a_prompt_that_is_loaded(stages: Any) -> None:
    stage = stages(16, dram(64))
    always_load(stage.engine)
    prompt = ids(8 * BLOCK_TOKENS + 3)
    stage.ask("one", prompt)
    stage.ask("other", ids(13 * BLOCK_TOKENS, seed=2))  # takes most of the device
    told = stage.ask("two", prompt)
    found = dict(told.found)
    assert found == dict(told.matched)
    assert found[Tier.HOST] > 0
    assert sum(found.values()) == 8
    assert told.num_cached == 8 * BLOCK_TOKENS
    assert "loading" in [each.phase for each in told.stages]
    starts = [each.start for each in told.stages]
    assert starts == sorted(starts)
    assert starts[-1] <= told.first_token_seconds


def test_blocks_that_do_not_arrive_are_told(stages: Any, tmp_path: Path) -> None:
    first = stages(64, dram(64, tmp_path))
    prompt = ids(10 * BLOCK_TOKENS + 1)
    first.ask("one", prompt)
    first.engine.close()
    (slab,) = tmp_path.glob("*/slab-00000")
    flip_bit(slab, 100)  # within the first payload
    second = stages(64, dram(64, tmp_path))
    assert second.engine.offloader.recover(30)
    told = second.ask("two", prompt)
    assert dict(told.matched) == {Tier.DISK: 10}
    assert dict(told.lost)[Verdict.CORRUPT] == 1
    assert sum(dict(told.found).values()) < 10


def test_preemption_is_part_of_the_story(stages: Any) -> None:
    stage = stages(16, dram(256))
    for number in range(6):
        stage.engine.add(str(number), ids(5 * BLOCK_TOKENS, seed=number), PARAMS)
    while stage.engine.has_work:
        stage.engine.step()
    assert stage.engine.scheduler.num_preemptions > 0
    preempted = [told for told in stage.told if told.num_preemptions]
    assert preempted
    for told in preempted:
        phases = [each.phase for each in told.stages]
        assert phases.count("waiting") == told.num_preemptions + 1
        assert phases[-1] == "running"


def test_given_up_before_it_ran(stages: Any) -> None:
    stage = stages(64)
    stage.engine.add("one", ids(20), PARAMS)
    stage.engine.abort("one")
    (told,) = stage.told
    assert (told.reason, told.first_token_seconds, told.num_output) == ("abort", None, 0)


def test_the_census_counts_everybody(stages: Any) -> None:
    stage = stages(16)
    for number in range(6):
        stage.engine.add(str(number), ids(60), PARAMS, origin=Origin(f"r{number}"), tenant="t")
    assert [seen.phase for seen in stage.engine.census()] == ["waiting"] * 6
    for _ in range(3):
        stage.engine.step()
    census = stage.engine.census()
    assert {seen.client_id for seen in census} == {f"r{number}" for number in range(6)}
    assert {seen.phase for seen in census} == {"running", "waiting"}
    for seen in census:
        assert seen.num_prompt == 60
        assert (seen.num_resident > 0) == (seen.phase == "running")
        assert seen.num_cold == 0
        assert seen.seconds >= 0
        assert "tenant" not in repr(seen)
    while stage.engine.has_work:
        stage.engine.step()
    assert stage.engine.census() == []
