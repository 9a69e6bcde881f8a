"""A step that fails by a defect costs the requests it computed, and nobody else anything."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import BLOCK_BYTES, BLOCK_TOKENS, idle

import penstock.engine.engine as engine_module
from penstock.config import Config, DiskConfig, HostConfig
from penstock.engine.detokenize import Detokenizer
from penstock.engine.engine import Engine
from penstock.engine.faults import EngineFault, EngineLost
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import Request
from penstock.engine.residency import ResidencyConfig
from penstock.engine.runner import TorchRunner
from penstock.events import Event, StepFailed

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
SMALL = ResidencyConfig(prefix_tokens=16, tail_tokens=16)

Said = list[tuple[int, float]]  # tokens, and the log probabilities they came with


def prompts(num: int = 6) -> list[list[int]]:
    rng = random.Random(7)
    head = [rng.randrange(1, 40_000) for _ in range(40)]
    return [
        head + [rng.randrange(1, 40_000) for _ in range(rng.randint(20, 150))] for _ in range(num)
    ]


class Watched:
    """An engine, what it told, and what its requests said or why not."""

    def __init__(self, loaded: LoadedModel, disk: Path | None = None, num_blocks: int = 24) -> None:
        self.events: list[Event] = []
        below = DiskConfig()
        if disk is not None:
            below = DiskConfig(path=str(disk), size_bytes=1024 * (BLOCK_BYTES + 512))
        tiers = Config(HostConfig(size_bytes=256 * BLOCK_BYTES, huge_pages=False), below)
        config = EngineConfig(num_blocks * BLOCK_BYTES, BLOCK_TOKENS, 64, residency=SMALL)
        self.engine = Engine(loaded, config, tiers, observers=(self.events.append,))

    @property
    def faults(self) -> list[StepFailed]:
        return [event for event in self.events if isinstance(event, StepFailed)]

    def run(self, questions: Sequence[list[int]], tag: str) -> dict[int, Said | EngineFault]:
        requests: dict[str, tuple[int, Request]] = {}
        said: dict[int, Said | EngineFault] = {}
        for number, ids in enumerate(questions):
            request = self.engine.add(f"{tag}-{number}", ids, PARAMS)
            requests[request.id] = (number, request)
            said[number] = []
        for _ in range(20_000):
            if all(request.finish_reason for _, request in requests.values()):
                break
            for progress in self.engine.step():
                answer = said[requests[progress.request.id][0]]
                if isinstance(answer, list):
                    assert progress.sampled.logprob is not None
                    answer.append((progress.sampled.token_id, progress.sampled.logprob))
            for request, fault in self.engine.take_failed():
                assert request.finish_reason == "error"
                said[requests[request.id][0]] = fault
        assert all(request.finish_reason for _, request in requests.values()), "one never ended"
        return said


@pytest.fixture
def watched(loaded: LoadedModel, tmp_path: Path) -> Iterator[Watched]:
    made = Watched(loaded, tmp_path / "kv")
    yield made
    made.engine.close()


@pytest.fixture(scope="module")
def answers(loaded: LoadedModel) -> list[Said]:
    """What a fresh engine says to each alone."""
    found = []
    for question in prompts():
        fresh = Watched(loaded, num_blocks=64)
        (said,) = fresh.run([question], "fresh").values()
        assert isinstance(said, list)
        found.append(said)
        fresh.engine.close()
    return found


def same(said: Said | EngineFault, expected: Said) -> bool:
    assert isinstance(said, list)
    return [token for token, _ in said] == [token for token, _ in expected] and all(
        abs(a - b) < 1e-3 for (_, a), (_, b) in zip(said, expected, strict=True)
    )


class Once:
    """Calls through, and raises in place of one call, or behind it."""

    def __init__(self, call: Callable[..., Any], at: int, *, behind: bool = False) -> None:
        self._call, self._at, self._behind = call, at, behind
        self.num_calls = 0

    @property
    def has_raised(self) -> bool:
        return self.num_calls >= self._at

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.num_calls += 1
        if self.num_calls != self._at:
            return self._call(*args, **options)
        if self._behind:
            self._call(*args, **options)
        raise RuntimeError("injected")


def spoil_and_raise(engine: Engine, at: int) -> Once:
    """A runner that leaves rubbish where it should have written KV."""
    run = engine.runner.run
    once = Once(run, at)

    def spoiled(chunks: Any, *rest: Any) -> Any:
        try:
            return once(chunks, *rest)
        except RuntimeError:
            for chunk in chunks:
                places = [place for place in chunk.request.table if place >= 0]
                first = (chunk.start + chunk.num_present) // BLOCK_TOKENS
                mine = [p for p in list(chunk.request.table)[first:] if p >= 0]
                assert places
                engine.device.tensor[mine] = torch.nan
            raise

    engine.runner.run = spoiled  # type: ignore[method-assign]
    return once


def inject(owner: Any, name: str, at: int, *, behind: bool = False) -> Once:
    once = Once(getattr(owner, name), at, behind=behind)
    setattr(owner, name, once)
    return once


POINTS: dict[str, Callable[[Engine], Once]] = {
    "schedule": lambda e: inject(e.scheduler, "schedule", 9),
    "schedule, done": lambda e: inject(e.scheduler, "schedule", 9, behind=True),
    "the books of a chunk": lambda e: inject(e.scheduler, "computed", 6),
    "the books of a chunk, done": lambda e: inject(e.scheduler, "computed", 6, behind=True),
    "settle": lambda e: inject(e.scheduler, "settle", 4),
    "settle, done": lambda e: inject(e.scheduler, "settle", 4, behind=True),
    "placement, save": lambda e: inject(e.scheduler.placement, "save", 4),
    "placement, take": lambda e: inject(e.scheduler.placement, "take", 12, behind=True),
    "placement, balance": lambda e: inject(e.scheduler.placement, "balance", 20, behind=True),
    "pool": lambda e: inject(e.pool, "name", 15, behind=True),
    "runner": lambda e: inject(e.runner, "run", 7),
    "runner, done": lambda e: inject(e.runner, "run", 7, behind=True),
    "runner, rubbish in the pool": lambda e: spoil_and_raise(e, 7),
    "wait": lambda e: inject(e.runner, "wait", 7),
    "tiers, step": lambda e: inject(e.offloader, "step", 8, behind=True),
    "tiers, save": lambda e: inject(e.offloader, "save", 3, behind=True),
    "tiers, pin": lambda e: inject(e.offloader, "pin", 2, behind=True),
    "tiers, an outcome is lost": lambda e: inject(e.offloader._stack, "settle", 5),
    "the last token of a step": lambda e: inject(e, "_take", 9, behind=True),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_step_that_fails_costs_its_requests_and_nobody_else(
    watched: Watched, answers: list[Said], point: str
) -> None:
    engine = watched.engine
    once = POINTS[point](engine)
    said = watched.run(prompts(), "first")
    assert once.has_raised, "the fault was never met"
    assert len(watched.faults) == 1
    failed = [answer for answer in said.values() if isinstance(answer, EngineFault)]
    assert len(failed) == watched.faults[0].num_failed <= 6
    for number, answer in said.items():
        assert isinstance(answer, EngineFault) or same(answer, answers[number])
    for round_number in range(2):  # from the device, from DRAM, from disk
        again = watched.run(prompts(), f"again-{round_number}")
        assert all(same(again[number], answers[number]) for number in again)
        idle(engine)
        engine.pool.forget()
    assert len(watched.faults) == 1


def test_what_a_failed_step_computed_is_offered_to_nobody(
    watched: Watched, answers: list[Said]
) -> None:
    engine = watched.engine
    spoil_and_raise(engine, 1)
    question = prompts()[0]
    assert isinstance(watched.run([question], "spoiled")[0], EngineFault)
    assert engine.offloader is not None
    assert engine.offloader.drain(30)
    request = engine.add("next", question, PARAMS)
    assert engine.offloader.match(request.chain.keys).num_blocks == 0
    engine.abort("next")
    assert same(watched.run([question], "again")[0], answers[0])


@pytest.mark.parametrize("part", ["sampler", "text", "text with stop strings", "last text"])
def test_the_sampler_and_the_text(
    watched: Watched, answers: list[Said], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    engine = watched.engine
    if part == "sampler":
        monkeypatch.setattr(engine_module, "begin_sampling", Once(engine_module.begin_sampling, 5))
    elif part == "last text":
        finish = Once(Detokenizer.finish, 1)
        monkeypatch.setattr(Detokenizer, "finish", lambda *given: finish(*given))
    else:
        append = Once(Detokenizer.append, 9)
        monkeypatch.setattr(Detokenizer, "append", lambda *given: append(*given))
    stop = ["never said"] if part == "text with stop strings" else None
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=stop)
    requests = [engine.add(str(n), ids, params) for n, ids in enumerate(prompts())]
    failed: list[Request] = []
    texts: dict[str, str] = {}
    while engine.has_work or engine._unread:
        for progress in engine.step():
            texts[progress.request.id] = texts.get(progress.request.id, "") + progress.text
        failed += [request for request, _ in engine.take_failed()]
    if part == "sampler":
        assert len(watched.faults) == 1
    else:
        assert len(failed) == 1, "a text is nobody else's"
        assert watched.faults == []
    for number, request in enumerate(requests):
        if request not in failed:
            assert request.output_ids == [token for token, _ in answers[number]]
            assert texts[request.id]
    monkeypatch.undo()
    again = watched.run(prompts(), "again")
    assert all(same(again[number], answers[number]) for number in again)
    idle(engine)


def test_a_request_that_cannot_be_entered_or_left_fails_alone(
    watched: Watched, answers: list[Said]
) -> None:
    engine = watched.engine
    inject(engine.scheduler, "add", 3, behind=True)
    for number in range(2):
        engine.add(f"early-{number}", prompts()[number], PARAMS)
    with pytest.raises(EngineFault, match="Retry the request"):
        engine.add("third", prompts()[2], PARAMS)
    inject(engine.scheduler, "remove", 1)
    engine.step()
    engine.abort("early-0")
    assert [request.id for request, _ in engine.take_failed()] == []
    assert len(watched.faults) == 2
    engine.abort("early-1")
    said = watched.run(prompts()[1:], "next")
    assert all(same(said[number], answers[number + 1]) for number in said)
    idle(engine)


def test_a_scheduler_that_fails_again_and_again_fails_the_requests_and_not_the_engine(
    watched: Watched, answers: list[Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows which request it was: all are tried again, then all fail, and that is that."""
    engine = watched.engine
    poison = engine.add("poison", prompts()[0], PARAMS)
    scheduler_class = type(engine.scheduler)
    admit = scheduler_class._admit

    def breaks(self: Any, request: Request, budget: int) -> bool:
        if request is poison:
            raise RuntimeError("injected")
        return admit(self, request, budget)

    monkeypatch.setattr(scheduler_class, "_admit", breaks)
    for _ in range(5):
        engine.step()
    assert [request.id for request, _ in engine.take_failed()] == ["poison"]
    assert [(fault.num_failed, fault.num_requeued) for fault in watched.faults] == [(0, 1), (1, 0)]
    assert same(watched.run(prompts()[:1], "next")[0], answers[0])


