"""A prompt that another engine computes: the decoder takes its KV as it comes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tiny import BLOCK_BYTES, BLOCK_TOKENS

from penstock.config import Config, HostConfig, RemoteConfig
from penstock.costs import patience
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import Request
from penstock.engine.residency import ResidencyConfig
from penstock.stores import memory
from penstock.stores.memory import MemoryClient

PLAIN = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=4)
AWAITS = replace(PLAIN, awaits_prefill=True)
ONE = replace(PLAIN, max_tokens=1)
Engines = Callable[..., Engine]


@pytest.fixture
def store() -> Iterator[MemoryClient]:
    memory.forget_shared("roles")
    yield memory.open_shared("memory://roles", timeout_seconds=1.0)
    memory.forget_shared("roles")


@pytest.fixture
def engines(loaded: LoadedModel, store: MemoryClient) -> Iterator[Engines]:
    made: list[Engine] = []

    def make(*, num_blocks: int = 256, shares: bool = True) -> Engine:
        url = "memory://roles" if shares else None
        remote = RemoteConfig(url=url, lookup_deadline_seconds=30.0)
        tiers = Config(HostConfig(size_bytes=256 * BLOCK_BYTES), remote=remote)
        residency = ResidencyConfig(cold=False)
        config = EngineConfig(num_blocks * BLOCK_BYTES, BLOCK_TOKENS, 32, residency=residency)
        made.append(Engine(loaded, config, tiers))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prompt_of(num_tokens: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 400) for _ in range(num_tokens)]


class Answer:
    """What one request sampled, with its log probabilities."""

    def __init__(self, engine: Engine, prompt: list[int], params: SamplingParams) -> None:
        self.engine = engine
        self.request: Request = engine.add(f"{time.monotonic_ns()}", prompt, params)
        self.sampled: list[Any] = []

    def step(self) -> None:
        for progress in self.engine.step():
            if progress.request is self.request:
                sampled = progress.sampled
                self.sampled.append((sampled.token_id, sampled.logprob, sampled.top))

    @property
    def is_over(self) -> bool:
        return self.request.finish_reason is not None

    def finish(self, seconds: float = 60.0) -> list[Any]:
        end = time.monotonic() + seconds
        while not self.is_over:
            assert time.monotonic() < end, "no answer"
            self.step()
        self.engine.check()
        return self.sampled


@pytest.mark.parametrize("num_tokens", [300, 15 * BLOCK_TOKENS, 15 * BLOCK_TOKENS + 1, 5])
def test_the_decoder_computes_no_complete_block(
    engines: Engines, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "IF_UNKNOWN_SECONDS", 30.0)
    prompt = prompt_of(num_tokens)
    plain = engines(shares=False)
    Answer(plain, prompt, PLAIN).finish()
    alone = Answer(plain, prompt, PLAIN).finish()  # found on the device: computes the same tokens
    prefiller, decoder = engines(), engines()
    decoding = Answer(decoder, prompt, AWAITS)
    prefilling = Answer(prefiller, prompt, ONE)
    computed = []
    inner = decoder.runner.run

    def run(chunks: Any, *args: Any) -> Any:
        computed.extend((chunk.start, chunk.num_tokens) for chunk in chunks)
        return inner(chunks, *args)

    decoder.runner.run = run  # type: ignore[method-assign]
    end = time.monotonic() + 60
    while not decoding.is_over:
        assert time.monotonic() < end
        prefilling.step()
        decoding.step()
    assert decoding.sampled == alone
    num_full = num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert computed[0][0] >= min(num_full, num_tokens - 1)
    assert decoding.request.num_cached_tokens >= min(num_full, num_tokens - 1)
    prefilling.finish()
    decoder.check()
    prefiller.check()


def test_a_prefiller_that_stops_in_the_middle(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "MIN_SECONDS", 3.0)
    monkeypatch.setattr(patience, "IF_UNKNOWN_SECONDS", 3.0)
    prompt = prompt_of(500, 2)
    alone = Answer(engines(shares=False), prompt, PLAIN).finish()
    prefiller, decoder = engines(), engines()
    decoding = Answer(decoder, prompt, AWAITS)
    prefilling = Answer(prefiller, prompt, ONE)
    for _ in range(5):  # of 16 steps
        prefilling.step()
    prefiller.abort(prefilling.request.id)
    assert prefiller.offloader is not None
    prefiller.offloader.drain(10)
    assert decoding.finish() == alone
    assert 0 < decoding.request.num_cached_tokens < 480
    assert decoding.request.has_stopped_waiting


def test_nobody_prefills(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "MIN_SECONDS", 0.05)
    monkeypatch.setattr(patience, "IF_UNKNOWN_SECONDS", 0.05)
    prompt = prompt_of(200, 3)
    alone = Answer(engines(shares=False), prompt, PLAIN).finish()
    assert Answer(engines(), prompt, AWAITS).finish() == alone
    assert Answer(engines(shares=False), prompt, AWAITS).finish() == alone


def test_others_run_while_one_waits(engines: Engines) -> None:
    decoder = engines()
    waiting = Answer(decoder, prompt_of(300, 4), AWAITS)
    other = Answer(decoder, prompt_of(300, 5), PLAIN)
    other.finish()
    assert not waiting.sampled
    decoder.abort(waiting.request.id)
    while decoder.is_moving:
        decoder.step()
    decoder.check()
    assert decoder.scheduler.idle
    assert decoder.pool.num_available == 256


def test_aborted_while_its_blocks_are_loaded(engines: Engines, store: MemoryClient) -> None:
    prompt = prompt_of(400, 6)
    prefiller, decoder = engines(), engines()
    Answer(prefiller, prompt, ONE).finish()
    assert prefiller.offloader is not None
    prefiller.offloader.drain(10)
    for num_steps in range(1, 6):
        waiting = Answer(decoder, prompt, AWAITS)
        for _ in range(num_steps):
            waiting.step()
        decoder.abort(waiting.request.id)
        end = time.monotonic() + 10
        while decoder.is_moving and time.monotonic() < end:
            decoder.step()
        decoder.check()
        assert decoder.pool.num_available == 256


def test_preempted_while_it_waits(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is too small for all: what waits gives way, and its answer stays the same."""
    monkeypatch.setattr(patience, "MIN_SECONDS", 0.3)
    monkeypatch.setattr(patience, "IF_UNKNOWN_SECONDS", 0.3)
    prompts = [prompt_of(300, 10 + n) for n in range(4)]
    plain = engines(shares=False)
    alone = [Answer(plain, prompt, PLAIN).finish() for prompt in prompts]
    prefiller, decoder = engines(), engines(num_blocks=30)
    waiting = [Answer(decoder, prompt, AWAITS) for prompt in prompts]
    prefilling = [Answer(prefiller, prompt, ONE) for prompt in prompts]
    end = time.monotonic() + 120
    while not all(answer.is_over for answer in waiting):
        assert time.monotonic() < end
        if not all(answer.is_over for answer in prefilling):
            prefiller.step()
        for progress in decoder.step():
            answer = next(each for each in waiting if each.request is progress.request)
            sampled = progress.sampled
            answer.sampled.append((sampled.token_id, sampled.logprob, sampled.top))
    # Chunks end elsewhere after a preemption, so that log probabilities round differently.
    for answer, expected in zip(waiting, alone, strict=True):
        assert [token for token, _, _ in answer.sampled] == [token for token, _, _ in expected]
        pairs = zip(answer.sampled, expected, strict=True)
        assert all(abs(one[1] - two[1]) < 1e-3 for one, two in pairs)
    decoder.check()
