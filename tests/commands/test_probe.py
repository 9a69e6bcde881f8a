from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.plan import disk_link, links
from penstock.plan.links import Link, Tick

Run = Callable[..., Any]
MIB = 1 << 20


class Told:
    """In place of the probes: links that were told, not measured."""

    def measure(self, tick: Tick) -> Iterator[Link]:
        tick("told", 1.0)
        yield Link("fast", 2, 10e9, 2 * MIB / 10e9, loads=True)
        yield Link("slow", 1, 1e6, 2.5, loads=True, note="a note")
        yield Link("sums", 1, 5e9, 1e-3)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_links = links.measure_links
    monkeypatch.setattr(links, "measure_links", lambda _probes, tick: measure_links([Told()], tick))


def test_a_real_probe_measures_every_link_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    small = ["--dir", tmp_path, "--size", "8MiB", "--seconds", "0.02", "--threads", "2"]
    found = run("probe", *small, "--prefill-tokens-per-second", "1500", "--json").json
    names = [link["name"] for link in found["links"]]
    assert names == [
        "memory copy, 1 thread",
        "memory copy, 2 threads",
        "checksum, 1 thread",
        "disk read, 4 threads",
        "disk write, 4 threads",
    ]
    for link in found["links"]:
        assert link["gb_per_second"] == link["bytes_per_second"] / 1e9 > 0
        assert link["block_seconds"] > 0
        assert link["latency_seconds"] >= 0
    assert found["kv_bytes_per_token"] == 23_040
    assert found["prefill"]["source"] == "given"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("told")
def test_break_even_lengths(run: Run) -> None:
    rate = ["--prefill-tokens-per-second", "100"]
    fast, slow, sums = run("probe", *rate, "--json").json["links"]
    assert fast["break_even_tokens"] == 1
    assert slow["break_even_tokens"] is None  # 23 KB a token at 1 MB/s against 10 ms a token
    assert sums["break_even_tokens"] is None
    table = run("probe", *rate).stdout
    for words in ("always", "never", "–", "22.5 KiB of KV per token", "100 tokens/s, given"):
        assert words in table
    assert table.count("Note: a note.") == 1


@pytest.mark.usefixtures("told")
def test_prefill_is_estimated_where_numpy_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "measure_matrix_product", lambda _seconds: 50e9)
    found = run("probe", "--json").json["prefill"]
    assert found["source"] == "estimated from 50 GFLOP/s matrix product"
    assert found["tokens_per_second"] == pytest.approx(50e9 / (2 * 134_515_008))
    assert found["quadratic_seconds_per_token2"] > 0


@pytest.mark.usefixtures("told")
def test_without_numpy_it_says_which_option_to_give(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "measure_matrix_product", lambda _seconds: None)
    ran = run("probe")
    assert ran.code == 0
    assert "give --prefill-tokens-per-second" in " ".join(ran.stdout.split())
    assert run("probe", "--json").json["prefill"]["tokens_per_second"] is None


@pytest.mark.usefixtures("told")
def test_a_model_that_does_not_tell_its_size(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "measure_matrix_product", lambda _seconds: 50e9)
    config = tmp_path / "config.json"
    config.write_text('{"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}')
    assert "does not tell its size" in run("probe", "--model", config).stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--size", "0"], "--size is 0 B"),
        (["--size", "lots"], "--size: 'lots' is not a size"),
        (["--size", "7EiB"], "memory at hand"),
        (["--dir", "{file}"], "is not a folder"),
        (["--dir", "{folder}/none"], "does not exist"),
        (["--prefill-tokens-per-second", "0"], "--prefill-tokens-per-second is 0.0"),
        (["--prefill-tokens-per-second", "nan"], "expected a number above 0"),
        (["--model", "llama-3.1-9b"], "did you mean llama-3.1-8b?"),
    ],
)
def test_refusals_come_before_any_measurement(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], words: str
) -> None:
    monkeypatch.delattr(links, "walk")
    monkeypatch.delattr(disk_link, "walk")
    file = tmp_path / "file"
    file.write_text("mine")
    argv = [argument.format(file=file, folder=tmp_path) for argument in argv]
    assert words in run("probe", *argv).refusal
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
