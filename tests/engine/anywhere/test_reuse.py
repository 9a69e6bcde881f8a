"""Segments in the engine: what is reused, mended and computed, against plain transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import BLOCK_BYTES, BLOCK_TOKENS, always_load, idle
from transformers import DynamicCache

from penstock.config import Config, DiskConfig, HostConfig
from penstock.engine.anywhere.turning import Turner
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import Request

NUM_ANSWER = 6


@dataclass
class Prompt:
    """Parts of a prompt. Those with True may be reused anywhere."""

    parts: list[tuple[list[int], bool]]

    @property
    def ids(self) -> list[int]:
        return [token for part, _ in self.parts for token in part]

    @property
    def segments(self) -> list[tuple[int, int]]:
        found, at = [], 0
        for part, is_segment in self.parts:
            if is_segment:
                found.append((at, at + len(part)))
            at += len(part)
        return found


def tokens(num: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, 40_000), k=num)


def document(number: int, num: int = 150) -> tuple[list[int], bool]:
    return tokens(num, 1000 + number), True


def text(number: int, num: int = 21) -> tuple[list[int], bool]:
    return tokens(num, number), False


def make(
    loaded: LoadedModel, folder: Path | None = None, *, num_blocks: int = 128, dram: int = 256
) -> Engine:
    tiers = Config(
        HostConfig(size_bytes=dram * BLOCK_BYTES, huge_pages=False),
        DiskConfig(path=None if folder is None else str(folder / "kv"), size_bytes=64 << 20),
    )
    config = EngineConfig(num_blocks * BLOCK_BYTES, BLOCK_TOKENS, max_num_batched_tokens=256)
    engine = Engine(loaded, config, tiers)
    always_load(engine)
    return engine


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[str]
    request: Request


def ask(engine: Engine, prompt: Prompt, mode: str = "link", **options: Any) -> Answer:
    return ask_all(engine, [prompt], mode, **options)[0]


def ask_all(
    engine: Engine, prompts: Sequence[Prompt], mode: str = "link", **options: Any
) -> list[Answer]:
    mending = {"mode": mode, "link_tokens": 8} if mode != "plain" else None
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_ANSWER, ignore_eos=True, logprobs=0, kv_mending=mending
    )
    requests = [
        engine.add(
            f"{id(prompt)}-{number}",
            prompt.ids,
            params,
            segments=prompt.segments if mode != "plain" else (),
            **options,
        )
        for number, prompt in enumerate(prompts)
    ]
    logprobs: dict[str, list[str]] = {request.id: [] for request in requests}
    while engine.has_work:
        for progress in engine.step():
            logprobs[progress.request.id].append(float(progress.sampled.logprob).hex())
    assert not engine.take_failed()
    return [Answer(list(r.output_ids), logprobs[r.id], r) for r in requests]


def forget(engine: Engine) -> None:
    """The device forgets, so that the tiers are asked."""
    assert engine.offloader is not None
    assert engine.offloader.drain(60)
    engine.step()
    engine.pool.forget()


class Oracle:
    """The same with transformers alone, one contiguous piece at a time."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._turner = Turner(loaded)
        self._num_layers = loaded.num_layers

    @torch.inference_mode()
    def answer(self, prompt: Prompt, num_mended: int) -> tuple[list[int], list[float]]:
        before = self._model.config._attn_implementation
        self._model.config._attn_implementation = "eager"
        try:
            return self._answer(prompt, num_mended)
        finally:
            self._model.config._attn_implementation = before

    def _answer(self, prompt: Prompt, num_mended: int) -> tuple[list[int], list[float]]:
        ids, cache = prompt.ids, DynamicCache()
        for start, end in prompt.segments:
            if not start:
                continue
            num_reused = (end - start) // BLOCK_TOKENS * BLOCK_TOKENS
            self._compute(cache, ids, start + num_mended)
            alone = DynamicCache()
            self._compute(alone, ids[start : start + num_reused], num_reused)
            for layer in range(self._num_layers):
                keys = alone.layers[layer].keys[:, :, num_mended:]
                keys = self._turner.turn(keys, layer, start)
                cache.update(keys, alone.layers[layer].values[:, :, num_mended:], layer)
        answer: list[int] = []
        logprobs = []
        for _ in range(NUM_ANSWER):
            logits = self._compute(cache, ids + answer, len(ids) + len(answer))
            logs = logits.log_softmax(-1)
            answer.append(int(logs.argmax()))
            logprobs.append(float(logs.max()))
        return answer, logprobs

    def _compute(self, cache: DynamicCache, ids: list[int], end: int) -> torch.Tensor:
        start = cache.get_seq_length()
        out = self._model(
            input_ids=torch.tensor([ids[start:end]]),
            position_ids=torch.arange(start, end)[None],
            past_key_values=cache,
            use_cache=True,
        )
        logits: torch.Tensor = out.logits[0, -1].float()
        return logits


