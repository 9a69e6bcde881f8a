"""KV outlives the engine's process; it does not outlive the weights it was made with."""

from __future__ import annotations

import shutil
from pathlib import Path

from conftest import BLOCK, MODEL, Faults, Start, Vllm, tokens


def test_a_prompt_is_hit_after_a_restart(
    start: Start, plain: Vllm, faults: Faults, tmp_path: Path
) -> None:
    prompt = tokens(6 * BLOCK + 3, 200)
    expected = plain.answers([prompt])[0]
    first = start(disk=tmp_path / "kv", always_load=True)
    assert first.answer(prompt) == (expected, {})
    first.close()
    second = start(disk=tmp_path / "kv", always_load=True)
    assert second.answer(prompt) == (expected, {"disk": 6 * BLOCK})
    second.close()
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1  # one bit of one weight
    weights.write_bytes(data)
    third = start(disk=tmp_path / "kv2", always_load=True, given={"model": str(other)})
    assert third.answer(prompt)[1] == {}
