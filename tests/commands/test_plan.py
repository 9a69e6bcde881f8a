from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from penstock.cli import app
from penstock.config.options import EngineOptions, tiers_config
from penstock.connectors.vllm.settings import VllmSettings

Run = Callable[..., Any]
GOOD = ["llama-3.1-8b", "--context", "8192", "--sessions", "64", "--gpu", "h200"]
STORY = [
    *("llama-3.1-70b", "--context", 28_000, "--sessions", 120, "--shared-prefix-tokens", 3800),
    *("--gpu", "a100-80gb", "--gpus", 8, "--host-gib", 1024),
]
LONG = [
    *("llama-3.1-8b", "--context", 131_072, "--sessions", 6, "--gpu", "l40s"),
    *("--host-gib", 200, "--disk-gib", 1000),
]


def options_of(command: str, *names: str) -> dict[str, Any]:
    """What the command's own parser makes of a line that is to be pasted."""
    words = shlex.split(command)
    assert words[: len(names) + 1] == ["penstock", *names]
    parser: Any = typer.main.get_command(app)
    for name in names:
        parser = parser.commands[name]
    context = parser.make_context(names[-1], words[len(names) + 1 :])
    return dict(context.params)


def check_serve(command: str) -> EngineOptions:
    given = options_of(command, "serve")
    named = {name: given[name] for name in EngineOptions.__dataclass_fields__ if name in given}
    options = EngineOptions(**named)
    config = tiers_config(options)
    assert (config is None) == (options.kv_offloading_size == 0)
    return options


def check_vllm(run: Run, settings: dict[str, Any]) -> VllmSettings:
    command, _, config = settings["vllm"].partition(' --kv-transfer-config "$(')
    assert shlex.split(command)[:2] == ["vllm", "serve"]
    words = shlex.split(config.removesuffix(')"'))
    assert words[:2] == ["penstock", "vllm-config"]
    printed = run(*words[1:], "--no-check").json
    assert printed == settings["kv_transfer_config"]
    return VllmSettings.read(printed["kv_connector_extra_config"])


def test_the_story_of_eight_a100(run: Run) -> None:
    found = run("plan", *STORY, "--json").json
    assert found["verdict"]["kind"] == "tier-never-cold"
    assert (found["demand"]["num_active"], found["demand"]["is_active_assumed"]) == (30, True)
    assert found["kv"]["bytes_per_token"] == 327_680
    assert 512 << 30 < found["fit"]["recommended_host_bytes"] < 2048 << 30
    assert found["fit"]["sessions_on_device"] < 120 <= found["fit"]["sessions_with_host"]
    assert found["settings"]["serve"] is None
    assert "one GPU" in found["settings"]["serve_note"]
    assert "--tensor-parallel-size 8" in found["settings"]["vllm"]
    assert check_vllm(run, found["settings"]).kv_offloading_size == 748


def test_the_headline_is_what_can_run_and_gives_the_most(run: Run) -> None:
    """A model over four GPUs with more sessions than fit: not what one GPU alone could do."""
    asked = ["llama-3.1-70b", "--context", 32_768, "--sessions", 64, "--active", 64]
    found = run("plan", *asked, "--gpu", "h100", "--gpus", 4, "--json").json
    best, other = found["ways"]
    assert (best["mode"], best["is_best"], best["hosts"]) == ("turns", True, ["vllm"])
    assert (other["mode"], other["is_best"], other["can_run"]) == ("cold", False, False)
    assert best["tokens_per_second"] > other["tokens_per_second"]
    assert "200.0 ms per token (assumed" in found["ranking"]
    stdout = run("plan", *asked, "--gpu", "h100", "--gpus", 4).stdout
    assert "take turns" in stdout.partition("Verdict: ")[2].partition("\n")[0]
    assert "Ranked by tokens/s" in stdout


def test_scripts_find_the_keys_they_know(run: Run) -> None:
    found = run("plan", *GOOD, "--json").json
    known = {"model", "gpu", "num_gpus", "demand", "kv", "fit", "tiers", "prefill", "decode"}
    assert known | {"trace", "verdict", "settings", "assumptions"} <= set(found)
    assert {"sessions_on_device", "recommended_host_bytes", "pool_bytes"} <= set(found["fit"])
    assert {"step_seconds", "tokens_per_second", "whole_tokens_per_second"} <= set(found["decode"])


