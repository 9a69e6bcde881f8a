"""Half precision: a loaded block is the block that vLLM had itself."""

from __future__ import annotations

from pathlib import Path

from conftest import BLOCK, Faults, Start, half, tokens
from tiny import VOCABULARY, make_tiny


def test_in_half_precision_a_hit_below_answers_as_a_local_hit(
    start: Start, faults: Faults, tmp_path: Path
) -> None:
    model = {"model": str(make_tiny(tmp_path / "model")), "skip_tokenizer_init": True}
    vllm = start(given={**model, "dtype": half()}, always_load=True)
    prompt = [token % VOCABULARY for token in tokens(3 * BLOCK + 3, 300)]
    vllm.answer(prompt)
    local, loaded = vllm.answer(prompt, 6)
    assert loaded == {}
    vllm.forget()
    assert vllm.answer(prompt, 6) == (local, {"host": 3 * BLOCK})
