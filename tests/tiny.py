"""A small random model in fp32, which answers in no time and every prompt differently."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.costs.choose import LoadChoice
from penstock.engine.attention.torch import NAME, register
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel

BLOCK_TOKENS = 16
BLOCK_BYTES = 3 * 2 * 2 * 16 * 4 * BLOCK_TOKENS  # layers, K and V, heads, head_dim, fp32


def tiny_model(tokenizer: Any, vocab_size: int | None = None) -> LoadedModel:
    num_ids = vocab_size or len(tokenizer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=num_ids,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.5,  # or every prompt would be answered with the same token
    )
    model = LlamaForCausalLM(config).eval()
    register()
    model.config._attn_implementation = NAME
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name="tiny",
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_tokens=1024,
        vocab_size=num_ids,
        eos_token_ids=frozenset({0}),
        dtype=torch.float32,
        weights_fingerprint="tiny",
        rope="",
    )


def always_load(engine: Engine) -> None:
    """Load all that is found, and wait for it.

    By itself the engine compares measured times: a copy that stalls on a busy machine makes it
    compute what it could load, and a test that counts tokens fails.
    """
    engine.scheduler._choose = lambda match, num_past: LoadChoice(match.num_blocks)


def idle(engine: Engine) -> None:
    """With nothing left to do, nothing may be held."""
    if engine.offloader is not None:
        assert engine.offloader.drain(30)
        engine.step()
        assert engine.offloader.num_pinned == 0, "pins leak"
    engine.check()
    assert engine.pool.num_available == engine.pool.num_blocks, "blocks leak"
