"""Segments in models with windows, sinks, caps or several rotations, against plain transformers."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine.anywhere.prompts import MODES, Oracle, Prompt, ask
from engine.ruled_models import MODELS
from engine.test_ruled_models import load
from tiny import BLOCK_TOKENS, idle

from penstock.engine.anywhere.turning import Turner, _keys_at
from penstock.engine.attention.torch import register
from penstock.engine.engine import Engine
from penstock.engine.parts import EngineConfig
from penstock.errors import ConfigError

register()  # transformers has to know our attention

LATENT = [kind for kind in MODELS if kind.startswith("deepseek")]


def part(first: int, num: int, *, marked: bool = False) -> tuple[list[int], bool]:
    return [(first + i * 7) % 60 + 3 for i in range(num)], marked


PROMPT = Prompt(
    [part(1, 5), part(2, 90, marked=True), part(3, 3), part(4, 80, marked=True), part(5, 9)]
)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in LATENT])
def test_keys_are_turned(kind: str, tmp_path: Path) -> None:
    loaded = load(kind, tmp_path)
    turner = Turner(loaded)
    one, other = _keys_at(loaded, [2, 230], 9)
    for layer in range(loaded.num_layers):
        turned = turner.turn(one[layer], layer, 228)
        scale = float(other[layer].abs().max())
        assert float((turned - other[layer]).abs().max()) < 2e-5 * scale


@pytest.mark.parametrize("kind", LATENT)
def test_keys_that_end_with_what_is_rotated_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be turned"):
        Turner(load(kind, tmp_path))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2", "gemma3", "cohere2"])
def test_answers_are_those_of_transformers(
    kind: str, mode: str, tmp_path: Path, tokenizer: Any
) -> None:
    loaded = replace(load(kind, tmp_path), tokenizer=tokenizer)
    tokens, logprobs = Oracle(loaded).answer(PROMPT, mode)
    token_bytes = 2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim * 4
    with closing(Engine(loaded, EngineConfig(64 * BLOCK_TOKENS * token_bytes, BLOCK_TOKENS))) as e:
        answer = ask(e, PROMPT, mode)
        assert answer.request.num_reused_tokens > 100
        assert answer.tokens == tokens
        assert [float.fromhex(each) for each in answer.logprobs] == pytest.approx(
            logprobs, abs=1e-4
        )
        idle(e)
