"""Tiny random models of every kind of KV cache that vLLM runs on a CPU, and how to start each.

The weights are large enough that every prompt is answered differently, and the models small enough
that most of a test is vLLM's start. What cannot run on a CPU without bf16 instructions or triton is
not here: gated delta nets, DeepSeek V3.2, the first Mamba.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,  # or every prompt would be answered with the same token
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOW = 96
_MAMBA: dict[str, Any] = {"mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4}
_TWO_WINDOWS_ONE_FULL = ["sliding_attention", "sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Model:
    """A model's config, and what vLLM needs beside it."""

    name: str
    config_class: str
    config: Mapping[str, Any]
    block_tokens: int = 32  # what every hit is a multiple of
    options: Mapping[str, Any] = field(default_factory=dict)  # for LLM()
    extra_config: Mapping[str, Any] = field(default_factory=dict)  # vLLM reads it, transformers not
    drafter: str | None = None
    finish: Callable[[Path], None] | None = None  # what is added to the saved folder

    # vLLM's own hit and its own cold run give the same log probabilities, but for rounding.
    local_is_cold: bool = True
    # A hit that leaves more than one token to compute is wrong in vLLM itself.
    only_whole_hits: bool = False
    # vLLM hits as much itself as Penstock does. With EAGLE it gives its last block up, and with
    # latent attention on a CPU it hits nothing.
    is_local_alone: bool = True
    # So few blocks that six requests do not fit, and one of 512 tokens does.
    small_pool: int = 18


def _config(**own: Any) -> dict[str, Any]:
    return _COMMON | own


def _few_answers(folder: Path) -> None:
    """Let only eight tokens be likely: a random drafter then guesses right now and then."""

    def change(weights: dict[str, Any]) -> None:
        for name in weights:
            if name.endswith(("lm_head.weight", "shared_head.head.weight")):
                weights[name][8:] *= 0.02

    _edit_weights(folder, change)


def _add_mtp_layer(folder: Path) -> None:
    """GLM's layer that predicts the token after the next, which transformers does not save."""
    import torch

    made = torch.Generator().manual_seed(2)
    hidden = _COMMON["hidden_size"]

    def change(weights: dict[str, Any]) -> None:
        last = "model.layers.2."
        mtp = "model.layers.3."
        for name in [name for name in weights if name.startswith(last)]:
            like = weights[name]
            new = torch.randn(like.shape, generator=made) * 0.15 if like.ndim > 1 else like.clone()
            weights[mtp + name.removeprefix(last)] = new
        weights[f"{mtp}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{mtp}shared_head.head.weight"] = weights["lm_head.weight"].clone()
        weights[f"{mtp}shared_head.norm.weight"] = torch.ones(hidden)
        weights[f"{mtp}enorm.weight"] = torch.ones(hidden)
        weights[f"{mtp}hnorm.weight"] = torch.ones(hidden)
        weights[f"{mtp}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=made) * 0.15

    _edit_weights(folder, change)
    _few_answers(folder)


def _edit_weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})


