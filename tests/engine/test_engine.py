"""The engine with a small random model in fp32: whatever happens to KV, the tokens are the same."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import BLOCK_BYTES, BLOCK_TOKENS, always_load
from tools import flip_bit

from penstock.config import Config, DiskConfig, HostConfig
from penstock.costs import choose
from penstock.engine.admission import TooLong
from penstock.engine.attention.torch import NAME
from penstock.engine.engine import Engine, Progress
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.residency import ResidencyConfig
from penstock.errors import ConfigError
from penstock.events import Decided, Event, Moved, Refused
from penstock.keys import KeyChain
from penstock.types import Direction, Tier

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

HOT = ResidencyConfig(cold=False)  # what does not fit the device is preempted

Engines = Callable[..., Engine]


@pytest.fixture
def engines(loaded: LoadedModel) -> Iterator[Engines]:
    made: list[Engine] = []

    def make(
        num_blocks: int = 256,
        *,
        tiers: Config | None = None,
        batch: int = 512,
        residency: ResidencyConfig = HOT,
    ) -> Engine:
        size = num_blocks * BLOCK_BYTES
        config = EngineConfig(size, BLOCK_TOKENS, batch, residency=residency)
        made.append(Engine(loaded, config, tiers))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def tiers(num_host: int, directory: Path | None = None, num_disk: int = 512) -> Config:
    disk = DiskConfig()
    if directory is not None:
        disk = DiskConfig(path=str(directory), size_bytes=num_disk * (BLOCK_BYTES + 512) + 65536)
    return Config(HostConfig(size_bytes=num_host * BLOCK_BYTES), disk)


def prompts(num: int, seed: int = 1, shared: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    head = [rng.randrange(1, 40_000) for _ in range(shared)]
    return [
        head + [rng.randrange(1, 40_000) for _ in range(rng.randint(1, 150))] for _ in range(num)
    ]


def run(engine: Engine, questions: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    requests = [engine.add(str(number), ids, params) for number, ids in enumerate(questions)]
    for _ in range(100_000):
        if not engine.has_work:
            break
        engine.step()
    assert all(request.finish_reason for request in requests), "a request never ended"
    if engine.offloader is not None:
        assert engine.offloader.drain(30)
        engine.step()
    engine.check()
    assert engine.pool.num_available == engine.pool.num_blocks, "blocks leak"
    return [request.output_ids for request in requests]


@pytest.fixture(scope="module")
def answers(loaded: LoadedModel) -> list[list[int]]:
    """What plain transformers says, one prompt at a time."""
    found = []
    loaded.model.config._attn_implementation = "eager"
    try:
        for ids in prompts(8):
            output = loaded.model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=24,
                min_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            found.append(output[0, len(ids) :].tolist())
    finally:
        loaded.model.config._attn_implementation = NAME
    assert len({tuple(tokens) for tokens in found}) > 4, "the model says the same to everything"
    return found


def test_tokens_are_those_of_transformers(engines: Engines, answers: list[list[int]]) -> None:
    assert run(engines(), prompts(8)) == answers


@pytest.mark.parametrize("batch", [7, 16, 100])
def test_a_prompt_in_chunks_is_answered_as_the_whole(
    engines: Engines, answers: list[list[int]], batch: int
) -> None:
    assert run(engines(batch=batch), prompts(8)) == answers


def test_a_pool_too_small_for_all_recomputes_without_tiers(
    engines: Engines, answers: list[list[int]]
) -> None:
    engine = engines(16)
    assert run(engine, prompts(8)) == answers
    assert engine.scheduler.num_preemptions > 0


def test_a_pool_too_small_for_all_loads_what_it_preempted(
    engines: Engines, answers: list[list[int]]
) -> None:
    engine = engines(16, tiers=tiers(256))
    always_load(engine)
    requests = [engine.add(str(n), ids, GREEDY) for n, ids in enumerate(prompts(8))]
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in requests] == answers
    assert engine.scheduler.num_preemptions > 0
    assert sum(request.num_loaded_tokens for request in requests) > 0


def test_dram_that_spills_to_disk_changes_nothing(
    engines: Engines, answers: list[list[int]], tmp_path: Path
) -> None:
    engine = engines(16, tiers=tiers(8, tmp_path))
    assert run(engine, prompts(8)) == answers
    assert run(engine, prompts(8)) == answers


def test_a_restart_finds_its_kv_on_disk(
    engines: Engines, answers: list[list[int]], tmp_path: Path
) -> None:
    first = engines(tiers=tiers(64, tmp_path))
    assert run(first, prompts(8)) == answers
    first.close()
    second = engines(tiers=tiers(64, tmp_path))
    assert second.offloader is not None
    assert second.offloader.recover(30)
    requests = [second.add(str(n), ids, GREEDY) for n, ids in enumerate(prompts(8))]
    while second.has_work:
        second.step()
    assert [request.output_ids for request in requests] == answers
    for request in requests:
        whole = (len(request.prompt_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert request.num_cached_tokens == whole


def test_a_corrupt_disk_is_recomputed_and_nobody_notices(
    engines: Engines, answers: list[list[int]], tmp_path: Path
) -> None:
    first = engines(tiers=tiers(64, tmp_path))
    run(first, prompts(8))
    first.close()
    (slab,) = tmp_path.glob("*/slab-00000")
    for offset in range(100, slab.stat().st_size, 3 * BLOCK_BYTES):
        flip_bit(slab, offset)
    second = engines(tiers=tiers(64, tmp_path))
    assert second.offloader is not None
    assert second.offloader.recover(30)
    assert run(second, prompts(8)) == answers


def test_a_returning_prompt_is_found_on_the_device(
    engines: Engines, answers: list[list[int]]
) -> None:
    engine = engines()
    run(engine, prompts(8)[:1])
    request = engine.add("again", prompts(8)[0], GREEDY)
    while engine.has_work:
        engine.step()
    assert request.output_ids == answers[0]
    assert request.num_cached_tokens == (len(request.prompt_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_tenants_do_not_find_each_others_kv(engines: Engines) -> None:
    engine = engines(tiers=tiers(64))
    for tenant, expected in (("a", 0), ("b", 0), ("a", 1)):
        request = engine.add(tenant, prompts(1)[0], GREEDY, tenant=tenant)
        while engine.has_work:
            engine.step()
        assert bool(request.num_cached_tokens) == bool(expected)


def test_aborted_at_any_moment_nothing_leaks_and_others_do_not_notice(
    engines: Engines, answers: list[list[int]]
) -> None:
    rng = random.Random(3)
    engine = engines(24, tiers=tiers(32), batch=32)
    for round_number in range(6):
        kept = {n: engine.add(f"k{n}", prompts(8)[n], GREEDY) for n in rng.sample(range(8), 3)}
        doomed = [f"d{n}" for n in range(5)]
        for number, name in enumerate(doomed):
            engine.add(name, prompts(8)[number], GREEDY)
        while engine.has_work:
            if doomed and rng.random() < 0.2:
                engine.abort(doomed.pop())
            engine.step()
            engine.check()
        for name in doomed:
            engine.abort(name)
        assert {n: request.output_ids for n, request in kept.items()} == {
            n: answers[n] for n in kept
        }, f"round {round_number}"
    assert engine.offloader is not None
    assert engine.offloader.drain(30)
    engine.step()
    assert engine.pool.num_available == engine.pool.num_blocks


def test_urgent_requests_go_first(engines: Engines) -> None:
    engine = engines(16)
    slow = [engine.add(f"s{n}", prompts(4)[n], GREEDY, priority=5) for n in range(4)]
    urgent = engine.add("u", prompts(5)[4], GREEDY, priority=0)
    while urgent.finish_reason is None:
        engine.step()
    assert sum(request.finish_reason is not None for request in slow) < 4
    while engine.has_work:
        engine.step()


def test_what_can_never_fit_is_refused_with_the_numbers(engines: Engines) -> None:
    engine = engines(4)
    with pytest.raises(TooLong, match=r"is 64 tokens here.* holds 4 .*\(89 .*24 .*need 8 blocks"):
        engine.add("long", list(range(1, 90)), GREEDY)
    with pytest.raises(TooLong, match="maximum context length is 1024 tokens"):
        engine.add("longer", [1] * 1024, GREEDY)
    with pytest.raises(ConfigError, match="empty"):
        engine.add("empty", [], GREEDY)
    assert not engine.has_work


def test_refusals_tell_the_models_limit_from_want_of_room(loaded: LoadedModel) -> None:
    told: list[Event] = []
    settings = EngineConfig(4 * BLOCK_BYTES, BLOCK_TOKENS)
    engine = Engine(loaded, settings, observers=(told.append,))
    for prompt in (list(range(1, 90)), [1] * 1024):
        with pytest.raises(TooLong):
            engine.add("r", prompt, GREEDY)
    assert [event for event in told if isinstance(event, Refused)] == [
        Refused("no_room"),
        Refused("too_long"),
    ]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loaded_blocks_are_bit_for_bit_what_was_saved(
    loaded: LoadedModel, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = copy.deepcopy(loaded.model).to(dtype)
    narrow = replace(loaded, model=model, dtype=dtype)
    size = 64 * BLOCK_BYTES * dtype.itemsize // 4
    engine = Engine(narrow, EngineConfig(size, BLOCK_TOKENS), tiers(64, tmp_path / "kv"))
    assert engine.offloader is not None
    prompt = prompts(1)[0][:160]
    request = engine.add("a", prompt, replace(GREEDY, max_tokens=2))
    blocks: list[int] = []
    while engine.has_work:
        engine.step()
        blocks = list(request.table) or blocks
    full = len(prompt) // BLOCK_TOKENS
    saved = engine.device.tensor[blocks[:full]].clone()
    keys = KeyChain(engine.namespace, prompt).keys[:full]
    for source in ("DRAM", "disk"):
        assert engine.offloader.drain()
        if source == "disk":
            engine.offloader.empty_host()
        engine.pool.forget()
        engine.device.tensor.zero_()
        slots = engine.pool.take(full)
        assert slots is not None
        ticket = engine.offloader.load(keys, slots)
        done = {done.ticket: done for done in engine.offloader.wait([ticket])}[ticket]
        assert done.ok, source
        found = engine.device.tensor[slots]
        assert torch.equal(found.view(torch.uint8), saved.view(torch.uint8)), source
        engine.pool.release(slots)
    engine.close()


def _answer(engine: Engine, name: str, prompt: list[int]) -> Any:
    request = engine.add(name, prompt, GREEDY)
    while engine.has_work:
        engine.step()
    assert engine.offloader is not None
    engine.offloader.drain()
    engine.step()
    engine.pool.forget()
    return request


def test_what_computes_faster_than_it_loads_is_computed(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_MIN_PATIENCE_SECONDS", 60.0)
    told: list[Event] = []
    settings = EngineConfig(64 * BLOCK_BYTES, BLOCK_TOKENS)
    engine = Engine(loaded, settings, tiers(64), observers=(told.append,))
    prompt = prompts(1)[0]
    first = _answer(engine, "first", prompt)
    second = _answer(engine, "second", prompt)
    assert second.num_loaded_tokens > 0
    assert second.output_ids == first.output_ids
    assert engine.offloader is not None
    for _ in range(200):  # now the link looks as if it had become slow
        slow = Moved(Tier.HOST, Tier.DEVICE, Direction.LOAD, 1, BLOCK_BYTES, 1.0)
        engine.offloader._meters[Tier.HOST].observe(slow)
    third = _answer(engine, "third", prompt)
    assert third.num_loaded_tokens == third.num_cached_tokens == 0
    assert third.output_ids == first.output_ids
    decisions = [event.choice for event in told if isinstance(event, Decided)]
    assert decisions == ["load", "compute"]
    last = [event for event in told if isinstance(event, Decided)][-1]
    assert last.load_seconds is not None
    assert last.compute_seconds is not None
    assert last.load_seconds > last.compute_seconds
    for number in range(40):  # a link is looked at again, or it would be slow for ever
        _answer(engine, f"more-{number}", prompt)
    choices = [event.choice for event in told if isinstance(event, Decided)]
    assert "load" in choices[2:]
    engine.close()


def test_a_crowd_of_one_tenant_does_not_hold_up_another(loaded: LoadedModel) -> None:
    settings = EngineConfig(64 * BLOCK_BYTES, BLOCK_TOKENS, max_num_seqs=2)
    engine = Engine(loaded, settings)
    crowd = [engine.add(f"crowd-{n}", [n + 1] * 40, GREEDY, tenant="crowd") for n in range(20)]
    lone = engine.add("lone", [7] * 40, GREEDY, tenant="lone")
    while lone.finish_reason is None:
        engine.step()
    assert sum(request.finish_reason is None for request in crowd) > 15
    engine.close()


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_requests_that_were_given_up_do_not_hold_up_their_tenants_next(
    loaded: LoadedModel, when: str
) -> None:
    settings = EngineConfig(64 * BLOCK_BYTES, BLOCK_TOKENS, max_num_seqs=2)
    engine = Engine(loaded, settings)
    long = replace(GREEDY, max_tokens=600)
    if when == "running":  # each had its turn, and ended long before its max_tokens
        for number in range(20):
            engine.add(f"gone-{number}", [number + 1] * 40, long, tenant="north")
            engine.step()
            engine.abort(f"gone-{number}")
    crowd = [engine.add(f"crowd-{n}", [n + 1] * 40, GREEDY, tenant="south") for n in range(12)]
    if when == "waiting":
        for number in range(20):
            engine.add(f"gone-{number}", [number + 1] * 40, long, tenant="north")
    engine.step()
    for number in range(20):
        engine.abort(f"gone-{number}")
    lone = engine.add("lone", [7] * 40, GREEDY, tenant="north")
    while lone.finish_reason is None:
        engine.step()
    assert sum(request.finish_reason is None for request in crowd) > 6
    engine.close()


def test_the_debug_log_tells_a_requests_story(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_MIN_PATIENCE_SECONDS", 60.0)
    caplog.set_level("DEBUG", "penstock.engine")
    engine = Engine(loaded, EngineConfig(64 * BLOCK_BYTES, BLOCK_TOKENS), tiers(64))
    prompt = prompts(1)[0]
    _answer(engine, "one", prompt)
    _answer(engine, "two", prompt)
    engine.close()
    text = caplog.text
    assert "request one: first token after" in text
    assert "matched blocks below the device" in text
    assert "request two: loaded" in text
    assert "from HOST (" in text
    assert "GB/s" in text
    assert "computing them all would take about" in text
    assert "request two: length after" in text


def test_a_prompt_found_whole_computes_one_token_and_writes_none(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    engine = Engine(loaded, EngineConfig(64 * BLOCK_BYTES, BLOCK_TOKENS), tiers(64))
    assert engine.offloader is not None
    always_load(engine)
    prompt = prompts(1)[0][: 3 * BLOCK_TOKENS]
    first = _answer(engine, "first", prompt)
    assert len(prompt) == 3 * BLOCK_TOKENS
    for name in ("loaded", "loaded again"):
        again = _answer(engine, name, prompt)
        assert again.output_ids == first.output_ids
        assert again.num_cached_tokens == len(prompt) - 1
        assert again.num_loaded_tokens == len(prompt)
    holder = engine.add("holder", prompt, GREEDY)  # its blocks are shared from now on
    engine.step()
    while holder.first_token_time is None:
        engine.step()
    blocks = list(holder.table)[:3]
    before = engine.device.tensor[blocks].clone()
    sharer = engine.add("sharer", prompt, GREEDY)
    while engine.has_work:
        engine.step()
    assert sharer.num_cached_tokens == len(prompt) - 1
    assert sharer.num_loaded_tokens == 0
    assert torch.equal(engine.device.tensor[blocks], before)
    assert sharer.output_ids == holder.output_ids == first.output_ids
    engine.close()


@pytest.mark.parametrize("only_queues", [False, True])
def test_what_a_caller_has_to_do_is_done_once_a_step_while_a_device_computes(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, *, only_queues: bool
) -> None:
    engine, told = engines(), []
    run_it, wait = engine.runner.run, engine.runner.wait
    monkeypatch.setattr(engine.runner, "only_queues", only_queues)
    monkeypatch.setattr(engine.runner, "run", lambda *a: (told.append("run"), run_it(*a))[1])
    monkeypatch.setattr(engine.runner, "wait", lambda *a: (told.append("wait"), wait(*a))[1])
    engine.add("a", prompts(1)[0], replace(GREEDY, max_tokens=2))
    while engine.has_work:
        engine.step(lambda: told.append("meanwhile"))
    engine.step(lambda: told.append("at rest"))
    a_step = ["run", "meanwhile", "wait"] if only_queues else ["meanwhile", "run", "wait"]
    assert told == [*a_step, *a_step, "at rest"]


@pytest.mark.parametrize("only_queues", [False, True])
def test_text_is_the_same_whenever_it_is_asked_for(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, *, only_queues: bool
) -> None:
    questions = prompts(8)
    params = replace(GREEDY, temperature=1.0, seed=5, max_tokens=60)

    def texts(*, late: bool) -> list[str]:
        engine = engines()
        monkeypatch.setattr(engine.runner, "only_queues", only_queues)
        found: dict[str, list[Progress]] = {str(number): [] for number in range(len(questions))}
        at_once = dict.fromkeys(found, "")
        for number, ids in enumerate(questions):
            engine.add(str(number), ids, params)
        while engine.has_work:
            for progress in engine.step():
                found[progress.request.id].append(progress)
                if not late:
                    at_once[progress.request.id] += progress.text
        if not late:
            return list(at_once.values())
        # The last first: made only now, the others' would come after the end.
        pieces = [[progress.text for progress in reversed(of_one)] for of_one in found.values()]
        return ["".join(reversed(of_one)) for of_one in pieces]

    at_once = texts(late=False)
    assert all(at_once)
    assert texts(late=True) == at_once
