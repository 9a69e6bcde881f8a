"""Three hundred requests of every kind, a small pool, a small DRAM, and a disk that misbehaves."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import BLOCK, Faults, Start, Tokens, Vllm
from tiny import VOCABULARY, make_tiny

NUM_REQUESTS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_tiny(tmp_path_factory.mktemp("tiny") / "model")
    return {"model": str(folder), "skip_tokenizer_init": True}


def workload(rng: random.Random, vocabulary: int) -> list[tuple[Tokens, int]]:
    """Prompts with shared beginnings, and how many tokens to answer each with."""

    def draw(num: int) -> Tokens:
        return [rng.randrange(vocabulary) for _ in range(num)]

    heads = [draw(BLOCK * rng.randint(1, 9)) for _ in range(8)]
    requests = []
    for _ in range(NUM_REQUESTS):
        tail = draw(rng.randint(1, 120))
        head = rng.choice(heads)
        requests.append(([*head[: BLOCK * rng.randint(0, 9)], *tail], rng.randint(1, 40)))
    return requests


def run(vllm: Vllm, requests: list[tuple[Tokens, int]], faults: Faults | None) -> dict[int, Tokens]:
    """All answers but those of requests that were aborted."""
    from vllm import SamplingParams

    engine, rng = vllm.llm.llm_engine, random.Random(3)
    answers: dict[int, Tokens] = {}
    aborted: set[str] = set()
    live: set[str] = set()
    waiting = list(enumerate(requests))
    ends = time.monotonic() + 500
    while waiting or engine.has_unfinished_requests():
        assert time.monotonic() < ends, f"{len(live)} requests hang: {sorted(live)[:5]}"
        while waiting and len(live) < 12:
            number, (prompt, num) = waiting.pop(0)
            params = SamplingParams(
                temperature=0, max_tokens=num, ignore_eos=True, detokenize=False
            )
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
            live.add(str(number))
        for output in engine.step():
            name = output.request_id.split("-")[0]
            if output.finished:
                live.discard(name)
                answers[int(name)] = list(output.outputs[0].token_ids)
        if faults is None:
            continue
        if rng.random() < 0.02 and live and len(aborted) < NUM_REQUESTS // 8:
            name = rng.choice(sorted(live))
            engine.abort_request([name])
            aborted.add(name)
            live.discard(name)
        if rng.random() < 0.05:
            faults.set(
                read_error=rng.choice([0, 0, 0.3, 1]),
                write_error=rng.choice([0, 0, 0.5]),
                read_delay=rng.choice([0, 0, 0, 0.02, 0.3]),
            )
        if rng.random() < 0.01:
            faults.empty_host(drain=0)
        if rng.random() < 0.01:
            vllm.llm.reset_prefix_cache()
    return {number: answer for number, answer in answers.items() if str(number) not in aborted}


def test_three_hundred_requests_over_a_failing_disk(
    start: Start, faults: Faults, model: dict[str, Any], tmp_path: Path
) -> None:
    requests = workload(random.Random(1), VOCABULARY)
    undisturbed = Vllm(**model)
    expected = run(undisturbed, requests, None)
    undisturbed.close()
    vllm = start(
        disk=tmp_path / "kv",
        given={**model, "num_gpu_blocks_override": 33},
        always_load=True,
        kv_offloading_size=0.004,
        set={"transfer.load_deadline_seconds": 0.2},
    )
    answers = run(vllm, requests, faults)
    assert len(answers) > NUM_REQUESTS * 0.8
    assert answers == {number: expected[number] for number in answers}
    assert vllm.metric("vllm:num_preemptions") > 0
    assert vllm.metric("vllm:external_prefix_cache_hits") > 1000
    faults.set()
    vllm.check_nothing_is_held()