PROMPT = Prompt([text(1), document(1), document(2, 100), text(2, 5), document(3, 131), text(3)])


@pytest.mark.parametrize("mode", ["link", "none"])
def test_answers_are_those_of_transformers(loaded: LoadedModel, mode: str) -> None:
    engine = make(loaded)
    expected, logprobs = Oracle(loaded).answer(PROMPT, 8 if mode == "link" else 0)
    answer = ask(engine, PROMPT, mode)
    assert answer.tokens == expected
    assert [float.fromhex(each) for each in answer.logprobs] == pytest.approx(logprobs, abs=1e-4)
    plain = ask(engine, PROMPT, "plain")
    assert plain.logprobs != answer.logprobs, "the test cannot tell them apart"
    idle(engine)
    engine.close()


def test_tokens_are_counted_once(loaded: LoadedModel) -> None:
    """The same beginning before another question: part of the segment is found as a prefix."""
    engine = make(loaded)
    ask(engine, Prompt([text(1), document(1), text(2, 40)]))
    request = ask(engine, Prompt([text(1), document(1), text(3, 40)])).request
    num_cached = (21 + 150) // BLOCK_TOKENS * BLOCK_TOKENS
    assert request.num_cached_tokens == num_cached
    assert request.num_reused_tokens == 21 + 150 // BLOCK_TOKENS * BLOCK_TOKENS - num_cached
    assert request.num_mended_tokens == 0
    idle(engine)
    engine.close()


@pytest.mark.parametrize("mode", ["link", "none"])
def test_it_does_not_matter_where_segments_come_from(
    loaded: LoadedModel, tmp_path: Path, mode: str
) -> None:
    engine = make(loaded, tmp_path)
    first = ask(engine, PROMPT, mode)  # segments are computed
    assert first.request.num_reused_tokens == 144 + 96 + 128 - 3 * (8 if mode == "link" else 0)
    assert first.request.num_mended_tokens == (24 if mode == "link" else 0)
    other = Prompt([text(7, 3), document(3, 131), document(1), text(8), document(2, 100), text(9)])
    shuffled = ask(engine, other, mode)  # on the device
    assert shuffled.request.num_reused_tokens == first.request.num_reused_tokens
    forget(engine)
    salted = ask(engine, PROMPT, mode, tenant="other")  # computed again
    assert salted.logprobs == first.logprobs
    forget(engine)
    again = ask(engine, PROMPT, mode)  # its own blocks
    assert again.request.num_cached_tokens >= len(PROMPT.ids) - BLOCK_TOKENS
    assert again.request.num_reused_tokens == 0
    assert again.tokens == first.tokens
    idle(engine)
    engine.close()

    engine = make(loaded, tmp_path)  # from disk
    loads = ask(engine, other, mode)
    assert loads.logprobs == shuffled.logprobs
    idle(engine)
    engine.close()
