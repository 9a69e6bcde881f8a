"""The engine over a disk folder: one model under many names, many models, a deleted folder."""

from __future__ import annotations

import copy
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import BLOCK_BYTES, BLOCK_TOKENS
from tools import TIMEOUT_SECONDS

from penstock.config import Config, DiskConfig, HostConfig
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel, load_model
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.stores import folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
NUM_WHOLE_BLOCKS = 6


def question(seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 40_000) for _ in range(NUM_WHOLE_BLOCKS * BLOCK_TOKENS + 1)]


def open_engine(loaded: LoadedModel, directory: Path | None) -> Engine:
    tiers = None
    if directory is not None:
        disk = DiskConfig(path=str(directory), size_bytes=256 * (BLOCK_BYTES + 512) + 131072)
        tiers = Config(HostConfig(size_bytes=64 * BLOCK_BYTES), disk)
    return Engine(loaded, EngineConfig(128 * BLOCK_BYTES, BLOCK_TOKENS, 512), tiers)


def ask(engine: Engine, ids: list[int]) -> tuple[list[int], list[float], int]:
    """The answer, its log probabilities, and how many tokens of the prompt were found."""
    request = engine.add("one", ids, GREEDY)
    logprobs = []
    while engine.has_work:
        for progress in engine.step():
            assert progress.sampled.logprob is not None
            logprobs.append(progress.sampled.logprob)
    if engine.offloader is not None:
        assert engine.offloader.drain(TIMEOUT_SECONDS)
        engine.step()
    return request.output_ids, logprobs, request.num_cached_tokens


def ask_in(directory: Path, loaded: LoadedModel, ids: list[int]) -> Any:
    engine = open_engine(loaded, directory)
    try:
        assert engine.offloader is not None
        assert engine.offloader.recover(TIMEOUT_SECONDS)
        return ask(engine, ids)
    finally:
        engine.close()


def alone(loaded: LoadedModel, ids: list[int]) -> tuple[Any, Any]:
    """Without tiers: computed, and with the prompt's blocks found on the device.

    Computing one token rounds otherwise than computing all: the second is what must come back,
    bit for bit, where the blocks are found on disk.
    """
    engine = open_engine(loaded, None)
    try:
        return ask(engine, ids), ask(engine, ids)
    finally:
        engine.close()


def in_bfloat16(loaded: LoadedModel) -> LoadedModel:
    model = copy.deepcopy(loaded.model).to(torch.bfloat16)
    return replace(loaded, model=model, dtype=torch.bfloat16, weights_fingerprint="tiny bf16")


def test_the_same_weights_under_another_name_find_their_kv(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    computed, found = alone(loaded, question())
    assert found[2] == NUM_WHOLE_BLOCKS * BLOCK_TOKENS
    assert ask_in(tmp_path, loaded, question()) == computed
    assert ask_in(tmp_path, replace(loaded, name="./tiny"), question()) == found
    (shelf,) = folder.look_into(tmp_path) or ()
    assert shelf.title == f"./tiny, float32, blocks of {BLOCK_TOKENS} tokens"


def test_every_spelling_of_a_path_is_the_same_model(
    loaded: LoadedModel, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded.model.save_pretrained(tmp_path / "m2")
    tokenizer.save_pretrained(tmp_path / "m2")
    monkeypatch.chdir(tmp_path)
    os.symlink("m2", "m3")
    digests = set()
    for name in ("m2", "./m2", str(tmp_path / "m2"), "m3"):
        engine = open_engine(load_model(name, dtype="float32"), None)
        digests.add(engine.namespace.digest())
        engine.close()
    assert len(digests) == 1


def test_two_dtypes_of_a_model_share_a_folder(loaded: LoadedModel, tmp_path: Path) -> None:
    models = {"float32": loaded, "bfloat16": in_bfloat16(loaded)}
    expected = {name: alone(model, question()) for name, model in models.items()}
    for turn in (0, 1):
        for name, model in models.items():
            assert ask_in(tmp_path, model, question()) == expected[name][turn], (name, turn)
    assert len(folder.look_into(tmp_path) or ()) == 2


def test_other_weights_under_the_same_name_find_nothing(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    ask_in(tmp_path, loaded, question())
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    other = replace(loaded, model=model, weights_fingerprint="other")
    assert ask_in(tmp_path, other, question()) == alone(other, question())[0]


def test_a_folder_deleted_under_the_engine(
    loaded: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers stay right, it is said, and what is saved from then on is found by the next."""
    directory = tmp_path / "kv"
    expected = [alone(loaded, question(seed)) for seed in range(3)]
    engine = open_engine(loaded, directory)
    try:
        assert ask(engine, question(0)) == expected[0][0]
        shutil.rmtree(directory)
        assert ask(engine, question(1)) == expected[1][0]
        assert f"{directory} was deleted" in caplog.text
        assert "blocks were lost" in caplog.text
        assert ask(engine, question(2)) == expected[2][0]
    finally:
        engine.close()
    for seed in (1, 2):
        assert ask_in(directory, loaded, question(seed)) == expected[seed][1]
