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


def make_tiny_phi3(folder: Path) -> Path:
    """With two sets of rope factors: vLLM chooses by whether it may go beyond 512 tokens."""
    import torch
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        original_max_position_embeddings=512,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0] * 16,
            "long_factor": [1.0 + 4 * step for step in range(16)],
            "original_max_position_embeddings": 512,
        },
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        torch_dtype="float32",
    )
    Phi3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter for the tiny Phi-3, strong enough to change every answer."""
    import json

    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    made = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        name = f"base_model.model.model.layers.{layer}.self_attn.qkv_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, 128, generator=made)
        weights[f"{name}.lora_B.weight"] = torch.randn(256, 8, generator=made)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["qkv_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
