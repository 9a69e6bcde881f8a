"""Every architecture that is accepted gives the logits of plain transformers, however it is cut."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers

from penstock.engine.models import ATTENTION, load_model
from penstock.engine.runner import Runner
from penstock.engine.scheduler import Chunk
from penstock.engine.table import BlockTable
from penstock.stores.device import DevicePool
from penstock.types import Slot

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qwen2": transformers.Qwen2Config(**SMALL, use_sliding_window=False),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=32),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=16
    ),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=None),
    "phi": transformers.PhiConfig(**SMALL),
    "phi3": transformers.Phi3Config(**SMALL, sliding_window=None),
    "gemma": transformers.GemmaConfig(**SMALL, head_dim=32),
    "gpt2": transformers.GPT2Config(
        vocab_size=64, n_embd=64, n_layer=3, n_head=4, n_positions=256, bos_token_id=1
    ),
}
BLOCK_TOKENS = 8


@dataclass
class Sequence:
    """As much of a request as the runner looks at."""

    tokens: list[int]
    blocks: InitVar[list[int]]
    table: BlockTable = field(init=False)

    def __post_init__(self, blocks: list[int]) -> None:
        self.table = BlockTable([Slot(block) for block in blocks])

    def chunk(self, start: int, end: int) -> Chunk:
        return Chunk(cast(Any, self), start, end - start)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS[kind]).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    model = loaded.model
    one = Sequence([(i * 7 + 3) % 60 + 3 for i in range(50)], [5, 3, 9, 1, 0, 2, 30])
    two = Sequence([(i * 11 + 5) % 60 + 3 for i in range(33)], [10, 11, 12, 13, 14])
    model.config._attn_implementation = "eager"
    with torch.inference_mode():
        expected = [model(torch.tensor([each.tokens])).logits[0, -1] for each in (one, two)]
    model.config._attn_implementation = ATTENTION

    shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
    pool = DevicePool(32, *shape, torch.float32)
    pool.tensor.fill_(float("nan"))  # whatever was not written must not be read
    runner = Runner(model, pool, BLOCK_TOKENS, loaded.num_heads)
    assert runner.run([one.chunk(0, 20)]).shape[0] == 0
    runner.run([one.chunk(20, 35), two.chunk(0, 10)])
    runner.run([two.chunk(10, 32), one.chunk(35, 36)])
    logits = runner.run([one.chunk(36, 50), two.chunk(32, 33)])
    for found, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
