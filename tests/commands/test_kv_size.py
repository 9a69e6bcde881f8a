from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.shapes.sizing import PRESETS

Run = Callable[..., Any]
SHAPE = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128"]
MLA = {
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "dtype": "bfloat16",
}


GROUPED = [
    name
    for name, shape in PRESETS.items()
    if not shape.is_mla and shape.num_heads and shape.num_kv_heads < shape.num_heads
    if shape.num_layers == shape.num_full_layers + shape.num_window_layers
]


@pytest.mark.parametrize("model", GROUPED)
def test_the_textbook_formula(run: Run, model: str) -> None:
    found = run("kv-size", model, "--tokens", 100, "--batch", 3, "--json").json
    elements = 2 * found["num_layers"] * found["num_kv_heads"] * found["head_dim"]
    assert found["kv_bytes_per_token"] == elements * found["bits"] // 8
    assert found["kv_bytes_per_sequence"] == 100 * found["kv_bytes_per_token"]
    assert found["kv_bytes_total"] == 3 * found["kv_bytes_per_sequence"]
    assert found["block_bytes"] == found["block_tokens"] * found["kv_bytes_per_token"]
    assert found["num_kv_heads"] < found["num_heads"]  # grouped: not one KV head per head


def test_a_shape_in_place_of_a_model(run: Run) -> None:
    from_shape = run("kv-size", *SHAPE, "--json").json
    from_model = run("kv-size", "llama-3.1-8b", "--json").json
    unknown = {"model": None, "num_heads": None}
    assert from_shape == from_model | unknown
    assert from_shape["kv_bytes_per_token"] == 131_072
    assert from_shape["block_tokens"] == 16


def test_bits_overrule_the_model(run: Run, tmp_path: Path) -> None:
    assert run("kv-size", "llama-3.1-8b", "--bits", 8, "--json").json["kv_bytes_total"] == 65_536
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**MLA, "dtype": "of another world"}))
    assert "dtype" in run("kv-size", config).refusal
    assert run("kv-size", config, "--bits", 8, "--json").json["bits"] == 8


def test_the_table(run: Run) -> None:
    ran = run("kv-size", "llama-3.1-8b", "--tokens", 8192, "--batch", 16)
    assert ran.code == 0
    assert "32 heads share them" in ran.stdout
    for text in ("131,072 bytes", "1.0 GiB", "16.0 GiB", "16 tokens, 2.0 MiB"):
        assert text in ran.stdout


def test_layers_with_a_window_keep_no_more_than_that(run: Run) -> None:
    found = run("kv-size", "gemma-2-9b", "--tokens", 8192, "--json").json
    assert (found["window_tokens"], found["num_window_layers"]) == (4096, 21)
    per_layer = found["kv_bytes_per_token"] // 42
    assert found["kv_bytes_per_sequence"] == per_layer * 21 * (8192 + 4096)
    assert "21 layers with a window of 4,096" in " ".join(
        run("kv-size", "gemma-2-9b").stdout.split()
    )


def test_states_count_once_per_sequence(run: Run) -> None:
    found = run("kv-size", "qwen3-next-80b-a3b", "--tokens", 1000, "--batch", 2, "--json").json
    states, full = found["groups"]
    assert (states["kind"], states["num_layers"], states["bytes_per_token"]) == ("state", 36, 0)
    assert states["state_bytes"] == states["checkpoint_bytes"] == 36 * (49_152 + 1_048_576)
    assert states["bytes_per_sequence"] == found["checkpoint_bytes"] == 39_518_208
    assert (full["kind"], full["layers"]) == ("full", list(range(3, 48, 4)))
    assert full["bytes_per_token"] == found["growing_bytes_per_token"] == 24_576
    assert found["kv_bytes_per_sequence"] == 24_576_000 + 39_518_208
    assert found["kv_bytes_total"] == 2 * found["kv_bytes_per_sequence"]
    drawn = " ".join(run("kv-size", "qwen3-next-80b-a3b").stdout.split())
    assert "gated delta net state in 36 layers: 37.7 MiB, however long the sequence" in drawn
    assert "checkpoint of windows and states 37.7 MiB (39,518,208 bytes)" in drawn


def test_windows_and_what_is_offloaded(run: Run) -> None:
    found = run("kv-size", "gemma-3-27b", "--tokens", 8192, "--json").json
    window, full = found["groups"]
    assert (window["span_tokens"], window["num_layers"], full["num_layers"]) == (1024, 52, 10)
    assert window["checkpoint_bytes"] == found["checkpoint_bytes"] == 436_207_616
    assert found["offloaded_bytes_per_sequence"] == 8192 * 81_920 + 436_207_616


