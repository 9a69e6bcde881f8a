"""Half precision: a loaded block is the block that vLLM had itself."""

from __future__ import annotations

import platform
from pathlib import Path

from conftest import BLOCK, Faults, Start, tokens
from tiny import VOCABULARY, make_tiny


def _half() -> str:
    """vLLM's build for ARM dies of bfloat16 on a processor that does not have it."""
    if platform.machine() == "aarch64" and "bf16" not in Path("/proc/cpuinfo").read_text():
        return "float16"
    return "bfloat16"


def test_in_half_precision_a_hit_below_answers_as_a_local_hit(
    start: Start, faults: Faults, tmp_path: Path
) -> None:
    model = {"model": str(make_tiny(tmp_path / "model")), "skip_tokenizer_init": True}
    vllm = start(given={**model, "dtype": _half()}, always_load=True)
    prompt = [token % VOCABULARY for token in tokens(3 * BLOCK + 3, 300)]
    vllm.answer(prompt)
    local, loaded = vllm.answer(prompt, 6)
    assert loaded == {}
    vllm.forget()
    assert vllm.answer(prompt, 6) == (local, {"host": 3 * BLOCK})
