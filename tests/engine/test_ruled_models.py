"""Models with windows, sinks, caps or values of another width: plain transformers' answers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.ruled_models import MODELS, WINDOW, make_model
from engine.test_runner import BLOCK_TOKENS, Sequence, compare, make
from tiny import idle

from penstock.config import Config, HostConfig
from penstock.engine.engine import Engine
from penstock.engine.models import ATTENTION, LoadedModel, load_model
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.residency import ResidencyConfig
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.types import BlockSpec, Slot

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def load(kind: str, folder: Path) -> LoadedModel:
    make_model(MODELS[kind]).save_pretrained(folder)
    return load_model(str(folder), dtype="float32")


def expected(loaded: LoadedModel, *prompts: list[int]) -> list[torch.Tensor]:
    """Plain transformers' logits of every token."""
    loaded.model.config._attn_implementation = "eager"
    try:
        with torch.inference_mode():
            return [loaded.model(torch.tensor([each])).logits[0] for each in prompts]
    finally:
        loaded.model.config._attn_implementation = ATTENTION


def chill(blocks: Iterable[tuple[Sequence, int, int]], pool: DevicePool, host: HostArena) -> None:
    """Move blocks, given as sequence, index and pin, to HOST."""
    for sequence, index, pin in blocks:
        slot = sequence.table.chill(index, Slot(pin))
        host.view(Slot(pin))[: pool.block_bytes] = bytes(pool.view(slot))
        pool.tensor[slot] = float("nan")


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's decode splits a sequence in parts of which some are before the window."""
    pytest.importorskip("triton")
    from penstock.engine.attention import triton as kernels

    monkeypatch.setattr(kernels, "PART_TOKENS", BLOCK_TOKENS)


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers(kind: str, name: str, tmp_path: Path) -> None:
    loaded = load(kind, tmp_path)
    one = Sequence([(i * 7 + 3) % 60 + 3 for i in range(46)], [5, 3, 9, 1, 0, 2])
    two = Sequence([(i * 11 + 5) % 60 + 3 for i in range(20)], [10, 11, 12])
    wanted = expected(loaded, one.tokens, two.tokens)
    shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
    pool = DevicePool(13, *shape, torch.float32)
    pool.tensor.fill_(float("nan"))  # what was not written must not be read
    host = HostArena(BlockSpec(bytes(32), pool.block_bytes, BLOCK_TOKENS), 1 << 21)
    runner = make(name, loaded, pool, host)
    runner.warm_up(lambda _: None)
    whole_one, whole_two = one.tokens, two.tokens
    runner.run([one.chunk(0, 11)])
    runner.run([one.chunk(11, 19), two.chunk(0, 6)])
    runner.run([two.chunk(6, 18), one.chunk(19, 20)])
    # Cold blocks before the window, and across its beginning.
    chill(((one, 0, 1), (one, 1, 7), (two, 0, 11)), pool, host)
    one.tokens, two.tokens = whole_one[:44], whole_two[:19]
    logits = runner.run([one.chunk(20, 44), two.chunk(18, 19)])
    compare(logits, [wanted[0][43], wanted[1][18]])
    chill(((one, 3, 8), (one, 4, 9)), pool, host)
    one.tokens, two.tokens = whole_one[:45], whole_two
    compare(runner.run([one.chunk(44, 45), two.chunk(19, 20)]), [wanted[0][44], wanted[1][19]])
    one.tokens = whole_one
    cold = runner.run([one.chunk(45, 46)]).clone()
    compare(cold, [wanted[0][45]])
    for index in one.table.cold():
        slot = Slot([5, 3, 9, 1, 0, 2][index])
        pin = one.table.warm(index, slot)
        pool.view(slot)[:] = bytes(host.view(pin))[: pool.block_bytes]
    assert torch.equal(runner.run([one.chunk(45, 46)]), cold)
    for layer, window in enumerate(loaded.windows):  # what a window hides has no effect
        if window:
            pool.tensor[5, layer] = float("nan")
            assert window == WINDOW
    assert torch.equal(runner.run([one.chunk(45, 46)]), cold)


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2", "deepseek_v3", "qwen3"])
def test_answers_are_those_of_transformers(kind: str, tmp_path: Path, tokenizer: Any) -> None:
    """Greedy, in chunks, from a pool that is too small, with cold KV; and again from DRAM."""
    loaded = replace(load(kind, tmp_path), tokenizer=tokenizer)
    prompts = [[(i * step + 5) % 60 + 3 for i in range(60)] for step in (7, 11, 17)]
    loaded.model.config._attn_implementation = "eager"
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            min_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        wanted.append(output[0, len(prompt) :].tolist())
    loaded.model.config._attn_implementation = ATTENTION
    assert len(set(map(tuple, wanted))) > 1
    token_bytes = 2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim * 4
    config = EngineConfig(
        14 * BLOCK_TOKENS * token_bytes,
        BLOCK_TOKENS,
        16,
        residency=ResidencyConfig(prefix_tokens=8, tail_tokens=8),
    )
    tiers = Config(HostConfig(size_bytes=64 * BLOCK_TOKENS * token_bytes))
    with closing(Engine(loaded, config, tiers)) as engine:
        for _ in range(2):
            requests = [engine.add(str(n), ids, GREEDY) for n, ids in enumerate(prompts)]
            while engine.has_work:
                engine.step()
            assert [request.output_ids for request in requests] == wanted
            idle(engine)
