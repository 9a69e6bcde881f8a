from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.shapes.sizing import (
    PRESETS,
    ModelShape,
    find_shape,
    shape_from_config,
    suggest_block_tokens,
)

LLAMA_8B: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SMOLLM2: dict[str, Any] = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MIXTRAL: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}

Write = Callable[[Any], Path]


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        shape_from_config(path)
    message = str(caught.value)
    assert "\n" not in message
    assert "expected" in message
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("smollm2-135m", 23_040),
        ("qwen2.5-7b", 57_344),
    ],
)
def test_presets(name: str, bytes_per_token: int) -> None:
    shape = PRESETS[name]
    assert find_shape(name.upper()) is shape
    assert shape.bytes_per_token == bytes_per_token
    assert shape.num_heads is not None
    assert shape.num_heads * shape.head_dim == shape.hidden_size
    assert not shape.is_mla


def test_kv_grows_with_tokens_and_batch() -> None:
    shape = find_shape("llama-3.1-8b")
    assert shape.kv_bytes(32_768) == 4 << 30
    assert shape.kv_bytes(2048, batch=16) == 4 << 30


@pytest.mark.parametrize(("bits", "num_bytes"), [(32, 48), (16, 24), (8, 12), (4, 6)])
def test_bits(bits: int, num_bytes: int) -> None:
    assert ModelShape(1, 2, 3, bits).bytes_per_token == num_bytes


def test_a_part_of_a_byte_takes_a_byte() -> None:
    assert ModelShape(1, 1, 1, 4, latent_dim=3).bytes_per_token == 2


def test_llama_from_its_config(write: Write) -> None:
    path = write(LLAMA_8B)
    assert shape_from_config(path) == shape_from_config(path.parent) == PRESETS["llama-3.1-8b"]
    assert find_shape(str(path.parent)) == PRESETS["llama-3.1-8b"]


def test_smollm2_from_its_config(write: Write) -> None:
    assert shape_from_config(write(SMOLLM2)) == PRESETS["smollm2-135m"]


def test_mla_keeps_one_latent_vector_per_layer(write: Write) -> None:
    shape = shape_from_config(write(DEEPSEEK_V3))
    assert shape.is_mla
    assert shape.bytes_per_token == 70_272
    assert shape.head_dim == 192
    assert shape.num_params == pytest.approx(671e9, rel=0.01)
    assert shape.params_per_token == pytest.approx(37.5e9, rel=0.02)


def test_a_mixture_of_experts_computes_with_some_of_its_parameters(write: Write) -> None:
    shape = shape_from_config(write(MIXTRAL))
    assert shape.num_params == pytest.approx(46.7e9, rel=0.001)
    assert shape.params_per_token == shape.num_active_params
    assert shape.num_active_params == pytest.approx(12.9e9, rel=0.01)


def test_without_kv_heads_every_head_has_its_own(write: Write) -> None:
    config = {key: value for key, value in LLAMA_8B.items() if key != "num_key_value_heads"}
    assert shape_from_config(write(config)).num_kv_heads == 32
    assert shape_from_config(write({**config, "multi_query": True})).num_kv_heads == 1
    assert shape_from_config(write({**config, "num_kv_heads": 4})).num_kv_heads == 4


def test_head_dim_is_read_or_worked_out(write: Write) -> None:
    assert shape_from_config(write({**LLAMA_8B, "head_dim": 256})).head_dim == 256
    assert shape_from_config(write({**LLAMA_8B, "head_dim": None})).head_dim == 128


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("bfloat16", 16),
        ("float16", 16),
        ("torch.float16", 16),
        ("float32", 32),
        ("float8_e4m3fn", 8),
        ("fp8", 8),
        ("auto", 16),
        (None, 16),
    ],
)
def test_dtype(write: Write, dtype: str | None, bits: int) -> None:
    assert shape_from_config(write({**LLAMA_8B, "torch_dtype": dtype})).bits == bits
    del (newer := {**LLAMA_8B, "dtype": dtype})["torch_dtype"]
    assert shape_from_config(write(newer)).bits == bits


def test_bits_can_be_overruled(write: Write) -> None:
    assert shape_from_config(write(LLAMA_8B), bits=8).bytes_per_token == 65_536


