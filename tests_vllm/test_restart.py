"""KV outlives the engine's process."""

from __future__ import annotations

from pathlib import Path

from conftest import BLOCK, Faults, Start, Vllm, tokens


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
