"""Tiny models whose attention does more than look back at all tokens (see `LayerRules`)."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from penstock.engine import weights

WINDOW = 12
SMALL: Any = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention"]
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
LATENT: Any = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, Any] = {
    "gemma2": transformers.Gemma2Config(
        # Caps that these small scores feel.
        **SMALL,
        head_dim=16,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=16,
    ),
    "gpt_oss": transformers.GptOssConfig(
        **SMALL,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=PLAIN_ROPE,
    ),
    "deepseek_v3": transformers.DeepseekV3Config(**LATENT),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=WINDOW),
    "qwen3": transformers.Qwen3Config(
        **SMALL, head_dim=16, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "deepseek_v2": transformers.DeepseekV2Config(**LATENT),
    "deepseek_v3, wide values": transformers.DeepseekV3Config(**LATENT | {"v_head_dim": 40}),
    "gemma3": transformers.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=WINDOW, layer_types=MIXED
    ),
    "qwen2": transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "phi3": transformers.Phi3Config(**SMALL, sliding_window=WINDOW),
    "cohere2": transformers.Cohere2Config(**SMALL, sliding_window=WINDOW, layer_types=MIXED),
    "olmo3": transformers.Olmo3Config(**SMALL, sliding_window=WINDOW, layer_types=MIXED),
    "mixtral": transformers.MixtralConfig(**SMALL, sliding_window=WINDOW, num_local_experts=4),
    "exaone4": transformers.Exaone4Config(**SMALL, sliding_window=WINDOW, layer_types=MIXED),
}


def make_model(config: Any) -> Any:
    """A random model. Sinks and norms matter in it."""
    torch.manual_seed(0)
    with weights.quiet():
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.normal_(1.0, 1.0)
    return model