def test_a_multimodal_model_is_its_text_model(write: Write) -> None:
    text = {key: value for key, value in SMOLLM2.items() if key != "torch_dtype"}
    path = write({"torch_dtype": "float32", "text_config": {**text, "dtype": None}, "vision": {}})
    shape = shape_from_config(path)
    assert shape.num_layers == 30
    assert shape.bits == 32


@pytest.mark.parametrize("name", ["intermediate_size", "vocab_size"])
def test_parameters_are_not_guessed(write: Write, name: str) -> None:
    shape = shape_from_config(write({**LLAMA_8B, name: None}))
    assert shape.bytes_per_token == 131_072
    assert shape.num_params is shape.params_per_token is None


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_missing_field(write: Write, name: str) -> None:
    path = write({key: value for key, value in LLAMA_8B.items() if key != name})
    assert f"has no {name}" in refusal(path)


def test_missing_field_of_mla(write: Write) -> None:
    path = write({**DEEPSEEK_V3, "qk_rope_head_dim": None})
    assert "has no qk_rope_head_dim" in refusal(path)


@pytest.mark.parametrize("value", [0, -1, 2.5, "32", True, [32]])
def test_wrong_type_of_a_field(write: Write, value: object) -> None:
    message = refusal(write({**LLAMA_8B, "num_hidden_layers": value}))
    assert message.startswith("num_hidden_layers in ")
    assert "a whole number above 0" in message


def test_heads_that_do_not_divide(write: Write) -> None:
    assert "divisor of the 32" in refusal(write({**LLAMA_8B, "num_key_value_heads": 5}))
    assert "multiple of the 32" in refusal(write({**LLAMA_8B, "hidden_size": 4097}))


def test_unknown_dtype(write: Write) -> None:
    assert "expected bfloat16" in refusal(write({**LLAMA_8B, "torch_dtype": "int3"}))


def test_layers_without_kv_are_not_counted_as_if_they_had_it(write: Write) -> None:
    layers = ["full_attention", "sliding_attention"] * 16
    config = {**LLAMA_8B, "layer_types": layers, "sliding_window": 4096}
    shape = shape_from_config(write(config))
    assert (shape.num_layers, shape.num_full_layers, shape.num_window_layers) == (32, 16, 16)
    for kind in ("linear_attention", "mamba", "retention"):
        message = refusal(write({**config, "layer_types": [*layers[:-1], kind]}))
        assert kind in message
    assert "no sliding_window" in refusal(write({**LLAMA_8B, "layer_types": layers}))
    assert "lists 31 layers" in refusal(write({**config, "layer_types": layers[1:]}))


@pytest.mark.parametrize("text", ["", "{", "weights", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_not_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert "is not JSON" in refusal(path)


def test_not_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\xfd")
    assert "is not JSON" in refusal(path)


def test_not_an_object(write: Write) -> None:
    assert "holds a JSON list" in refusal(write([LLAMA_8B]))


def test_missing_file(tmp_path: Path) -> None:
    assert "there is no file" in refusal(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"there is no file .*config\.json"):
        shape_from_config(tmp_path)


def test_unreadable_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "cannot be read (Permission denied)" in refusal(write({}))


def test_unknown_model() -> None:
    with pytest.raises(ConfigError, match=r"did you mean llama-3\.1-8b\?"):
        find_shape("llama-3-8b")
    with pytest.raises(ConfigError, match=r"known models are llama-3\.1-8b, "):
        find_shape("zzz")


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 0}, {"head_dim": -1}, {"bits": 12}, {"num_params": 0}, {"latent_dim": 1.5}],
)
def test_impossible_shapes_are_refused(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(ConfigError, match=f"^{name} is .*expected"):
        ModelShape(**{"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, **change})


@pytest.mark.parametrize(
    ("bytes_per_token", "block_tokens"),
    [(131_072, 16), (327_680, 16), (23_040, 64), (70_272, 16), (57_344, 32)],
)
def test_suggested_blocks(bytes_per_token: int, block_tokens: int) -> None:
    assert suggest_block_tokens(bytes_per_token) == block_tokens


@given(st.integers(1, 1 << 24))
def test_suggested_blocks_are_one_to_two_mebibytes_or_sixteen_tokens(bytes_per_token: int) -> None:
    tokens = suggest_block_tokens(bytes_per_token)
    assert tokens >= 16
    assert tokens & (tokens - 1) == 0
    assert tokens == 16 or (1 << 20) < tokens * bytes_per_token <= (2 << 20)


def test_a_block_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes_per_token is 0"):
        suggest_block_tokens(0)
