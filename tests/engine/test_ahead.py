"""Steps that are launched before the last one's tokens are read tell every request the same.

On a CPU a step has been computed when it was launched. Its tokens are kept from the engine until it
reads them, and stay in the runner for the next step, as they do on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from engine.test_faults import POINTS
from engine.test_soak import make_prompts
from tiny import BLOCK_BYTES, BLOCK_TOKENS, idle, tiny_model

from penstock.config import Config, DiskConfig, HostConfig
from penstock.engine.engine import Engine
from penstock.engine.faults import EngineFault
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import Request
from penstock.engine.residency import ResidencyConfig

HOT = ResidencyConfig(cold=False)
COLD = ResidencyConfig(prefix_tokens=16, tail_tokens=16, high_watermark=0.9, low_watermark=0.8)
NUM_IDS = 500  # few, so that the tests are fast
PROMPTS = [[token % NUM_IDS for token in ids] for ids in make_prompts(random.Random(0))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def loaded(tokenizer: Any) -> LoadedModel:
    return tiny_model(tokenizer, NUM_IDS)


@contextmanager
def opened(
    loaded: LoadedModel,
    num_blocks: int = 256,
    residency: ResidencyConfig = HOT,
    *,
    ahead: bool = True,
    disk: Path | None = None,
) -> Iterator[Engine]:
    below = DiskConfig()
    if disk is not None:
        below = DiskConfig(path=str(disk), size_bytes=256 * (BLOCK_BYTES + 512) + 65536)
    tiers = Config(HostConfig(size_bytes=64 * BLOCK_BYTES, huge_pages=False), below)
    config = EngineConfig(
        num_blocks * BLOCK_BYTES,
        BLOCK_TOKENS,
        64,
        8,
        residency=residency,
        launch_ahead=ahead,
    )
    engine = Engine(loaded, config, tiers)
    engine.runner.only_queues = True
    try:
        yield engine
    finally:
        engine.close()


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, int | None, list[tuple[int, float]]]] = field(default_factory=list)
    text: str = ""
    end: tuple[str | None, int | str | None] = (None, None)

    def is_like(self, other: Answer) -> bool:
        """A batch of another size may round its sums differently."""
        if (self.tokens, self.text, self.end) != (other.tokens, other.text, other.end):
            return False
        return all(
            abs(mine[0] - its[0]) < 1e-3
            and mine[1] == its[1]
            and [token for token, _ in mine[2]] == [token for token, _ in its[2]]
            for mine, its in zip(self.logprobs, other.logprobs, strict=True)
        )


class Watched:
    """What an engine tells each of its requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answer] = {}
        self.failed: dict[str, EngineFault] = {}

    def add(self, name: str, ids: list[int], params: SamplingParams, **more: Any) -> None:
        self.requests[name] = self.engine.add(name, ids, params, **more)
        self.answers[name] = Answer()

    def step(self) -> None:
        for progress in self.engine.step():
            answer, sampled = self.answers[progress.request.id], progress.sampled
            answer.tokens.append(sampled.token_id)
            if sampled.logprob is not None:
                answer.logprobs.append((sampled.logprob, sampled.rank, sampled.top))
            answer.text += progress.text
            answer.end = (progress.request.finish_reason, progress.request.stop_reason)
        for request, fault in self.engine.take_failed():
            self.failed[request.id] = fault
        for request in self.requests.values():
            assert all(token >= 0 for token in request.output_ids)
            if request.finish_reason not in (None, "error"):
                assert request.output_ids == self.answers[request.id].tokens
                assert not request.num_expected

    def run(self) -> None:
        for _ in range(50_000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("requests never ended")


def drawn_params(rng: random.Random, told: Callable[[], str]) -> SamplingParams:
    """Anything a request can ask for. `told`: a piece of what it may say."""
    stop = [piece] if rng.random() < 0.3 and (piece := told()) else None
    return SamplingParams(
        temperature=rng.choice((0.0, 0.0, 1.0)),
        seed=rng.randrange(1000),
        top_k=rng.choice((0, 0, 5)),
        top_p=rng.choice((1.0, 1.0, 0.8)),
        max_tokens=rng.choice((1, 2, 5, 17, 24)),
        min_tokens=rng.choice((0, 0, 1)),
        ignore_eos=rng.random() < 0.5,
        stop=stop,
        stop_token_ids=[rng.randrange(1, NUM_IDS) for _ in range(rng.choice((0, 0, 30)))],
        logprobs=rng.choice((None, 0, 2)),
        logit_bias=rng.choice((None, None, {17: 1.5, 4: -3.0})),
        # Such a request needs its last token; now and then only.
        presence_penalty=rng.choice((0.0,) * 12 + (0.5,)),
    )


def drawn(num: int) -> list[tuple[list[int], SamplingParams, int]]:
    rng = random.Random(3)

    def piece() -> str:
        return rng.choice(("e", "at", " t", "ing", "\n"))

    return [
        (rng.choice(PROMPTS), drawn_params(rng, piece), rng.choice((0, 0, 1, -1)))
        for _ in range(num)
    ]


REQUESTS = drawn(48)


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> dict[str, Answer]:
    with opened(loaded, 1024, ahead=False) as engine:
        watched = Watched(engine)
        for number, (ids, params, _) in enumerate(REQUESTS):
            watched.add(str(number), ids, params)
        watched.run()
        assert not engine.ahead.num_ahead
        ends = [answer.end[0] for answer in watched.answers.values()]
        assert min(ends.count("stop"), ends.count("length")) > 5
        return watched.answers


@pytest.mark.parametrize(
    ("residency", "num_blocks"),
    [(HOT, 256), (HOT, 18), (COLD, 18), (replace(HOT, turn_seconds=0.001), 18)],
    ids=["room for all", "preempted", "cold", "in turns"],
)
def test_random_requests_are_told_the_same(
    loaded: LoadedModel,
    expected: dict[str, Answer],
    tmp_path: Path,
    residency: ResidencyConfig,
    num_blocks: int,
) -> None:
    rng = random.Random(num_blocks)
    with opened(loaded, num_blocks, residency, disk=tmp_path / "kv") as engine:
        watched = Watched(engine)
        left = list(enumerate(REQUESTS))
        while left or engine.has_work:
            while left and rng.random() < 0.5:
                number, (ids, params, priority) = left.pop(0)
                tenant = rng.choice(("", "", "a"))
                watched.add(str(number), ids, params, priority=priority, tenant=tenant)
            watched.step()
            running = [each.id for each in engine.scheduler if each.finish_reason is None]
            if running and rng.random() < 0.02:
                name = rng.choice(running)
                engine.abort(name)
        # No step with cold blocks is left unread; how many have some depends on the machine.
        assert engine.ahead.num_ahead > 5 or residency.cold
        if num_blocks == 18 and residency is HOT:
            assert engine.scheduler.num_preemptions > 2
        if residency is COLD:
            assert engine.scheduler.placement.num_left > 5
        for name, answer in watched.answers.items():
            if watched.requests[name].finish_reason == "abort":
                assert answer.tokens == expected[name].tokens[: len(answer.tokens)]
            else:
                assert answer.is_like(expected[name]), f"request {name} was told something else"
        idle(engine)
        # What was saved on the way is what the prompts and answers have.
        engine.pool.forget()
        again = Watched(engine)
        for number, (ids, params, _) in enumerate(REQUESTS[:12]):
            again.add(str(number), ids, params)
        again.run()
        for name, answer in again.answers.items():
            assert answer.is_like(expected[name]), f"request {name} was told something else"
        idle(engine)


@pytest.fixture(scope="module")
def greedy(loaded: LoadedModel) -> dict[str, Answer]:
    with opened(loaded, ahead=False) as engine:
        watched = Watched(engine)
        for number, ids in enumerate(PROMPTS[:6]):
            watched.add(str(number), ids, GREEDY)
        watched.run()
        return watched.answers


@pytest.mark.parametrize("point", POINTS)
def test_a_step_that_fails_costs_its_requests_and_nobody_else(
    loaded: LoadedModel, greedy: dict[str, Answer], tmp_path: Path, point: str
) -> None:
    with opened(loaded, 24, COLD, disk=tmp_path / "kv") as engine:
        watched = Watched(engine)
        once = POINTS[point](engine)
        for number, ids in enumerate(PROMPTS[:6]):
            watched.add(str(number), ids, GREEDY)
        watched.run()
        if point not in ("tiers, pin", "placement, balance"):
            assert once.has_raised, "the fault was never met"
        for name, answer in watched.answers.items():
            if name in watched.failed:
                assert answer.tokens == greedy[name].tokens[: len(answer.tokens)]
            else:
                assert answer.is_like(greedy[name])
        idle(engine)
        again = Watched(engine)
        for number, ids in enumerate(PROMPTS[:6]):
            again.add(str(number), ids, GREEDY)
        again.run()
        assert all(answer.is_like(greedy[name]) for name, answer in again.answers.items())
        idle(engine)


def test_a_step_too_many_is_never_offered_or_saved(loaded: LoadedModel) -> None:
    """The last token of an answer that ends where a block does has no key that anyone finds."""
    prompt = PROMPTS[0][:1] * 16
    with opened(loaded) as engine:
        watched = Watched(engine)
        watched.add("long", prompt, replace(GREEDY, max_tokens=40))
        watched.run()
        said = watched.answers["long"].tokens
        last = next(
            n for n in range(15, 40) if (16 + n) % 16 == 0 and said[n - 1] not in said[: n - 1]
        )
        engine.pool.forget()
        assert engine.offloader is not None
        engine.offloader.drain()
        engine.offloader.empty_host()
        params = replace(GREEDY, max_tokens=40, stop_token_ids=[said[last - 1]])
        watched.add("short", prompt, params)
        num_ahead = engine.ahead.num_ahead
        watched.run()
        request = watched.requests["short"]
        assert engine.ahead.num_ahead - num_ahead >= last
        assert request.output_ids == said[:last]
        assert len(request.tokens) % BLOCK_TOKENS == 0
        num_computed = len(request.tokens) // BLOCK_TOKENS - 1  # its last token's KV is not kept
        assert engine.pool.num_leading(request.chain.keys) == num_computed
        engine.offloader.drain()
        assert engine.offloader.match(request.chain.keys).num_blocks == num_computed
        assert request.max_computed == len(request.tokens) - 1
        idle(engine)


def test_nothing_is_kept_of_a_step_that_turns_out_to_be_wrong(loaded: LoadedModel) -> None:
    """As if the processor had not attended to its part in time (see `cold_threads`)."""
    with opened(loaded, ahead=False) as engine:
        watched = Watched(engine)
        watched.add("0", PROMPTS[0][:31], GREEDY)
        watched.step()
        assert engine.offloader is not None
        wait = engine.runner.wait

        def fail(*_: Any) -> None:
            engine.runner.is_doubtful, engine.runner.wait = False, wait  # type: ignore[misc]
            engine.offloader.drain()  # type: ignore[union-attr]  # what is queued meanwhile moves
            raise RuntimeError("injected")

        engine.runner.is_doubtful, engine.runner.wait = True, fail  # type: ignore[misc]
        watched.step()  # would complete the second block
        assert "0" in watched.failed
        assert len(watched.answers["0"].tokens) == 1
        engine.offloader.drain()
        assert engine.offloader.match(watched.requests["0"].chain.keys).num_blocks == 1
        idle(engine)


def test_it_is_off_where_nothing_is_gained(loaded: LoadedModel) -> None:
    with opened(loaded) as engine:
        assert engine.ahead.is_on
    engine = Engine(loaded, EngineConfig(64 * BLOCK_BYTES, BLOCK_TOKENS))
    assert not engine.ahead.is_on
    engine.close()


def test_requests_that_need_their_last_token_are_not_launched_ahead(
    loaded: LoadedModel, greedy: dict[str, Answer]
) -> None:
    with opened(loaded) as engine:
        watched = Watched(engine)
        watched.add("0", PROMPTS[0], GREEDY)
        penalised = replace(GREEDY, presence_penalty=1.0, max_tokens=5)
        watched.add("penalised", PROMPTS[1], penalised)
        while watched.requests["penalised"].finish_reason is None:
            watched.step()
        assert engine.ahead.num_ahead <= 4  # while prompts are computed
        watched.run()
        assert engine.ahead.num_ahead > 10
        assert watched.answers["0"].is_like(greedy["0"])
