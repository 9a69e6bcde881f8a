"""A small random model, which answers every prompt differently."""

from __future__ import annotations

from pathlib import Path


def make_tiny(folder: Path, seed: int = 0) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.5,  # or every prompt would be answered with the same token
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
