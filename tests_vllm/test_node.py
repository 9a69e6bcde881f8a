"""Several vLLM processes on one node: what one has computed, all load."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import BLOCK, Tokens, Vllm, half, transfer
from node_process import NodeProcess
from tiny import VOCABULARY, make_tiny

Answer = tuple[Tokens, list[dict[int, float]]]  # tokens, and the log probabilities of each


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_tiny(tmp_path_factory.mktemp("tiny") / "model")
    return {"model": str(folder), "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder = tmp_path_factory.mktemp("node")
    node = NodeProcess(folder / "node.sock", folder / "kv")
    yield node
    node.end()


Start = Callable[..., Vllm]


@pytest.fixture(scope="module")
def start(node: NodeProcess, model: dict[str, Any]) -> Iterator[Start]:
    engines: list[Vllm] = []

    def make(url: str = node.url, **given: Any) -> Vllm:
        config = transfer("patient", node=url, always_load=True)
        engines.append(Vllm(kv_transfer_config=config, **model | given))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def alone(model: dict[str, Any]) -> Iterator[Vllm]:
    """vLLM without Penstock."""
    vllm = Vllm(**model)
    yield vllm
    vllm.close()


@pytest.fixture(scope="module")
def one(start: Start) -> Vllm:
    return start()


@pytest.fixture(scope="module")
def other(start: Start) -> Vllm:
    return start()


def prompts_of(seed: int, num: int, num_blocks: int = 6) -> list[Tokens]:
    import random

    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(num_blocks * BLOCK + 3)] for _ in range(num)]


def ask(vllm: Vllm, prompt: Tokens) -> tuple[Answer, int]:
    """The answer, and how many tokens were loaded."""
    output = vllm.ask([prompt], 8, logprobs=3, detokenize=False)[0]
    given = [
        {token: found.logprob for token, found in each.items()}
        for each in output.outputs[0].logprobs
    ]
    told = (output.kv_transfer_params or {}).get("penstock", {}).get("loaded_tokens", {})
    return (list(output.outputs[0].token_ids), given), sum(told.values())


def own_hit(vllm: Vllm, prompt: Tokens) -> Answer:
    """The answer after a hit in vLLM's own prefix cache, of all whole blocks of the prompt.

    Of KV that it has computed itself: the prompt is new to it. Engines with and without a connector
    round differently, so the same bits are expected of engines with one only.
    """
    assert ask(vllm, prompt)[1] == 0
    answer, loaded = ask(vllm, prompt)
    assert loaded == 0
    return answer


def ask_until_loaded(vllm: Vllm, prompt: Tokens) -> Answer:
    ends = time.monotonic() + 60
    while True:
        vllm.forget()
        answer, loaded = ask(vllm, prompt)
        if loaded == len(prompt) // BLOCK * BLOCK:
            return answer
        assert time.monotonic() < ends, f"{loaded} tokens were loaded"


def test_what_one_has_computed_the_other_loads(
    alone: Vllm, one: Vllm, other: Vllm, node: NodeProcess
) -> None:
    for prompt in prompts_of(1, 3):
        without = own_hit(alone, prompt)
        hit = own_hit(one, prompt)
        answer, loaded = ask(other, prompt)
        assert loaded == 6 * BLOCK
        assert answer == hit  # bit for bit
        assert answer[0] == without[0]
        assert all(
            ours[token] == pytest.approx(theirs[token], abs=1e-4)
            for ours, theirs in zip(answer[1], without[1], strict=True)
            for token in ours.keys() & theirs.keys()
        )
    assert len(node.clients) == 2
    node.check()


def test_a_node_is_killed_and_restarted_while_vllm_serves(
    alone: Vllm, one: Vllm, other: Vllm, node: NodeProcess
) -> None:
    prompts = prompts_of(2, 12)
    hits = [own_hit(one, prompt) for prompt in prompts[:2]]
    expected = alone.answers(prompts, 24, detokenize=False)
    killer = threading.Timer(0.3, node.kill)
    killer.start()
    assert one.answers(prompts, 24, detokenize=False) == expected
    assert other.answers(prompts, 24, detokenize=False) == expected
    killer.join()
    one.forget()
    assert one.answers(prompts, 24, detokenize=False) == expected  # without a node
    node.start()
    for prompt, hit in zip(prompts, hits, strict=False):
        assert ask_until_loaded(one, prompt) == hit
        assert ask_until_loaded(other, prompt) == hit
    assert len(node.clients) == 2
    node.check()


def test_two_workers_join_the_node(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    node = NodeProcess(tmp_path / "node.sock", tmp_path / "kv")
    pair = start(node.url, tensor_parallel_size=2, dtype=half())
    (prompt,) = prompts_of(3, 1)
    hit = own_hit(pair, prompt)
    assert ask_until_loaded(pair, prompt) == hit
    node.kill()
    node.start()
    assert ask_until_loaded(pair, prompt) == hit  # both map the new memory
    node.end()


def test_one_is_killed_while_it_saves(
    alone: Vllm, one: Vllm, other: Vllm, node: NodeProcess
) -> None:
    prompts = prompts_of(4, 40, 24)
    expected = alone.answers(prompts, detokenize=False)
    hits = [own_hit(other, prompt) for prompt in prompts[:3]]
    before = node.num_used
    clients = len(node.clients)
    (process,) = one.llm.llm_engine.engine_core.resources.engine_manager.processes
    answers: list[Tokens] = []

    def generate() -> None:
        with suppress(Exception):  # vLLM raises one, or waits for its engine forever
            answers.extend(one.answers(prompts, detokenize=False))

    threading.Thread(target=generate, daemon=True).start()
    _wait(lambda: node.num_used > before + 24)
    os.kill(process.pid, signal.SIGKILL)
    assert answers == []
    assert other.answers(prompts, detokenize=False) == expected
    _wait(lambda: len(node.clients) == clients - 1)  # its workers have ended too
    node.check()
    for prompt, hit in zip(prompts, hits, strict=False):
        assert ask_until_loaded(other, prompt) == hit


def _wait(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.001)