def test_the_embedded_engine_keeps_all_tokens_in_every_layer(run: Run) -> None:
    found = run("kv-size", "gemma-3-27b", "--tokens", 32768, "--json").json
    assert found["embedded_bytes_per_token"] == found["kv_bytes_per_token"] == 507_904
    assert found["embedded_bytes_per_sequence"] == 32768 * 507_904
    drawn = " ".join(run("kv-size", "gemma-3-27b", "--tokens", 32768).stdout.split())
    assert "sequence in penstock serve 15.5 GiB (16,642,998,272 bytes): every layer keeps" in drawn
    found = run("kv-size", "deepseek-v3", "--json").json
    assert found["embedded_bytes_per_token"] == 61 * 2 * 128 * 192 * 2
    assert "keys and values of every head" in " ".join(run("kv-size", "deepseek-v3").stdout.split())
    plain = run("kv-size", "llama-3.1-8b", "--json").json
    assert plain["embedded_bytes_per_token"] == plain["kv_bytes_per_token"]
    assert "penstock serve" not in run("kv-size", "llama-3.1-8b").stdout  # it is the same
    refused = run("kv-size", "qwen3-next-80b-a3b", "--json").json
    assert refused["embedded_bytes_per_token"] is refused["embedded_bytes_per_sequence"] is None
    drawn = " ".join(run("kv-size", "qwen3-next-80b-a3b").stdout.split())
    assert "sequence in penstock serve not supported" in drawn


def test_a_compressed_cache_says_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MLA))
    assert run("kv-size", tmp_path, "--json").json["kv_bytes_per_token"] == 27 * 576 * 2
    assert "MLA" in run("kv-size", tmp_path).stdout


def test_packed_sizes(run: Run) -> None:
    found = run("kv-size", "llama-3.1-8b", "--codec", "lossless", "--json").json
    packed = found["packed"]
    assert (packed["codec"], packed["is_lossy"]) == ("lossless", False)
    assert 0.76 < packed["ratio"] < 0.78
    assert packed["block_bytes"] == packed["ratio"] * found["block_bytes"]
    assert packed["slot_bytes"] % 4096 == 0
    assert packed["raw_blocks_per_gib"] == 512
    assert packed["blocks_per_gib"] == 2**30 // packed["slot_bytes"] >= 1.28 * 512
    assert packed["tokens_per_gib"] == 16 * packed["blocks_per_gib"]
    drawn = " ".join(run("kv-size", "llama-3.1-8b", "--codec", "auto").stdout.split())
    assert "lossless: KV is bfloat16, which is packed without loss, bit for bit." in drawn
    assert "a GiB holds, packed 10,672 tokens, 667 blocks" in drawn
    assert "a GiB holds, raw 8,192 tokens, 512 blocks" in drawn


def test_what_is_not_bfloat16_stays_raw(run: Run) -> None:
    found = run("kv-size", "llama-3.1-8b", "--bits", "8", "--codec", "auto", "--json").json
    assert found["packed"]["codec"] == "raw"
    assert found["packed"]["blocks_per_gib"] == found["packed"]["raw_blocks_per_gib"]
    assert "this KV is float16" in " ".join(
        run("kv-size", "llama-2-7b", "--codec", "auto").stdout.split()
    )
    assert "packed" not in run("kv-size", "llama-3.1-8b", "--json").json  # only if asked


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
def test_lossy_sizes_say_so(run: Run, codec: str) -> None:
    packed = run("kv-size", "llama-3.1-8b", "--codec", codec, "--json").json["packed"]
    assert packed["is_lossy"]
    assert packed["ratio"] < 0.55
    assert "It is lossy" in run("kv-size", "llama-3.1-8b", "--codec", codec).stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["llama-3.1-8b", "--codec", "zip"], "--codec is 'zip': expected one of auto, raw"),
        (["llama-2-7b", "--codec", "lossless"], "packs bfloat16 only, and this KV is float16"),
        (["llama-3.1-8b", "--bits", "8", "--codec", "fp8"], "and this KV is float8_e4m3fn"),
        (["deepseek-v3", "--codec", "int8"], "one latent per token (MLA)"),
        (["qwen3-next-80b-a3b", "--codec", "lossless"], "a gated delta net state"),
    ],
)
def test_codecs_that_do_not_apply(run: Run, argv: list[str], words: str) -> None:
    assert words in run("kv-size", *argv).refusal


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no model is given"),
        (["llama-3.1-8b", "--layers", "32"], "both llama-3.1-8b and --layers"),
        (["--layers", "32", "--head-dim", "128"], "--kv-heads is missing"),
        (["--bits", "8"], "no model is given"),
        ([*SHAPE, "--bits", "7"], "bits is 7"),
        (["llama-3.1-8", "--tokens", "1"], "did you mean llama-3.1-8b?"),
        (["llama-3.1-8b", "--tokens", "0"], "--tokens is 0"),
        (["llama-3.1-8b", "--batch", "9" * 400], "--batch is 999"),
        (["/", "--tokens", "5"], "config.json"),
    ],
)
def test_refusals(run: Run, argv: list[str], words: str) -> None:
    assert words in run("kv-size", *argv).refusal
