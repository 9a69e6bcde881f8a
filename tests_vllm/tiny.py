"""A small random model, which answers in no time and every prompt differently."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 2000


def make_tiny(folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.5,  # or every prompt would be answered with the same token
        torch_dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