def test_an_engine_that_cannot_compute_any_more_ends_and_says_so(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise RuntimeError("the device is gone")

    watched.engine.add("a", prompts()[0], PARAMS)
    monkeypatch.setattr(TorchRunner, "run", gone)
    with pytest.raises(EngineLost, match="restart the process"):
        watched.engine.step()
    monkeypatch.undo()
    with pytest.raises(EngineLost):  # it is not asked back by a fault that went away
        watched.engine._recover(RuntimeError("another"))
    assert watched.faults == []


def test_a_copy_that_hangs_ends_the_engine_for_it_may_still_write_to_the_device(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a disk nothing else would keep other tiers from being opened beside it."""
    watched = Watched(loaded)
    engine = watched.engine
    engine.add("a", prompts()[0], PARAMS)
    assert engine.offloader is not None
    monkeypatch.setattr(type(engine.offloader), "let_go", lambda *_: False)
    abandon = engine.offloader.abandon

    def hangs(seconds: float) -> bool:
        assert abandon(seconds)
        return False

    monkeypatch.setattr(engine.offloader, "abandon", hangs)
    inject(engine.runner, "run", 1)
    with pytest.raises(EngineLost):
        engine.step()
    with pytest.raises(EngineLost):
        engine.add("b", prompts()[1], PARAMS)
    engine.abort("a")
    engine.close()


def test_an_engine_that_fails_while_it_closes_closes_its_tiers(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("injected")

    engine = watched.engine
    engine.add("a", prompts()[0], PARAMS)
    monkeypatch.setattr(type(engine.scheduler), "remove", fails)
    engine.close()
    monkeypatch.undo()
    assert engine.offloader is None or engine.offloader._closed
