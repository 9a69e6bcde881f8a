"""Hints of a request reach Penstock through vLLM's own field, and nobody can tell by the answer."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import BLOCK, Start, Tokens, Vllm, tokens

SMALL_GIB = 0.06  # some forty blocks


@pytest.fixture(scope="module")
def vllm(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    folder = tmp_path_factory.mktemp("disk") / "kv"
    settings = {"host.policy": "lru"}
    return start(disk=folder, kv_offloading_size=SMALL_GIB, set=settings, always_load=True)


def ask(vllm: Vllm, prompt: Tokens, hints: Any) -> Tokens:
    extra = {"kv_transfer_params": {"penstock": hints}}
    return vllm.answers([prompt], extra_args=extra)[0]


def flood(vllm: Vllm) -> None:
    for number in range(12):
        vllm.answer(tokens(6 * BLOCK, 100 + number), num=1)


def test_a_retained_prompt_is_in_dram_after_a_flood_until_it_is_released(
    vllm: Vllm, plain: Vllm
) -> None:
    prompt, other = tokens(6 * BLOCK + 3, 1), tokens(6 * BLOCK + 3, 2)
    expected = plain.answers([prompt])[0]
    assert ask(vllm, prompt, {"session": "agent", "retain_seconds": 600}) == expected
    vllm.answer(other)
    flood(vllm)
    vllm.forget()
    assert vllm.answer(prompt) == (expected, {"host": 6 * BLOCK})
    assert vllm.answer(other)[1] == {"disk": 6 * BLOCK}
    ask(vllm, other, {"session": "agent", "on_end": "release"})
    flood(vllm)
    vllm.forget()
    assert vllm.answer(prompt) == (expected, {"disk": 6 * BLOCK})


def test_wrong_hints_fail_nothing(vllm: Vllm, plain: Vllm) -> None:
    prompt = tokens(2 * BLOCK + 1, 3)
    expected = plain.answers([prompt])[0]
    for wrong in ("retain", {"sesion": "x"}, {"retain_seconds": "long"}, [], 7):
        assert ask(vllm, prompt, wrong) == expected