def _make_eagle_head(folder: Path) -> None:
    """One layer over the target's hidden state and the next token's embedding."""
    import torch
    from safetensors.torch import save_file

    made = torch.Generator().manual_seed(1)
    hidden, inner = _COMMON["hidden_size"], _COMMON["intermediate_size"]
    heads, kv_heads, size = _COMMON["num_attention_heads"], _COMMON["num_key_value_heads"], 32

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=made) * 0.15

    layer = "layers.0."
    weights = {
        f"{layer}self_attn.q_proj.weight": random(heads * size, hidden),
        f"{layer}self_attn.k_proj.weight": random(kv_heads * size, hidden),
        f"{layer}self_attn.v_proj.weight": random(kv_heads * size, hidden),
        f"{layer}self_attn.o_proj.weight": random(hidden, heads * size),
        f"{layer}mlp.gate_proj.weight": random(inner, hidden),
        f"{layer}mlp.up_proj.weight": random(inner, hidden),
        f"{layer}mlp.down_proj.weight": random(hidden, inner),
        f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
        "fc.weight": random(hidden, 2 * hidden),
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


# A state is handed to a connector where a step ends: steps end at every block, then.
_STEP_PER_BLOCK: dict[str, Any] = {"block_size": 128, "max_num_batched_tokens": 128}
_LLAMA = _config(num_hidden_layers=4, head_dim=32)

MODELS = {
    model.name: model
    for model in (
        Model("llama", "LlamaConfig", _LLAMA),
        Model("llama5", "LlamaConfig", _LLAMA | {"num_hidden_layers": 5}),
        Model(
            "mistral",
            "MistralConfig",
            _config(num_hidden_layers=4, head_dim=32, sliding_window=_WINDOW),
            small_pool=19,
        ),
        Model(
            "gemma3",
            "Gemma3TextConfig",
            _config(
                num_hidden_layers=6,
                head_dim=32,
                sliding_window=_WINDOW,
                query_pre_attn_scalar=32,
                layer_types=_TWO_WINDOWS_ONE_FULL * 2,
            ),
            small_pool=54,
        ),
        Model(
            "gemma4",  # full layers have blocks of 32 tokens, windowed ones of 64
            "Gemma4TextConfig",
            _config(
                num_hidden_layers=6,
                head_dim=32,
                global_head_dim=64,
                sliding_window=_WINDOW,
                layer_types=_TWO_WINDOWS_ONE_FULL * 2,
                num_kv_shared_layers=0,
                vocab_size_per_layer_input=VOCABULARY,
                hidden_size_per_layer_input=0,
            ),
            block_tokens=64,
            small_pool=38,
        ),
        Model(
            "gptoss",
            "GptOssConfig",
            _config(
                num_hidden_layers=4,
                head_dim=64,
                sliding_window=_WINDOW,
                num_local_experts=4,
                num_experts_per_tok=2,
                layer_types=["sliding_attention", "full_attention"] * 2,
            ),
            small_pool=37,
        ),
        Model(
            "llama4",
            "Llama4TextConfig",
            _config(
                intermediate_size_mlp=256,
                num_hidden_layers=4,
                head_dim=32,
                attention_chunk_size=128,
                num_local_experts=2,
                num_experts_per_tok=1,
                interleave_moe_layer_step=2,
                no_rope_layers=[1, 1, 1, 0],
                layer_types=["chunked_attention"] * 3 + ["full_attention"],
                use_qk_norm=False,
            ),
            small_pool=68,
        ),
        Model(
            "granite4",
            "GraniteMoeHybridConfig",
            _config(
                num_hidden_layers=4,
                layer_types=["mamba", "mamba", "mamba", "attention"],
                mamba_n_heads=8,
                mamba_d_head=32,
                mamba_expand=2,
                mamba_chunk_size=2048,
                num_local_experts=0,
                num_experts_per_tok=0,
                shared_intermediate_size=256,
                position_embedding_type="rope",
                **_MAMBA,
            ),
            block_tokens=128,
            options=_STEP_PER_BLOCK,
            small_pool=15,
        ),
        Model(
            "falconh1",
            "FalconH1Config",
            _config(
                num_hidden_layers=4,
                head_dim=32,
                mamba_d_ssm=128,
                mamba_n_heads=4,
                mamba_d_head=32,
                mamba_expand=1,
                mamba_chunk_size=2048,
                **_MAMBA,
            ),
            block_tokens=128,
            options=_STEP_PER_BLOCK,
            small_pool=9,
        ),
        Model(
            "nemotronh",
            "NemotronHConfig",
            _config(
                num_hidden_layers=4,
                head_dim=32,
                hybrid_override_pattern="M*M-",
                mamba_num_heads=8,
                mamba_head_dim=32,
                ssm_state_size=16,
                n_groups=1,
                conv_kernel=4,
                chunk_size=2048,
            ),
            block_tokens=128,
            options=_STEP_PER_BLOCK,
            small_pool=12,
        ),
        Model(
            "lfm2",
            "Lfm2Config",
            _config(
                num_hidden_layers=4,
                layer_types=["conv", "full_attention"] * 2,
                conv_L_cache=3,
                block_multiple_of=32,
                block_auto_adjust_ff_dim=False,
            ),
            extra_config={
                "conv_dim": 128,
                "conv_dim_out": 128,
                "block_dim": 128,
                "block_ff_dim": 256,
                "block_mlp_init_scale": 1.0,
                "block_norm_eps": 1e-5,
                "block_out_init_scale": 1.0,
                "block_use_swiglu": True,
            },
            local_is_cold=False,
            small_pool=20,
        ),
        Model(
            # vLLM's kernel for every CPU is compiled for 512 + 64 and blocks of 16. The one that it
            # prefers where there is AMX refuses float32.
            "deepseek3",
            "DeepseekV3Config",
            _config(
                num_key_value_heads=4,
                num_hidden_layers=3,
                kv_lora_rank=512,
                q_lora_rank=64,
                qk_rope_head_dim=64,
                qk_nope_head_dim=32,
                v_head_dim=32,
                n_routed_experts=8,
                num_experts_per_tok=2,
                n_shared_experts=1,
                moe_intermediate_size=64,
                first_k_dense_replace=1,
                n_group=2,
                topk_group=1,
            ),
            block_tokens=16,
            options={"block_size": None, "attention_backend": "CPU_MLA"},
            extra_config={
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "moe_layer_freq": 1,
                "num_nextn_predict_layers": 0,
            },
            local_is_cold=False,
            only_whole_hits=True,
            is_local_alone=False,
            small_pool=35,
        ),
        Model("eagle_head", "LlamaConfig", _LLAMA | {"num_hidden_layers": 1}),
        Model(
            "own_drafter",  # a model that drafts for itself: nearly all is accepted
            "LlamaConfig",
            _LLAMA,
            options={"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
            drafter="own_drafter",
        ),
        Model(
            "eagle",
            "LlamaConfig",
            _LLAMA,
            options={"speculative_config": {"method": "eagle", "num_speculative_tokens": 2}},
            drafter="eagle_head",
            is_local_alone=False,
            finish=_few_answers,
        ),
        Model(
            "glm4mtp",
            "Glm4MoeConfig",
            _config(
                num_hidden_layers=3,
                head_dim=32,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                first_k_dense_replace=1,
                n_group=1,
                topk_group=1,
                num_nextn_predict_layers=1,
            ),
            options={"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
            finish=_add_mtp_layer,
            is_local_alone=False,
        ),
    )
}


def options(name: str, folder: Path) -> dict[str, Any]:
    """What `LLM()` is given to serve the model, which is made if nobody has yet."""
    model = MODELS[name]
    made: dict[str, Any] = {
        "model": str(make(name, folder)),
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 8,
    } | dict(model.options)
    if model.drafter is not None:
        drafter = str(make(model.drafter, folder))
        made["speculative_config"] = {**made["speculative_config"], "model": drafter}
    return made


def make(name: str, folder: Path) -> Path:
    """The model's folder within `folder`. Several processes may ask at once: the first one wins."""
    path = folder / name
    if path.exists():
        return path
    being_made = folder / f"{name}.{os.getpid()}"
    shutil.rmtree(being_made, ignore_errors=True)
    _save(MODELS[name], being_made)
    try:
        being_made.rename(path)
    except OSError:  # another process was faster, and made the same one
        assert path.exists()
        shutil.rmtree(being_made)
    return path


def _save(model: Model, folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, model.config_class)(**model.config)
    config.dtype = torch.float32
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made.save_pretrained(folder)
    if model.name == "eagle_head":
        _make_eagle_head(folder)
    if model.extra_config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(model.extra_config)))
    if model.finish is not None:
        model.finish(folder)
