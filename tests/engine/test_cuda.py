"""The engine on a GPU, where there is one: whatever happens to KV, the tokens are the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.config import Config, DiskConfig, HostConfig
from penstock.engine.engine import Engine, EngineConfig
from penstock.engine.models import LoadedModel, load_model
from penstock.engine.params import SamplingParams
from penstock.keys import KeyChain
from penstock.units import MiB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

BLOCK_TOKENS = 16
VOCABULARY = 512
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return load_model(str(folder), dtype=request.param, device="cuda")


def make(loaded: LoadedModel, num_blocks: int, tiers: Config | None = None) -> Engine:
    token_bytes = 2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim
    block_bytes = token_bytes * loaded.dtype.itemsize * BLOCK_TOKENS
    settings = EngineConfig(num_blocks * block_bytes, BLOCK_TOKENS, max_batched_tokens=128)
    return Engine(loaded, settings, tiers)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    shared = [rng.randrange(VOCABULARY) for _ in range(48)]
    return [shared + [rng.randrange(VOCABULARY) for _ in range(20 + 9 * i)] for i in range(8)]


def run(engine: Engine, *, one_by_one: bool = False) -> list[list[int]]:
    requests = []
    for number, prompt in enumerate(prompts()):
        requests.append(engine.add(str(number), prompt, GREEDY))
        while one_by_one and engine.has_work:
            engine.step()
    while engine.has_work:
        engine.step()
    engine.check()
    return [request.output_ids for request in requests]


def test_loads_give_the_tokens_of_a_pool_that_holds_everything(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    """One request at a time: batches of other sizes round differently on a GPU."""
    whole = make(loaded, 256)
    wanted = run(whole, one_by_one=True)
    tiers = Config(
        host=HostConfig(size_bytes=2 * MiB, huge_pages=False),
        disk=DiskConfig(path=str(tmp_path / "kv"), size_bytes=64 * MiB),
    )
    engine = make(loaded, 24, tiers)
    assert engine.offloader is not None
    assert run(engine, one_by_one=True) == wanted
    for _ in range(2):  # from DRAM, then from disk
        engine.offloader.drain()
        engine.pool.forget()
        again = [engine.add(f"again-{n}", p, GREEDY) for n, p in enumerate(prompts()[:1])]
        while engine.has_work:
            engine.step()
        assert again[0].num_loaded_tokens > 0
        assert again[0].output_ids == wanted[0]
        engine.offloader.empty_host()
    engine.close()
    reopened = make(loaded, 24, tiers)  # after a restart
    assert reopened.offloader is not None
    reopened.offloader.recover()
    request = reopened.add("later", prompts()[7], GREEDY)
    while reopened.has_work:
        reopened.step()
    assert request.num_loaded_tokens > 0
    assert request.output_ids == wanted[7]
    reopened.close()


def test_preempted_sequences_load_what_they_had(loaded: LoadedModel) -> None:
    tiers = Config(host=HostConfig(size_bytes=32 * MiB, huge_pages=False))
    engine = make(loaded, 24, tiers)
    answers = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert [len(answer) for answer in answers] == [24] * 8
    engine.close()


def test_what_is_loaded_is_bit_for_bit_what_was_saved(loaded: LoadedModel) -> None:
    tiers = Config(host=HostConfig(size_bytes=32 * MiB, huge_pages=False))
    engine = make(loaded, 64, tiers)
    assert engine.offloader is not None
    prompt = prompts()[7]
    request = engine.add("a", prompt, SamplingParams(temperature=0, max_tokens=1))
    blocks: list[int] = []
    while engine.has_work:
        engine.step()
        blocks = list(request.table) or blocks
    full = len(prompt) // BLOCK_TOKENS
    saved = engine.device.tensor[blocks[:full]].clone()
    engine.offloader.drain()
    keys = KeyChain(engine.namespace, prompt).keys[:full]
    engine.device.tensor.zero_()
    slots = engine.pool.take(full)
    assert slots is not None
    ticket = engine.offloader.load(keys, slots)
    done = {done.ticket: done for done in engine.offloader.wait([ticket])}[ticket]
    assert done.ok
    assert torch.equal(engine.device.tensor[slots].view(torch.uint8), saved.view(torch.uint8))
    engine.close()