def test_a_quarter_decodes_unless_it_is_said(run: Run) -> None:
    assumed = run("plan", *GOOD, "--sessions", 41).stdout
    assert "41 open, 11 decoding at once (assumed: a quarter" in assumed
    assert "assumed: a quarter" not in run("plan", *GOOD, "--active", 11).stdout


def test_a_context_beyond_the_model_has_no_settings(run: Run) -> None:
    found = run("plan", "qwen2.5-7b", *GOOD[1:], "--context", 40_000, "--json").json
    assert found["verdict"]["kind"] == "context-too-long"
    assert found["kv"]["max_context_tokens"] == 32_768
    assert found["settings"]["serve"] is found["settings"]["vllm"] is None


def test_of_what_does_not_fit_nothing_is_sold(run: Run) -> None:
    asked = ["llama-3.1-405b", *GOOD[1:], "--gpus", 2]
    stdout = run("plan", *asked).stdout
    assert "It does not fit on these GPUs" in stdout
    assert "DRAM to buy" not in stdout
    assert "penstock serve" not in stdout
    found = run("plan", *asked, "--json").json
    assert found["fit"]["sessions_with_host"] == 0
    assert found["ways"] == []


def test_two_copies_over_eight_gpus_are_two(run: Run) -> None:
    asked = ["qwen3-235b-a22b", "--context", 16_384, "--sessions", 16, "--gpu", "h200"]
    asked += ["--gpus", 8, "--tensor-parallel-size", 8]
    assert run("plan", *asked, "--json").json["kv"]["num_copies"] == 2
    assert "2 copies over 8" in " ".join(run("plan", *asked).stdout.split())
    two = run("plan", *GOOD, "--gpus", 8, "--tensor-parallel-size", 4, "--json").json
    assert two["layout"] == {"num_servers": 2, "gpus_each": 4, "num_gpus_used": 8}
    assert "--data-parallel-size 2" in two["settings"]["vllm"]


