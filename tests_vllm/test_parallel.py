"""Two tensor-parallel workers: each packs and keeps its part, a block is whole or not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import BLOCK, Faults, Start, half
from tiny import VOCABULARY, make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_tiny(tmp_path_factory.mktemp("tiny") / "model")
    return {"model": str(folder), "skip_tokenizer_init": True}


def test_two_workers_keep_a_block_together(
    start: Start,
    faults: Faults,
    model: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    prompt = [(7 * n) % VOCABULARY for n in range(6 * BLOCK + 3)]
    given = {**model, "tensor_parallel_size": 2, "dtype": half()}
    codec = "lossless" if half() == "bfloat16" else "raw"
    settings = {"host.codec": codec}
    pair = start(disk=tmp_path / "kv", given=given, set=settings, always_load=True)
    pair.answer(prompt, 12)
    answer, loaded = pair.answer(prompt, 12)  # vLLM's own hit: a cold prompt may round differently
    assert loaded == {}
    pair.forget()
    assert pair.answer(prompt, 12) == (answer, {"host": 6 * BLOCK})
    pair.forget()
    faults.empty_host()
    assert pair.answer(prompt, 12) == (answer, {"disk": 6 * BLOCK})
