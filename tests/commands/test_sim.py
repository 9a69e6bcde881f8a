from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from penstock.sim.formats import write_trace
from penstock.sim.trace import Trace, TraceRequest, TraceSegment
from penstock.types import BlockKey

Run = Callable[..., Any]
CHAT = ["--generate", "chat", "--requests", "60"]
TIMED = [*CHAT, "--device-gib", "4", "--host-gib", "8", "--jobs", "1"]


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """Mooncake's format: two conversations in turn, each longer every time."""
    path = tmp_path / "small.jsonl"
    lines = [
        {
            "timestamp": 1000 * turn + 100 * who,
            "input_length": 512 * (turn + 1),
            "output_length": 4,
            "hash_ids": [100 * who + block for block in range(turn + 1)],
        }
        for turn in range(6)
        for who in range(2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_hit_rates_in_blocks_without_time(run: Run, mooncake: Path) -> None:
    ran = run("sim", mooncake, "--host-blocks", "2,100", "--policy", "lru,s3fifo", "--json")
    found = ran.json
    assert found["is_timed"] is False
    assert found["unit"] == "blocks"
    assert found["traces"][0] == {
        "name": "small",
        "block_tokens": 512,
        "num_requests": 12,
        "num_blocks": 42,
        "num_input_tokens": 42 * 512,
        "num_output_tokens": 48,
        "seconds": pytest.approx(5.1),
    }
    points = {(p["policy"], p["num_host_blocks"]): p for p in found["points"]}
    assert set(points) == {("lru", 2), ("lru", 100), ("s3fifo", 2), ("s3fifo", 100)}
    plenty = points["lru", 100]
    assert plenty["hit_rate"] == plenty["unbounded_hit_rate"] == pytest.approx(30 / 42)
    assert points["lru", 2]["hit_rate"] <= points["lru", 2]["optimum_hit_rate"]
    assert "first_token_seconds" not in plenty


def test_everything_that_is_promised_is_told(run: Run) -> None:
    found = run("sim", *TIMED, "--disk-gib", "64", "--json").json
    (point,) = found["points"]
    assert set(point["hit_rate_by_tier"]) == {"device", "host", "disk"}
    assert sum(point["hit_rate_by_tier"].values()) == pytest.approx(point["hit_rate"])
    times = point["first_token_seconds"]
    assert 0 < times["p50"] <= times["p90"] <= times["p99"]
    assert point["rejections"] == {}
    assert point["input_tokens_per_second"] > point["output_tokens_per_second"] > 0
    assert set(point["links"]) == {"host_load", "host_save", "disk_load", "disk_save"}
    assert point["links"]["host_save"]["num_bytes"] > 0
    assert point["flash_bytes_per_day"] > 0
    assert point["hit_rate"] <= point["optimum_hit_rate"]
    assert found["rates"]["prefill_tokens_per_second"] > 1000


def test_tables_for_people(run: Run, mooncake: Path) -> None:
    ran = run("sim", *TIMED, "--policy", "lru,s3fifo")
    assert ran.code == 0
    for text in ("Hit rate", "Times", "TTFT P50", "Bytes moved", "optimum", "unbounded", "s3fifo"):
        assert text in ran.stdout
    assert "Same in every row: device 4 GiB, host 8 GiB." in ran.stdout
    plain = run("sim", mooncake, "--host-blocks", 10)
    assert "Times" not in plain.stdout


def test_a_sweep_is_drawn_on_one_page(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "sim.html"
    found = run("sim", *TIMED, "--sweep", "--policy", "lru,s3fifo", "--plot", page, "--json").json
    assert len(found["points"]) == 10
    html = page.read_text()
    assert html.count("<figure>") == 2
    assert "prefers-color-scheme: dark" in html
    assert "<script" not in html
    assert "src=" not in html
    assert "http" not in html
    for text in ("lru, P50", "s3fifo, P99", "offline optimum", "host, GiB"):
        assert text in html


def test_several_traces_and_a_given_rate(run: Run, mooncake: Path) -> None:
    options = ["--device-gib", 4, "--jobs", 1, "--json"]
    slow = run("sim", mooncake, mooncake, "--prefill-tokens-per-second", 1000, *options).json
    assert [point["trace"] for point in slow["points"]] == [0, 1]
    assert slow["rates"]["prefill_tokens_per_second"] == 1000
    fast = run("sim", mooncake, *options).json
    p50 = [told["points"][0]["first_token_seconds"]["p50"] for told in (slow, fast)]
    assert p50[0] > 4 * p50[1]


def test_a_device_pool_too_small_rejects(run: Run, mooncake: Path) -> None:
    (point,) = run("sim", mooncake, "--device-blocks", 4, "--json").json["points"]
    assert point["rejections"]["too_long"] > 0


def test_windows_and_states_are_replayed_with_their_checkpoints(run: Run) -> None:
    argv = ["sim", *CHAT, "--host-blocks", "500,50000", "--policy", "lru"]
    full = run(*argv, "--json").json
    found = run(*argv, "--window", 1024, "--state-groups", 1, "--json").json
    assert (found["window"], found["window_groups"], found["state_groups"]) == (1024, 5, 1)
    small, large = found["points"]
    assert 0 < small["hit_rate"] < large["hit_rate"]
    assert large["hit_rate"] == pytest.approx(full["points"][1]["hit_rate"], abs=0.1)
    assert large["checkpoints"]["prompt_end"] > large["checkpoint_hits"].get("prompt_end", 0)
    assert large["checkpoint_hits"]["answer_end"] > 0
    assert 0 < large["checkpoint_share"] < 1
    assert large["bytes_per_token"] > full["kv_bytes_per_token"] / 7
    table = run(*argv, "--window", 1024, "--checkpoint-every", 2048)
    assert "bytes kept per token" in table.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([*TIMED, "--window", "1024"], "replayed without time"),
        ([*CHAT, "--host-gib", "8", "--checkpoint-every", "64"], "full attention alone"),
        ([*CHAT, "--host-gib", "0.0001", "--window", "1024"], "room for at least one block"),
        (["--host-gib", "8"], "no traffic is given"),
        (["t.jsonl", "--generate", "chat", "--host-gib", "8"], "both t.jsonl and --generate"),
        ([*CHAT], "no size is given"),
        ([*CHAT, "--host-gib", "8", "--host-blocks", "9"], "all sizes in GiB, or all in blocks"),
        ([*CHAT, "--host-gib", "eight"], "--host-gib is 'eight'"),
        ([*CHAT, "--host-gib", "8,-1"], "--host-gib is '8,-1'"),
        ([*CHAT, "--host-blocks", "1.5"], "--host-blocks is '1.5'"),
        ([*CHAT, "--host-gib", "nan"], "--host-gib is 'nan'"),
        ([*CHAT, "--host-gib", "0.000001"], "room for at least one block"),
        ([*CHAT, "--host-gib", "8", "--disk-gib", "9"], "no --device-gib"),
        ([*CHAT, "--device-gib", "8", "--disk-gib", "9"], "passes through DRAM"),
        ([*CHAT, "--host-gib", "8,9", "--sweep"], "--sweep widens one size"),
        ([*CHAT, "--host-gib", "8", "--policy", "lru,magic"], "no policy 'magic'"),
        ([*CHAT, "--host-gib", "8", "--model", "llama-9"], "model 'llama-9' is unknown"),
        ([*CHAT, "--device-gib", "8", "--gpu", "abacus"], "GPU 'abacus' is unknown"),
        ([*CHAT, "--device-gib", "8", "--speed", "0"], "--speed is 0"),
        ([*CHAT, "--device-gib", "8", "--prefill-tokens-per-second", "-5"], "tokens_per_second"),
        ([*CHAT, "--device-gib", "8", "--disk-load-gb-per-second", "0"], "--disk-load-gb"),
        (["--generate", "poems", "--host-gib", "8"], "no workload 'poems'"),
        (["no-such-file.jsonl", "--host-gib", "8"], "no-such-file.jsonl"),
        (
            [*CHAT, "--host-gib", "8", "--plot", "/no/such/folder/x.html"],
            "its folder does not exist",
        ),
    ],
)
def test_refusals(run: Run, argv: list[str], words: str) -> None:
    assert words in run("sim", *argv).refusal


def test_help_is_quick_and_light() -> None:
    code = (
        "import sys; from penstock.cli import main; main(['sim', '--help']); "
        "heavy = {'numpy', 'torch', 'penstock.sim.simulator'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "--host-blocks" in ran.stdout


def marked_trace(folder: Path) -> Path:
    """Three prompts with two documents of 2,048 tokens each, in changing order."""
    requests = []
    for number, documents in enumerate(("ab", "ba", "bc")):
        segments = tuple(
            TraceSegment(100 + 2048 * n, _names(name, 32), 64) for n, name in enumerate(documents)
        )
        own, plain = _names(f"own {number}", 66), _names(f"plain {documents}", 66)
        more = {"segments": segments, "plain_blocks": plain}
        requests.append(TraceRequest(60.0 * number, 4250, 4, own, **more))
    write_trace(Trace("marked", 64, tuple(requests)), folder / "marked.jsonl")
    return folder / "marked.jsonl"


def _names(what: str, num: int) -> tuple[BlockKey, ...]:
    return tuple(
        BlockKey(blake2b(f"{what} {n}".encode(), digest_size=32).digest()) for n in range(num)
    )


def test_a_trace_with_segments_is_told_beside_the_same_without(run: Run, tmp_path: Path) -> None:
    argv = [marked_trace(tmp_path), "--device-gib", "8", "--host-gib", "8", "--jobs", "1"]
    marked, plain = run("sim", *argv, "--json").json["points"]
    assert plain["num_reused_tokens"] == plain["num_mended_tokens"] == 0
    assert marked["num_reused_tokens"] == 6 * (2048 - 64)
    assert marked["num_mended_tokens"] == 6 * 64
    drawn = " ".join(run("sim", *argv).stdout.split())
    assert "without marks" in drawn


MISSING = """
import importlib.util, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('torch', 'numpy'):
            raise ModuleNotFoundError(name)
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "numpy" else find(name)
sys.meta_path.insert(0, Missing())
from penstock.cli import main
sys.exit(main(["sim", *sys.argv[1:]]))
"""


def test_numpy_is_needed_for_segments_alone(tmp_path: Path) -> None:
    def ran(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", MISSING, *argv, "--json"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    plain = ran(*TIMED)
    assert (plain.returncode, plain.stderr) == (0, "")
    assert json.loads(plain.stdout)["points"]
    marked = ran(str(marked_trace(tmp_path)), "--device-gib", "8", "--host-gib", "8")
    assert marked.returncode != 0
    assert "numpy is not installed, which a trace with segments needs" in marked.stderr


def test_the_codec_is_told(run: Run) -> None:
    found = run("sim", *CHAT, "--host-gib", "8", "--json").json
    raw = run("sim", *CHAT, "--host-gib", "8", "--host-codec", "raw", "--json").json
    assert (found["codecs"]["host"]["codec"], raw["codecs"]["host"]["codec"]) == ("lossless", "raw")
    blocks = [each["points"][0]["num_host_blocks"] for each in (raw, found)]
    assert blocks[1] >= 1.28 * blocks[0]
    tokens = found["points"][0]["num_host_tokens"]
    assert tokens == blocks[1] * found["traces"][0]["block_tokens"]
    drawn = " ".join(run("sim", *CHAT, "--host-gib", "8").stdout.split())
    assert f"Room: host {tokens:,} tokens ({blocks[1]:,} blocks)." in drawn
    assert "Codec of DRAM: lossless, 0.766 of the size. KV is bfloat16" in drawn
    drawn = " ".join(run("sim", *CHAT, "--host-gib", "8", "--model", "llama-2-7b").stdout.split())
    assert "Codec of DRAM: raw. KV is not packed: the lossless codec packs bfloat16 only" in drawn
    mixed = [*TIMED, "--disk-gib", "8", "--disk-codec", "int4"]
    drawn = " ".join(run("sim", *mixed).stdout.split())
    assert "Codec of the disk: int4" in drawn
    assert "It is lossy" in drawn
    refusal = run("sim", *CHAT, "--host-gib", "8", "--host-codec", "zip").refusal
    assert "--host-codec is 'zip': expected one of auto, raw, lossless" in refusal


def test_states_are_not_packed(run: Run) -> None:
    states = [*CHAT, "--host-gib", "8", "--state-groups", "1"]
    assert run("sim", *states, "--json").json["codec"] == "raw"
    windows = [*CHAT, "--host-gib", "8", "--window", "1024"]
    assert run("sim", *windows, "--json").json["codec"] == "lossless"
    assert "states are not packed" in run("sim", *states, "--host-codec", "lossless").refusal
