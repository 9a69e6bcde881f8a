"""Keys that are turned to other positions are those that the model computes there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.engine.anywhere.placing import Placing
from penstock.engine.anywhere.turning import Turner, _keys_at
from penstock.engine.attention.torch import NAME, register
from penstock.engine.models import LoadedModel
from penstock.errors import ConfigError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("Llama", {}),
    "linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "longrope": ("Phi3", {"rope_parameters": LONG}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 16}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Gemma": ("Gemma", {"head_dim": 16}),
    "a part of each head": ("Phi", {"partial_rotary_factor": 0.5}),
    "pairs beside each other": ("Cohere", {}),
    "GLM": ("Glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "layers without positions": ("SmolLM3", {"no_rope_layer_interval": 2}),
}


def make(
    name: str, dtype: torch.dtype = torch.float32, more: dict[str, Any] | None = None
) -> LoadedModel:
    kind, own = MODELS[name]
    more = {**own, **(more or {})}
    torch.manual_seed(1)
    library: Any = transformers
    config = getattr(library, f"{kind}Config")(**{**SMALL, **more})
    model = getattr(library, f"{kind}ForCausalLM")(config).eval().to(dtype)
    register()
    model.config._attn_implementation = NAME
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return LoadedModel(
        *(model, None, name, 3, 4, 2, head_dim, 128, 64, frozenset({0}), dtype, name, ""),
    )


@pytest.mark.parametrize("name", MODELS)
def test_turned_keys_are_those_computed_there(name: str) -> None:
    loaded = make(name)
    turner = Turner(loaded)
    at = [0, 5, 99]
    keys = _keys_at(loaded, at)
    for layer in range(3):
        for one, start in zip(keys, at, strict=True):
            for other, end in zip(keys, at, strict=True):
                turned = turner.turn(one[layer], layer, end - start)
                scale = float(other[layer].abs().max())
                assert float((turned - other[layer]).abs().max()) < 2e-5 * scale


@pytest.mark.parametrize("name", ["default", "pairs beside each other"])
def test_in_bfloat16(name: str) -> None:
    loaded = make(name, torch.bfloat16)
    turner = Turner(loaded)
    one, other = _keys_at(loaded, [3, 90])
    for layer in range(3):
        turned = turner.turn(one[layer], layer, 87)
        assert float((turned - other[layer]).abs().max()) < 0.02 * float(other[layer].abs().max())


def test_a_few_large_keys_that_hardly_rotate_do_not_hide_the_others() -> None:
    """Such as the biases of Qwen2's keys have."""
    more = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e8}}
    loaded = make("Qwen2", more=more)
    for layer in loaded.model.model.layers:
        layer.self_attn.k_proj.bias.data[7] = 1000.0  # the slowest pair of a head
    loaded = replace(loaded, model=loaded.model.to(torch.bfloat16), dtype=torch.bfloat16)
    turner = Turner(loaded)
    one, other = _keys_at(loaded, [3, 90])
    for layer in range(3):
        turned = turner.turn(one[layer], layer, 87)
        error = (turned - other[layer])[..., :7].abs().max()
        assert float(error) < 0.02 * float(other[layer][..., :7].abs().max())


def test_tokens_without_an_embedding_tell_nothing() -> None:
    """Their keys are zero wherever they stand, as if the model had no positions."""
    loaded = make("default")
    embeddings = loaded.model.get_input_embeddings().weight.data
    embeddings[1:3] = 0.0
    turner = Turner(loaded)
    one, other = _keys_at(loaded, [3, 90], 5)
    for layer in range(3):
        turned = turner.turn(one[layer], layer, 87)
        assert float((turned - other[layer]).abs().max()) < 2e-5 * float(other[layer].abs().max())
    embeddings[:] = 0.0
    with pytest.raises(ConfigError, match="all zero"):
        Turner(loaded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_contexts(dtype: torch.dtype) -> None:
    """Their last angles are rounded by far more than the keys."""
    Turner(replace(make("default", dtype), max_tokens=1 << 20))


def test_positions_that_are_added_cannot_be_turned() -> None:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=64, n_layer=3, n_head=4, n_positions=128, initializer_range=0.5
    )
    model: Any = transformers.GPT2LMHeadModel(config).eval()
    register()
    model.config._attn_implementation = NAME
    facts = (model, None, "gpt2", 3, 4, 4, 16, 128, 64, frozenset({0}), torch.float32, "", "")
    with pytest.raises(ConfigError, match="cannot be turned"):
        Turner(LoadedModel(*facts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_turning_by_nothing_changes_no_bit(loaded: LoadedModel, dtype: torch.dtype) -> None:
    """Not even those of a NaN, an infinity or a negative zero."""
    size = 4 * 3 * 2 * 16 * 2 * 16 * dtype.itemsize
    noise = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.manual_seed(0))
    pool = noise.view(dtype).view(4, 3, 2, 16, 2, 16).clone()
    before = pool.view(torch.uint8).clone()
    tokens = np.arange(20)
    placing = Placing(tokens // 16, tokens % 16, 2 + (tokens + 5) // 16, (tokens + 5) % 16, 0)
    Turner(loaded).place(pool, [placing])
    after = pool.view(torch.uint8)
    assert torch.equal(after[:2], before[:2])
    rows = after.transpose(1, 3).flatten(0, 1)  # [tokens, ...]
    assert torch.equal(rows[32 + 5 : 32 + 25], before.transpose(1, 3).flatten(0, 1)[:20])
    assert torch.equal(rows[32 : 32 + 5], before.transpose(1, 3).flatten(0, 1)[32 : 32 + 5])


def test_only_the_placed_tokens_are_written(loaded: LoadedModel) -> None:
    pool = torch.randn(4, 3, 2, 16, 2, 16, generator=torch.manual_seed(0))
    before = pool.clone()
    tokens = np.arange(3, 29)
    placing = Placing(tokens // 16, tokens % 16, 2 + (tokens - 3) // 16, (tokens - 3) % 16, 40)
    turner = Turner(loaded)
    turner.place(pool, [placing])
    rows, old = (each.transpose(1, 3).flatten(0, 1) for each in (pool, before))
    assert torch.equal(rows[:32], old[:32])
    assert torch.equal(rows[32 + 26 :], old[32 + 26 :])
    for layer in range(3):  # rows are [tokens, kinds, layers, heads, dims]
        assert torch.equal(rows[32 : 32 + 26, 1, layer], old[3:29, 1, layer])
        turned = turner.turn(old[3:29, 0, layer], layer, 40)
        assert torch.equal(rows[32 : 32 + 26, 0, layer], turned)


@pytest.mark.parametrize("name", ["default", "a part of each head", "layers without positions"])
@pytest.mark.parametrize("turn", [0, 61])
def test_the_kernel_places_as_torch_does(name: str, turn: int) -> None:
    _compare(name, turn)


def test_the_kernel_for_pairs_beside_each_other() -> None:
    _compare("pairs beside each other", 61)


def _compare(name: str, turn: int) -> None:
    pytest.importorskip("triton")
    loaded = make(name)
    turner = Turner(loaded)
    size = (5, 3, 2, 16, 2, loaded.head_dim)
    one = torch.randn(size, generator=torch.manual_seed(0)).to(DEVICE)
    other = one.clone()
    tokens = np.random.default_rng(0).permutation(40)[:9]
    placing = Placing(tokens // 16, tokens % 16, 3 + tokens // 20, np.arange(9), turn)
    turner.place_by_torch(one, placing)
    turner.place_by_kernel(other, placing)
    assert float((one - other).abs().max()) < (1e-6 if turn else 1e-30)