def test_settings_of_a_session_larger_than_the_gpu_are_accepted(run: Run) -> None:
    settings = run("plan", *LONG, "--device-kv-gib", 12, "--json").json["settings"]
    options = check_serve(settings["serve"])
    assert options.cold_kv
    assert options.kv_offloading_size == 81
    assert options.disk_path == "/var/cache/penstock"
    assert options.resident_tail_tokens == 512
    assert settings["vllm"] is None
    chosen = check_vllm(run, run("plan", *LONG, "--json").json["settings"])
    assert (chosen.kv_offloading_size, chosen.disk_size) == (81, 1000)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (["--sessions", "500"], "tier-in-turns"),
        (["--sessions", "500", "--active", "20"], "tier-never-cold"),
        (["--sessions", "500", "--active", "100", "--max-token-ms", "20"], "tier-in-turns"),
        (["--reuse", "0.5"], "tier-for-reuse"),
        (["--reuse", "0.01"], "do-not-offload"),
        (["--context", "100"], "do-not-offload"),
        ([], "device-is-enough"),
        (["--gpus", "8", "--sessions", "4000"], "tier-in-turns"),
        (["--device-kv-gib", "10", "--disk-gib", "0.5"], "tier-in-turns"),
        (["--device-kv-gib", "0.5", "--sessions", "2"], "tier-with-tail-pin"),
        (["--gpu-memory-utilization", "0.8"], "device-is-enough"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_every_verdicts_settings_are_accepted(run: Run, options: list[str], kind: str) -> None:
    found = run("plan", *GOOD, *options, "--json").json
    assert found["verdict"]["kind"] == kind
    check_serve(found["settings"]["serve"])
    if kind == "tier-with-tail-pin":
        assert found["settings"]["vllm"] is None
    elif kind.startswith("tier"):
        check_vllm(run, found["settings"])
    else:
        assert "kv-transfer-config" not in found["settings"]["vllm"]


def test_fp8_halves(run: Run) -> None:
    plain = run("plan", *GOOD, "--json").json
    halved = run("plan", *GOOD, "--kv-cache-dtype", "fp8", "--json").json
    assert halved["kv"]["bytes_per_session"] * 2 == plain["kv"]["bytes_per_session"]
    for engine in ("serve", "vllm"):
        assert "--kv-cache-dtype fp8" in halved["settings"][engine]


def test_the_tables(run: Run) -> None:
    ran = run("plan", *STORY)
    assert (ran.code, ran.stderr) == (0, "")
    for words in (
        "8 x NVIDIA A100 SXM, 80 GB",
        "327,680 bytes",
        "748.0 GiB for KV",
        "Verdict: Offload whole sessions",
        "Ranked by tokens/s",
        "How these numbers were calculated",
        '--kv-transfer-config "$(penstock vllm-config --kv-offloading-size 748)"',
    ):
        assert words in ran.stdout


def test_the_catalogue(run: Run) -> None:
    ran = run("plan", "--list")
    assert "llama-3.1-8b" in ran.stdout
    assert "a100-80gb" in ran.stdout
    found = run("plan", "--list", "--json").json
    assert all(row["source"] for row in (*found["models"], *found["gpus"]))


def test_a_model_by_its_config(run: Run, tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = [tmp_path / "config.json", *GOOD[1:]]
    assert "give --weights-gib" in run("plan", *argv).refusal
    found = run("plan", *argv, "--weights-gib", 15, "--json").json
    assert found["kv"]["bytes_per_token"] == 131_072
    assert found["prefill"]["tokens_per_second"] is None
    assert found["tiers"]["host"]["break_even_tokens"] is None
    assert options_of(found["settings"]["serve"], "serve")["model"] == str(tmp_path)
    assert "not known" in run("plan", *argv, "--weights-gib", 15).stdout
    given = ["--weights-gib", 15, "--prefill-tokens-per-second", 20_000]
    assert run("plan", *argv, *given, "--json").json["tiers"]["host"]["break_even_tokens"] > 1


def test_a_probe_is_read(run: Run, tmp_path: Path) -> None:
    probed = run(
        *("probe", "--model", "llama-3.1-8b", "--size", "4MiB", "--seconds", 0.02, "--json"),
        *("--dir", tmp_path, "--threads", 1, "--prefill-tokens-per-second", 1234),
    )
    file = tmp_path / "probe.json"
    file.write_text(probed.stdout)
    found = run("plan", *GOOD, "--probe", file, "--json").json
    disk = next(link for link in probed.json["links"] if link["name"].startswith("disk read"))
    ratio = found["codecs"]["disk"]["ratio"]  # what crosses it is packed
    rate = found["tiers"]["disk"]["bytes_per_second"]
    assert rate == pytest.approx(disk["bytes_per_second"] / ratio)
    assert found["tiers"]["disk"]["source"].startswith("measured by penstock probe")
    assert found["prefill"]["tokens_per_second"] == 1234
    file.write_text("[")
    assert "is not JSON" in run("plan", *GOOD, "--probe", file).refusal
    assert "cannot be read" in run("plan", *GOOD, "--probe", tmp_path / "none").refusal


def test_a_trace_says_what_is_read_again(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * turn,
            "input_length": 1024,
            "output_length": 10,
            "hash_ids": [a, a + 1],
        }
        for turn, a in enumerate([0, 10, 0, 10, 20])
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["llama-3.1-8b", "--sessions", 10, "--gpu", "h200", "--trace", file]
    found = run("plan", *argv, "--json").json
    assert found["demand"]["context_tokens"] == 1034
    assert found["demand"]["reuse_share"] == pytest.approx(4 / 10)
    assert found["trace"]["num_live_blocks"] == 4
    assert found["verdict"]["kind"] == "device-is-enough"
    assert "40.0% of prompt tokens" in run("plan", *argv).stdout
    assert "both --reuse and --trace" in run("plan", *argv, "--reuse", 0.5).refusal
    file.write_text("")
    assert str(file) in run("plan", *argv).refusal


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "MODEL is missing"),
        (["llama-3.1-8b", "--context", "1", "--sessions", "1"], "--gpu is missing"),
        (["llama-3.1-8b", "--gpu", "h200", "--context", "1"], "--sessions is missing"),
        (["llama-3.1-8b", "--gpu", "h200", "--sessions", "1"], "--context is missing"),
        (["llama-3.1-8", *GOOD[1:]], "did you mean llama-3.1-8b?"),
        ([*GOOD, "--gpu", "h20"], "did you mean h200?"),
        ([*GOOD, "--gpu", "abacus"], "expected one of h200"),
        ([*GOOD, "--sessions", "0"], "--sessions is 0"),
        ([*GOOD, "--context", "-5"], "--context is -5"),
        ([*GOOD, "--gpus", "0"], "--gpus is 0"),
        ([*GOOD, "--gpus", "1025"], "--gpus is 1025"),
        ([*GOOD, "--gpus", "3", "--tensor-parallel-size", "3"], "cannot be split over 3 GPUs"),
        ([*GOOD, "--gpus", "2", "--tensor-parallel-size", "4"], "--tensor-parallel-size is 4"),
        ([*GOOD, "--host-gib", "-1"], "--host-gib is -1"),
        ([*GOOD, "--host-gib", "0"], "--host-gib is 0"),
        ([*GOOD, "--disk-gib", "nan"], "--disk-gib is nan"),
        ([*GOOD, "--disk-gib", "1e99"], "--disk-gib is 1e+99"),
        ([*GOOD, "--weights-gib", "0"], "--weights-gib is 0"),
        ([*GOOD, "--reuse", "1.5"], "--reuse is 1.5"),
        ([*GOOD, "--active", "65"], "expected at most 64 (--sessions)"),
        ([*GOOD, "--shared-prefix-tokens", "8192"], "--shared-prefix-tokens is 8192"),
        ([*GOOD, "--max-token-ms", "0"], "--max-token-ms is 0"),
        ([*GOOD, "--gpu-memory-utilization", "2"], "--gpu-memory-utilization is 2"),
        ([*GOOD, "--prefill-tokens-per-second", "inf"], "--prefill-tokens-per-second is inf"),
        ([*GOOD, "--kv-cache-dtype", "fp4"], "--kv-cache-dtype"),
        ([*GOOD, "--trace", "/none"], "/none"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_refusals(run: Run, argv: list[str], words: str) -> None:
    assert words in run("plan", *argv).refusal


def test_help_has_an_example(run: Run) -> None:
    stdout = run("plan", "--help").stdout
    assert "Example: penstock plan" in stdout
    assert "--json" in stdout


def test_codecs(run: Run) -> None:
    asked = [*GOOD, "--sessions", "500", "--active", "20", "--host-gib", 100, "--disk-gib", 50]
    found = run("plan", *asked, "--json").json
    assert found["codecs"]["host"]["codec"] == found["codecs"]["disk"]["codec"] == "lossless"
    assert found["fit"]["host_tokens"] == 16 * found["fit"]["host_blocks"] > 1.28 * 819_200
    drawn = " ".join(run("plan", *asked).stdout.split())
    assert "codec of DRAM and disk lossless: KV is bfloat16" in drawn
    assert (
        f"{found['fit']['host_tokens']:,} tokens, {found['fit']['host_blocks']:,} blocks" in drawn
    )
    drawn = " ".join(run("plan", *asked, "--kv-cache-dtype", "fp8").stdout.split())
    assert "raw: KV is not packed: the lossless codec packs bfloat16 only" in drawn
    found = run("plan", *asked, "--disk-codec", "int8", "--json").json
    assert found["codecs"]["disk"]["is_lossy"]
    assert check_vllm(run, found["settings"]).set == {"disk.codec": "int8"}
    assert options_of(found["settings"]["serve"], "serve")["set"] == ["disk.codec=int8"]
    assert "--host-codec is 'x'" in run("plan", *asked, "--host-codec", "x").refusal
    refusal = run("plan", *asked, "--kv-cache-dtype", "fp8", "--host-codec", "int4").refusal
    assert "--host-codec is int4, but int4 packs" in refusal


def test_what_the_embedded_engine_keeps_has_a_row(run: Run) -> None:
    argv = ["--context", 32768, "--sessions", 8, "--gpu", "h200", "--host-gib", 64]
    kv = run("plan", "gemma-3-27b", *argv, "--json").json["kv"]
    assert kv["embedded_bytes_per_token"] == kv["bytes_per_token"] > kv["growing_bytes_per_token"]
    drawn = " ".join(run("plan", "gemma-3-27b", *argv).stdout.split())
    assert "session in penstock serve 15.5 GiB: every layer keeps all tokens" in drawn
    assert "session in penstock serve" not in run("plan", "llama-3.1-8b", *argv).stdout
