"""`LLM` with the real SmolLM2-135M: vLLM's shapes, transformers' tokens, KV that comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import always_load

import penstock.engine.engine as engine_module
from penstock import LLM, SamplingParams
from penstock.engine.attention.torch import NAME
from penstock.engine.faults import EngineFault
from penstock.errors import ConfigError

QUESTION = "The capital of France is"
STORY = "Once upon a time there was a lighthouse keeper who counted ships. " * 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        with LLM(
            dtype="float32",
            kv_offloading_size=0.5,
            disk_path=str(tmp_path_factory.mktemp("kv")),
            disk_size=0.5,
            device_kv_gib=0.1,
            block_tokens=16,
        ) as made:
            yield made


def test_tokens_are_those_of_transformers(llm: LLM) -> None:
    (output,) = llm.generate(QUESTION, GREEDY)
    model = llm.engine.loaded.model
    model.config._attn_implementation = "eager"
    try:
        expected = model.generate(
            torch.tensor([output.prompt_token_ids]),
            attention_mask=torch.ones(1, len(output.prompt_token_ids), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
        )[0, len(output.prompt_token_ids) :].tolist()
    finally:
        model.config._attn_implementation = NAME
    completion = output.outputs[0]
    assert completion.token_ids == expected
    assert "Paris" in completion.text
    assert output.finished
    assert completion.finish_reason in ("length", "stop")


def test_a_returning_prompt_is_loaded_and_answered_the_same(llm: LLM) -> None:
    (cold,) = llm.generate(STORY, GREEDY)
    assert cold.num_cached_tokens == 0
    (device,) = llm.generate(STORY, GREEDY)
    offloader = llm.engine.offloader
    assert offloader is not None
    assert offloader.drain(30)
    llm.engine.step()
    llm.engine.pool.forget()
    always_load(llm.engine)
    (dram,) = llm.generate(STORY, GREEDY)
    llm.engine.pool.forget()
    offloader.empty_host()
    (disk,) = llm.generate(STORY, GREEDY)
    whole = (len(cold.prompt_token_ids) - 1) // 16 * 16
    for warm in (device, dram, disk):
        assert warm.num_cached_tokens == whole
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        assert warm.outputs[0].text == cold.outputs[0].text
    assert device.metrics is not None
    assert device.metrics.num_loaded_tokens == 0
    for loaded in (dram, disk):
        assert loaded.metrics is not None
        assert loaded.metrics.num_loaded_tokens == whole


def test_several_samples_of_one_prompt_are_reproducible_and_differ(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, logprobs=2)
    (one,) = llm.generate(QUESTION, params)
    (two,) = llm.generate([QUESTION, STORY], params)[:1]
    texts = [completion.text for completion in one.outputs]
    assert texts == [completion.text for completion in two.outputs]
    assert len(set(texts)) > 1
    for completion in one.outputs:
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        for token_id, found in zip(completion.token_ids, completion.logprobs, strict=True):
            assert token_id in found
            assert 2 <= len(found) <= 3


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (free,) = llm.generate(STORY, GREEDY)
    text = free.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    (cut,) = llm.generate(STORY, SamplingParams(temperature=0.0, max_tokens=12, stop=[stop]))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert cut.outputs[0].finish_reason == "stop"
    assert cut.outputs[0].stop_reason == stop


def test_chat_and_streamed_text(llm: LLM) -> None:
    seen: list[str] = []
    (output,) = llm.chat(
        [{"role": "user", "content": "Say hello."}],
        GREEDY,
        on_text=lambda number, text: seen.append(text),
    )
    assert "".join(seen) == output.outputs[0].text


def test_bad_calls_are_one_clear_sentence_and_leave_nothing_behind(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="empty"):
        llm.generate([QUESTION, []], GREEDY)
    with pytest.raises(ConfigError, match="expected one"):
        llm.generate([QUESTION], [GREEDY, GREEDY])
    with pytest.raises(ConfigError, match="kv_offloading_backend"):
        LLM(kv_offloading_backend="lmcache")
    assert not llm.engine.has_work
    llm.engine.check()


def test_a_step_that_fails_raises_and_the_next_call_is_answered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = llm.generate(QUESTION, GREEDY)
    sample, num_calls = engine_module.begin_sampling, 0

    def breaks(*given: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise RuntimeError("injected")
        return sample(*given)

    monkeypatch.setattr(engine_module, "begin_sampling", breaks)
    with pytest.raises(EngineFault, match="Retry the request"):
        llm.generate([QUESTION, STORY], GREEDY)
    assert not llm.engine.has_work
    (again,) = llm.generate(QUESTION, GREEDY)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


def test_token_ids_that_the_model_does_not_have_are_refused(llm: LLM) -> None:
    beyond = SamplingParams(min_tokens=1, max_tokens=2, stop_token_ids=[2_000_000_000])
    with pytest.raises(ConfigError, match="stop_token_ids has token ids from 2000000000"):
        llm.generate(QUESTION, beyond)
    assert llm.generate(QUESTION, GREEDY)[0].finished
