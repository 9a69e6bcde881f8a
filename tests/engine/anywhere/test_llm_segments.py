"""Segments through `LLM`: the same answers as the engine gives to the same bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.outputs import RequestOutput
from penstock.errors import ConfigError

MARK = {"reuse": "anywhere"}
DOCUMENT = "Once upon a time there was a lighthouse keeper who counted ships. " * 12
OTHER = "Ünïcödé bees — 蜂 — make honey from the nectar of flowers, <|im_end|> and wax. " * 6
QUESTION = "\nWho counted the ships?"
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0)


@pytest.fixture(scope="module")
def llm(cache: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        with LLM(
            dtype="float32",
            kv_offloading_size=0,
            device_kv_gib=0.1,
            block_tokens=16,
            segment_separator=" ## ",
        ) as made:
            yield made


@pytest.fixture(autouse=True)
def forget(llm: LLM) -> None:
    """So that each prompt's own blocks are computed again."""
    llm.engine.pool.forget()


def doc(text: str) -> dict[str, Any]:
    return {"text": text, "penstock": MARK}


def ids_of(llm: LLM, text: str) -> list[int]:
    return list(llm.engine.loaded.tokenizer(text, add_special_tokens=False)["input_ids"])


def logprobs(output: RequestOutput) -> list[str]:
    return [
        f"{each.logprob:.4f}"
        for entry in output.outputs[0].logprobs or ()
        for each in entry.values()
    ]


def expected(llm: LLM, *parts: tuple[str, bool]) -> tuple[list[int], list[str]]:
    """By hand: ids, and what the engine says."""
    ids: list[int] = []
    bounds = []
    for text, is_segment in parts:
        start = len(ids)
        ids += ids_of(llm, text)
        if is_segment:
            bounds.append((start, len(ids)))
    llm.engine.pool.forget()
    request = llm.engine.add("by-hand", ids, GREEDY, segments=bounds, tenant="by-hand")
    found: list[str] = []
    while llm.engine.has_work:
        found += [f"{step.sampled.logprob:.4f}" for step in llm.engine.step()]
    assert request.num_reused_tokens > 64
    llm.engine.pool.forget()
    return ids, found


@pytest.mark.parametrize("first", ["Read: ", ""], ids=["middle", "first"])
def test_prompts_with_segments(llm: LLM, first: str) -> None:
    whole = first + DOCUMENT + OTHER + QUESTION
    ids, found = expected(llm, (first, False), (DOCUMENT, True), (OTHER, True), (QUESTION, False))
    given: list[Any] = [
        {"segments": [first, doc(DOCUMENT), doc(OTHER), QUESTION]},
        f"{first} ## {DOCUMENT} ## {OTHER} ## {QUESTION}",
        {"prompt": f"{first} ## {DOCUMENT} ## {OTHER} ## {QUESTION}"},
        {
            "segments": [
                *([ids_of(llm, first)] if first else []),
                {"token_ids": ids_of(llm, DOCUMENT), "penstock": MARK},
                *(doc(OTHER), doc(""), ids_of(llm, QUESTION)),
            ]
        },
    ]
    for prompt in given:
        llm.engine.pool.forget()
        (output,) = llm.generate(prompt, GREEDY)
        assert output.prompt_token_ids == ids
        assert logprobs(output) == found
        assert output.num_reused_tokens > 64
        assert output.num_mended_tokens in (64, 128)  # one that is first is a prefix
        assert output.prompt in (whole, None)
    n_times = SamplingParams(temperature=0.0, max_tokens=4, n=2)
    outputs = llm.generate([given[0], "plain"], n_times)
    assert outputs[0].outputs[0].token_ids == outputs[0].outputs[1].token_ids
    assert outputs[1].num_reused_tokens == outputs[1].num_mended_tokens == 0


def test_chats_with_marked_parts(llm: LLM) -> None:
    def part(text: str, **mark: Any) -> dict[str, Any]:
        return {"type": "text", "text": text, **mark}

    template = llm.engine.loaded.tokenizer.apply_chat_template
    system = {"role": "system", "content": "Be brief."}
    text = template(
        [system, {"role": "user", "content": "Read: @@" + QUESTION}],
        add_generation_prompt=True,
        tokenize=False,
    )
    before, after = text.split("@@")
    ids, found = expected(llm, (before, False), (DOCUMENT, True), (after, False))
    for content in (
        [part("Read: "), part(DOCUMENT, penstock=MARK), part(QUESTION)],
        f"Read:  ## {DOCUMENT} ## {QUESTION}",
    ):
        llm.engine.pool.forget()
        (output,) = llm.chat([system, {"role": "user", "content": content}], GREEDY)
        assert output.prompt_token_ids == ids
        assert logprobs(output) == found
        assert output.num_reused_tokens > 64
    (plain,) = llm.chat([{"role": "user", "content": QUESTION}], GREEDY)
    whole = template([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    whole = whole if isinstance(whole, list) else whole["input_ids"]
    assert plain.prompt_token_ids == list(whole)


@pytest.mark.parametrize(
    "prompt",
    [
        {"segments": None},
        {"segments": []},
        {"segments": [{"text": "a", "penstock": {"reuse": "here"}}]},
        {"segments": ["a", 1]},
        " ##  ## ",
    ],
    ids=repr,
)
def test_wrong_prompts_are_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ConfigError, match="expected"):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize("separator", ["", 1])
def test_an_empty_separator_is_refused(separator: Any) -> None:
    with pytest.raises(ConfigError, match="segment_separator is"):
        LLM(segment_separator=separator)
