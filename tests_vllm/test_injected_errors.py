"""An error of ours at every entry of the connector: the answers are those of vLLM alone.

tests/connectors/test_injected_errors.py does the same in many more states, over a model of vLLM.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from conftest import BLOCK, Faults, Start, Tokens, Vllm
from tiny import VOCABULARY, make_tiny

SCHEDULER = ("lookup", "allocated", "orders", "report", "finished", "sources")
WORKER = ("begin", "load", "save", "poll")
PLACES = [f"SchedulerSide.{name}" for name in SCHEDULER] + [f"WorkerSide.{name}" for name in WORKER]
NUM_TOKENS = 6

Answer = tuple[Tokens, list[float]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_tiny(tmp_path_factory.mktemp("tiny") / "model")
    return {"model": str(folder), "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def prompts() -> list[Tokens]:
    rng = random.Random(5)
    shared = [rng.randrange(VOCABULARY) for _ in range(3 * BLOCK)]
    ends = [[rng.randrange(VOCABULARY) for _ in range(num)] for num in (5, BLOCK, 70)]
    return [shared + end for end in ends]


@pytest.fixture(scope="module")
def expected(model: dict[str, Any], prompts: list[Tokens]) -> list[Answer]:
    alone = Vllm(**model)
    answers = _answers(_ask(alone, prompts))
    alone.close()
    return answers


@pytest.fixture(scope="module")
def vllm(start: Start, faults: Faults, model: dict[str, Any], expected: list[Answer]) -> Vllm:
    return start(given=model, always_load=True, kv_offloading_size=0.05)


def _ask(vllm: Vllm, prompts: list[Tokens]) -> list[Any]:
    return vllm.ask(prompts, NUM_TOKENS, logprobs=1, detokenize=False)


def _answers(outputs: list[Any]) -> list[Answer]:
    found = []
    for output in outputs:
        told = output.outputs[0]
        chosen = zip(told.logprobs, told.token_ids, strict=True)
        found.append((list(told.token_ids), [at[token].logprob for at, token in chosen]))
    return found


def _same(found: list[Answer], expected: list[Answer]) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, ours), (_, alone) in zip(found, expected, strict=True):
        # In float32 a prompt in two parts differs in the last bits; a lost layer, in the first.
        assert ours == pytest.approx(alone, abs=1e-3)


@pytest.mark.parametrize(("call", "is_after"), [(1, False), (2, True)])
@pytest.mark.parametrize("place", PLACES)
def test_an_error(
    vllm: Vllm,
    faults: Faults,
    prompts: list[Tokens],
    expected: list[Answer],
    place: str,
    call: int,
    is_after: bool,
) -> None:
    number = faults.new_round()
    ends = time.monotonic() + 60
    num_loaded = 0
    while not num_loaded:  # until what was saved is found
        assert time.monotonic() < ends, "nothing is loaded: the test hardly tests"
        outputs = _ask(vllm, prompts)
        _same(_answers(outputs), expected)
        vllm.forget()
        num_loaded = sum(bool(output.kv_transfer_params) for output in outputs)
    faults.set(error={"at": place, "call": call, "after": is_after}, round=number)
    for _ in range(2):
        _same(_answers(_ask(vllm, prompts)), expected)
        vllm.forget()  # only where no block is held
    assert faults.last_injected == number
