"""What the layers of real models keep: the sums written out, as vLLM allocates them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.groups.kinds import Kind
from penstock.shapes.catalog import MODELS
from penstock.shapes.layer_groups import LayerGroup
from penstock.shapes.shape import ModelShape
from penstock.shapes.sizing import shape_from_config

CONFIGS = Path(__file__).parent / "configs"
KiB = 1024


def read(name: str, bits: int | None = None) -> ModelShape:
    return shape_from_config(CONFIGS / f"{name}.json", bits)


def group(shape: ModelShape, label: str) -> LayerGroup:
    (found,) = [each for each in shape.groups if each.label == label]
    return found


# Layers by label, what one token adds to layers that keep all, and one checkpoint.
SUMS: dict[str, tuple[dict[str, int], int, int]] = {
    "gpt-oss-120b": (
        {"sliding window": 18, "full attention": 18},
        18 * 2 * 8 * 64 * 2,
        18 * 2 * 8 * 64 * 2 * 128,
    ),
    "gemma-3-27b": (
        {"sliding window": 52, "full attention": 10},
        10 * 2 * 16 * 128 * 2,
        52 * 2 * 16 * 128 * 2 * 1024,
    ),
    # Full layers have fewer and larger heads.
    "gemma-4": (
        {"sliding window": 50, "full attention": 10},
        10 * 2 * 4 * 512 * 2,
        50 * 2 * 16 * 256 * 2 * 1024,
    ),
    "mistral-7b-v0.1": ({"sliding window": 32}, 0, 32 * 2 * 8 * 128 * 2 * 4096),
    "llama-4-scout": (
        {"chunked attention": 36, "full attention": 12},
        12 * 2 * 8 * 128 * 2,
        36 * 2 * 8 * 128 * 2 * 8192,
    ),
    "qwen3-next-80b-a3b": (
        {"gated delta net state": 36, "full attention": 12},
        12 * 2 * 2 * 256 * 2,
        36 * (3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 2),
    ),
    # Its states are float32, as its config says; the convolutions are not.
    "qwen3.5": (
        {"gated delta net state": 45, "full attention": 15},
        15 * 2 * 2 * 256 * 2,
        45 * (3 * (2 * 16 * 128 + 64 * 128) * 2 + 64 * 128 * 128 * 4),
    ),
    "granite-4.0-h-small": (
        {"Mamba2 state": 36, "full attention": 4},
        4 * 2 * 8 * 128 * 2,
        36 * (3 * (8192 + 2 * 1 * 128) * 2 + 128 * 64 * 128 * 2),
    ),
    # Every layer has both.
    "falcon-h1-7b": (
        {"Mamba2 state": 44, "full attention": 44},
        44 * 2 * 2 * 128 * 2,
        44 * (3 * (3072 + 2 * 1 * 256) * 2 + 24 * 128 * 256 * 2),
    ),
    # Half of its layers are MLPs and keep nothing. Its states are float32 unless it says otherwise.
    "nemotron-nano-9b-v2": (
        {"Mamba2 state": 27, "full attention": 4},
        4 * 2 * 8 * 128 * 2,
        27 * (3 * (128 * 80 + 2 * 8 * 128) * 2 + 128 * 80 * 128 * 4),
    ),
    "lfm2-1.2b": (
        {"short convolution state": 10, "full attention": 6},
        6 * 2 * 8 * 64 * 2,
        10 * 2 * 2048 * 2,
    ),
    "jamba-mini": (
        {"Mamba state": 28, "full attention": 4},
        4 * 2 * 8 * 128 * 2,
        28 * 8192 * (3 + 16) * 2,
    ),
    "deepseek-v3": ({"MLA latents": 61}, 61 * (512 + 64) * 2, 0),
    "deepseek-v3.2": (
        {"MLA latents and indexer keys": 61},
        61 * ((512 + 64) * 2 + 128 + 4),
        0,
    ),
    "kimi-k2": ({"MLA latents": 61}, 61 * (512 + 64) * 2, 0),
    "kimi-linear-48b-a3b": (
        {"KDA state": 20, "MLA latents": 7},
        7 * (512 + 64) * 2,
        20 * (3 * 3 * 32 * 128 * 2 + 32 * 128 * 128 * 4),
    ),
    "glm-4.5": ({"full attention": 92}, 92 * 2 * 8 * 128 * 2, 0),
}


@pytest.mark.parametrize("name", SUMS)
def test_what_real_models_keep(name: str) -> None:
    shape = read(name)
    layers, per_token, checkpoint = SUMS[name]
    assert {each.label: each.num_layers for each in shape.groups} == layers
    assert shape.full_bytes_per_token == per_token
    assert shape.checkpoint_bytes() == checkpoint
    for tokens in (1, 100, 10_000, 1_000_000):
        windows = sum(
            each.token_bytes(16) * min(each.span, tokens)
            for each in shape.groups
            if each.kind in (Kind.WINDOW, Kind.CHUNK)
        )
        states = sum(each.state_bytes * each.num_layers for each in shape.groups)
        assert shape.kv_bytes(tokens) == per_token * tokens + windows + states
        assert shape.checkpoint_bytes(tokens) == windows + states
        assert shape.offloaded_bytes(tokens, 3) == per_token * tokens + 3 * (windows + states)
    assert shape.kv_bytes(0) == shape.checkpoint_bytes(0) == 0
    indexes = sorted(index for each in shape.groups for index in each.layers)
    assert set(indexes) <= set(range(shape.num_layers))


@pytest.mark.parametrize(
    ("name", "per_token", "checkpoint", "session"),
    [
        ("gpt-oss-120b", 36_864, 4_718_592, 1_212_678_144),
        ("gpt-oss-20b", 24_576, 3_145_728, 808_452_096),
        ("gemma-3-27b", 81_920, 436_207_616, 3_120_562_176),
        ("deepseek-v3", 70_272, 0, 2_302_672_896),
        ("qwen3-next-80b-a3b", 24_576, 39_518_208, 844_824_576),
    ],
)
def test_the_sums_in_the_docs(name: str, per_token: int, checkpoint: int, session: int) -> None:
    """Of 32,768 tokens. docs/planning.md writes out how they come about."""
    shape = MODELS[name].shape
    assert shape.full_bytes_per_token == per_token
    assert shape.checkpoint_bytes() == checkpoint
    assert shape.kv_bytes(32_768) == session == 32_768 * per_token + checkpoint
    docs = Path(__file__).parents[2].joinpath("docs", "planning.md").read_text()
    (row,) = [line for line in docs.splitlines() if line.startswith(f"| `{name}` |")]
    for number in (per_token, session, checkpoint):
        assert not number or f"{number:,}" in row


@pytest.mark.parametrize("name", ["gpt-oss-120b", "qwen3-next-80b-a3b", "deepseek-v3"])
def test_the_catalog_agrees_with_the_config(name: str) -> None:
    assert MODELS[name].shape.groups == read(name).groups


def test_which_layers() -> None:
    assert group(read("granite-4.0-h-small"), "full attention").layers == (5, 15, 25, 35)
    assert group(read("gemma-3-27b"), "full attention").layers == tuple(range(5, 62, 6))
    assert group(read("llama-4-scout"), "full attention").layers == tuple(range(3, 48, 4))
    assert group(read("jamba-mini"), "full attention").layers == (4, 12, 20, 28)
    assert group(read("nemotron-nano-9b-v2"), "full attention").layers == (14, 21, 30, 39)


def test_eight_bits_do_not_change_states_and_indexers() -> None:
    qwen, eight = read("qwen3-next-80b-a3b"), read("qwen3-next-80b-a3b", 8)
    assert eight.full_bytes_per_token * 2 == qwen.full_bytes_per_token
    assert eight.checkpoint_bytes() == qwen.checkpoint_bytes()
    assert read("deepseek-v3", 8).bytes_per_token == 61 * 576
    # fp8_ds_mla: 512 in fp8, 64 in bf16, four scales; and the indexer's 128 and one scale.
    assert read("deepseek-v3.2", 8).bytes_per_token == 61 * (656 + 132)


def test_indexers_that_several_layers_share(write: Callable[[Any], Path]) -> None:
    config = json.loads((CONFIGS / "deepseek-v3.2.json").read_text())
    shape = shape_from_config(write({**config, "index_topk_freq": 4}))
    with_indexer = group(shape, "MLA latents and indexer keys").layers
    assert with_indexer == (0, 1, *range(5, 61, 4))
    shape = shape_from_config(write({**config, "index_topk_pattern": "F" + "S" * 60}))
    assert group(shape, "MLA latents").num_layers == 60


def test_layers_that_read_the_kv_of_others_keep_none(write: Callable[[Any], Path]) -> None:
    config = json.loads((CONFIGS / "gemma-4.json").read_text())
    config["text_config"]["num_kv_shared_layers"] = 18
    shape = shape_from_config(write(config))
    assert {each.label: each.num_layers for each in shape.groups} == {
        "sliding window": 35,
        "full attention": 7,
    }


def test_several_gpus_hold_some_of_it_twice() -> None:
    deepseek = read("deepseek-v3")
    assert deepseek.kv_bytes(1000, num_gpus=8) == 8 * deepseek.kv_bytes(1000)
    assert deepseek.offloaded_bytes(1000, num_gpus=8) == deepseek.kv_bytes(1000)  # kept once
    qwen = read("qwen3-next-80b-a3b")  # 2 KV heads, 32 heads of the state
    full, states = 24_576 * 1000, qwen.checkpoint_bytes()
    assert qwen.kv_bytes(1000, num_gpus=2) == full + states
    assert qwen.kv_bytes(1000, num_gpus=8) == 4 * full + states
    assert qwen.offloaded_bytes(1000, 2, num_gpus=8) == 4 * full + 2 * states
    with pytest.raises(ConfigError, match="32 heads of a gated delta net state"):
        qwen.kv_bytes(1000, num_gpus=64)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("whisper-large-v3", "an encoder and cross-attention"),
        ("deepseek-v4", "compress several tokens into one"),
        ("minimax-m1", "attn_type_list, so not all of its layers are plain attention"),
        ("recurrentgemma-2b", "lru_width, so not all of its layers are plain attention"),
    ],
)
def test_what_is_unknown_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(name)
    assert words in str(caught.value)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["mamba"] * 40}, "no layer with attention"),
        ({"layer_types": ["rwkv"] * 40}, "layers of type 'rwkv'"),
        ({"layer_types": ["attention", "mamba"]}, "lists 2 layers"),
        ({"layer_types": None}, "mamba_d_state, so not all of its layers"),
        ({"mamba_d_state": None}, "no mamba_d_state"),
        ({"mamba_n_heads": None}, "whose state has an unknown size"),
        ({"mamba_expand": "two"}, "mamba_expand"),
        ({"num_hidden_layers": 1 << 40, "layer_types": None}, "at most 10,000"),
        ({"param_sink_number": 128}, "static attention sinks"),
    ],
)
def test_wrong_hybrids(write: Callable[[Any], Path], change: dict[str, Any], words: str) -> None:
    config = json.loads((CONFIGS / "granite-4.0-h-small.json").read_text())
    with pytest.raises(ConfigError) as caught:
        shape_from_config(write({**config, **change}))
    assert words in str(caught.value)


def test_kda_layers_must_be_complete(write: Callable[[Any], Path]) -> None:
    config = json.loads((CONFIGS / "kimi-linear-48b-a3b.json").read_text())
    for wrong in ([1, 2], None, ["one"]):
        kda = {**config["linear_attn_config"], "kda_layers": wrong}
        with pytest.raises(ConfigError, match="expected each of 27 layers"):
            shape_from_config(write({**config, "linear_attn_config": kda}))


def test_too_many_layers(write: Callable[[Any], Path]) -> None:
    config = json.loads((CONFIGS / "glm-4.5.json").read_text())
    with pytest.raises(ConfigError, match="at most 10,000"):
        shape_from_config(write({**config, "num_hidden_layers": 1 << 40}))


def test_parameters_of_hybrids_are_not_guessed() -> None:
    assert read("granite-4.0-h-small").num_params is None
    assert MODELS["qwen3-next-80b-a3b"].shape.num_params == 80_000_000_000


def test_only_plain_models_are_plain() -> None:
    plain = {name for name in SUMS if read(name).is_plain}
    assert plain == {"glm-4.5"}
