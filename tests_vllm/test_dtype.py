"""bfloat16: a loaded block is the block that vLLM had itself."""

from __future__ import annotations

from conftest import BLOCK, Faults, Start, tokens


def test_in_bfloat16_a_hit_below_answers_as_a_local_hit(start: Start, faults: Faults) -> None:
    vllm = start(given={"dtype": "bfloat16"}, always_load=True)
    prompt = tokens(3 * BLOCK + 3, 300)
    vllm.answer(prompt)
    local, loaded = vllm.answer(prompt, 6)
    assert loaded == {}
    vllm.forget()
    assert vllm.answer(prompt, 6) == (local, {"host": 3 * BLOCK})
