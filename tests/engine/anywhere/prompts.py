"""Prompts with segments for tests, an engine that answers them, and what transformers answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny import BLOCK_BYTES, BLOCK_TOKENS, always_load
from transformers import DynamicCache

from penstock.config import Config, DiskConfig, HostConfig
from penstock.engine.anywhere.turning import Turner
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import Request

NUM_ANSWER = 6
LINK_TOKENS = 8
BLEND_SHARE = 0.2
MODES = ["link", "blend", "none"]


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
    loaded: LoadedModel,
    folder: Path | None = None,
    *,
    num_blocks: int = 128,
    dram: int = 256,
    offloads: bool = True,
    **settings: Any,
) -> Engine:
    tiers = Config(
        HostConfig(size_bytes=dram * BLOCK_BYTES, huge_pages=False),
        DiskConfig(path=None if folder is None else str(folder / "kv"), size_bytes=64 << 20),
    )
    settings = {"max_num_batched_tokens": 256, **settings}
    config = EngineConfig(num_blocks * BLOCK_BYTES, BLOCK_TOKENS, **settings)
    engine = Engine(loaded, config, tiers if offloads else None)
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
    mending = None
    if mode != "plain":
        mending = {"mode": mode, "link_tokens": LINK_TOKENS, "blend_share": BLEND_SHARE}
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
    def answer(self, prompt: Prompt, mode: str) -> tuple[list[int], list[float]]:
        before = self._model.config._attn_implementation
        self._model.config._attn_implementation = "eager"
        try:
            return self._answer(prompt, mode)
        finally:
            self._model.config._attn_implementation = before

    def _answer(self, prompt: Prompt, mode: str) -> tuple[list[int], list[float]]:
        ids, cache = prompt.ids, DynamicCache()
        plain = DynamicCache()
        self._compute(plain, ids, len(ids))
        for start, end in prompt.segments:
            if not start:
                continue
            num_reused = (min(end, len(ids) - 1) - start) // BLOCK_TOKENS * BLOCK_TOKENS
            alone = DynamicCache()
            self._compute(alone, ids[start : start + num_reused], num_reused)
            keys = [
                self._turner.turn(alone.layers[layer].keys.transpose(1, 2), layer, start)
                for layer in range(self._num_layers)
            ]
            keys = [each.transpose(1, 2) for each in keys]
            mended = set(range(LINK_TOKENS)) if mode == "link" else set()
            if mode == "blend":
                stands = plain.layers[1].keys[:, :, start : start + num_reused]
                changes = (stands - keys[1]).square().sum((0, 1, 3))
                mended = set(changes.topk(round(BLEND_SHARE * num_reused)).indices.tolist())
            for local in range(num_reused):
                if local in mended:
                    continue
                self._compute(cache, ids, start + local)
                at = slice(local, local + 1)
                for layer, mine in enumerate(keys):
                    cache.update(mine[:, :, at], alone.layers[layer].values[:, :, at], layer)
        answer: list[int] = []
        logprobs = []
        for _ in range(NUM_ANSWER):
            logits = self._compute(cache, ids + answer, len(ids) + len(answer))
            logs = logits.log_softmax(-1)
            answer.append(int(logs.argmax()))
            logprobs.append(float(logs.max()))
        return answer, logprobs

    def _compute(self, cache: DynamicCache, ids: list[int], end: int) -> torch.Tensor:
        """Add all tokens up to `end`. Returns the last one's logits."""
        start = cache.get_seq_length()
        if start == end:
            return torch.zeros(0)
        out = self._model(
            input_ids=torch.tensor([ids[start:end]]),
            position_ids=torch.arange(start, end)[None],
            past_key_values=cache,
            use_cache=True,
        )
        logits: torch.Tensor = out.logits[0, -1].float()
        return logits
