"""benchmarks.anywhere_quality on the tiny model: what it compares, and that it can tell."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from benchmarks.anywhere_prompts import PASSAGES, Prompt, passage_prompts, question_prompts
from benchmarks.anywhere_quality import FULL, PREFIX, is_right, measure, parse_ways, show, table
from penstock.engine.models import LoadedModel


def options(**more: Any) -> argparse.Namespace:
    ways = parse_ways("none,link:8,link:64")
    chosen = {"questions": 2, "passages": 1, "max_documents": 4, "ways": ways, "device": "cpu"}
    return argparse.Namespace(**{**chosen, "part": None, "json": False, **more})


def test_ways_are_compared_with_the_full_computation(
    loaded: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    about, results = measure(options(), loaded)
    assert [each.way for each in results] == [FULL, PREFIX, "none", "link 8", "link 64"]
    full, prefix, none, link, long_link = results
    assert full.first_kl == [0.0] * 3
    assert full.mean_kl == [0.0]
    assert prefix.first_kl == pytest.approx([0.0] * 3, abs=1e-6)
    assert prefix.answers == full.answers
    assert max(none.first_kl) > 1e-3
    assert none.mean_kl[0] > 1e-3
    assert sum(full.reused_tokens) == sum(prefix.reused_tokens) == 0
    assert all(none.reused_tokens)
    assert sum(none.mended_tokens) == 0
    # Every segment has complete blocks enough for both.
    assert sum(link.reused_tokens) + sum(link.mended_tokens) == sum(none.reused_tokens)
    assert sum(long_link.reused_tokens) < sum(link.reused_tokens)

    assert table(results).count("\n") == 1 + len(results)
    show(options(json=True), about, results)
    shown = json.loads(capsys.readouterr().out)
    assert [each["way"] for each in shown["results"]] == [each.way for each in results]


def test_jobs_share_the_prompts(loaded: LoadedModel) -> None:
    few: dict[str, Any] = {"questions": 1, "ways": parse_ways("none")}
    whole = measure(options(**few), loaded)[1]
    parts = [measure(options(**few, part=f"{n}/2"), loaded)[1] for n in (0, 1)]
    for place, each in enumerate(whole):
        halves = [part[place] for part in parts]
        assert sorted(each.prompt_tokens) == sorted(n for h in halves for n in h.prompt_tokens)
        assert sorted(each.answers) == sorted(a for h in halves for a in h.answers)


def test_prompts_say_the_fact_once(tokenizer: Any) -> None:
    prompts = question_prompts(tokenizer, 60)
    assert prompts[:8] == question_prompts(tokenizer, 8)
    assert any(prompt.kind == "two documents" for prompt in prompts)
    for prompt in prompts:
        documents = [tokenizer.decode(prompt.tokens[start:end]) for start, end in prompt.segments]
        assert sum(is_right(prompt, document) for document in documents) == 1, prompt.fact
        assert not is_right(prompt, tokenizer.decode(prompt.tokens[prompt.segments[-1][1] :]))
        assert all(100 <= end - start <= 220 for start, end in prompt.segments)
    for prompt in passage_prompts(tokenizer, 10):
        assert prompt.kind == PASSAGES
        assert prompt.continuation
        assert not is_right(prompt, "anything")


def test_a_fact_is_a_word_of_its_own() -> None:
    prompt = Prompt("one document", (), (), "cat")
    assert is_right(prompt, "a cat.")
    assert not is_right(prompt, "located")


def test_ways_are_checked() -> None:
    with pytest.raises(ValueError, match="no such way"):
        parse_ways("none,glue:3")
    assert [way.name for way in parse_ways("link:32")] == [FULL, PREFIX, "link 32"]
