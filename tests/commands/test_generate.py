"""`penstock generate` with the embedded engine."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server.running import make_tiny

from tests.node.nodes import node

STORY = "A penstock carries water from the reservoir to the turbine. " * 8


@pytest.fixture
def generate(run: Callable[..., Any], cache: Path) -> Callable[..., Any]:
    model = make_tiny(cache)

    def run_generate(*arguments: object) -> Any:
        always = ("--model", model, "--max-tokens", 5, "--temperature", 0, "--block-tokens", 16)
        return run("generate", *arguments, *always, "--device-kv-gib", 0.02)

    return run_generate


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_text_on_stdout_and_figures_on_stderr(
    generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = generate("One two three", "--kv-offloading-size", 0)
    assert ran.code == 0
    assert ran.stdout.endswith("\n")
    assert "5 tokens in " in ran.stderr
    assert "0 of 3 prompt tokens from the cache" in ran.stderr
    feed(monkeypatch, b"One two three")
    facts = generate("-", "--kv-offloading-size", 0, "--json").json
    assert facts["text"] == ran.stdout.removesuffix("\n")
    assert (facts["prompt_tokens"], facts["completion_tokens"]) == (3, 5)
    assert facts["finish_reason"] == "length"
    assert 0 < facts["first_token_seconds"] <= facts["seconds"]


def test_the_next_run_finds_the_prompt_on_disk(
    generate: Callable[..., Any], tmp_path: Path
) -> None:
    tiers = ("--kv-offloading-size", 0.01, "--disk-path", tmp_path / "kv", "--disk-size", 0.02)
    first, second = (generate(STORY, *tiers, "--json").json for _ in range(2))
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] >= 80
    assert second["text"] == first["text"]


def test_the_next_run_finds_the_prompt_on_the_node(
    generate: Callable[..., Any], tmp_path: Path
) -> None:
    with node(tmp_path) as (path, _):
        tiers = ("--node", f"unix://{path}")
        first, second = (generate(STORY, *tiers, "--json").json for _ in range(2))
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] >= 80
    assert second["text"] == first["text"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([""], "the prompt is empty"),
        (
            ["x", "--node", "unix:///n", "--disk-path", "kv"],
            "--disk-path is given together with --node",
        ),
        (["bad \udcff"], "not valid text: expected UTF-8"),
        (["x", "--stop", ""], "stop"),
        (["x", "--seed", str(2**70)], "seed"),
        (["x", "--max-tokens", "0"], "--max-tokens"),
        (["x", "--set", "host.sze=1"], "did you mean host.size?"),
        ([], "PROMPT"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    run: Callable[..., Any], arguments: list[str], words: str
) -> None:
    assert words in run("generate", *arguments).refusal


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_input_that_is_no_prompt(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    feed(monkeypatch, content)
    assert "the prompt is" in run("generate", "-").refusal
