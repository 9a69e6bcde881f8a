"""Time to first token with two-ended loads from a shared store, slower or faster than computing.

The front of the prompt is computed while its back is loaded. The peer is the better of only
computing and only loading. The store is in memory behind a link of the given rate. Every first
token is compared.
    python -m benchmarks --only two_ended_load
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from benchmarks.engine_tiers import FIRST, prompt
from benchmarks.harness import Row
from penstock import LLM
from penstock.config import load_config
from penstock.costs.choose import LoadChoice
from penstock.engine.engine import Engine
from penstock.stores import memory
from penstock.types import Match

NUM_TOKENS = 2048
ROUNDS = 5
# On a CPU a small model computes about 40 MB of KV per second; on a GPU a large one gigabytes.
CPU_RATES = (0.01, 0.02, 0.04, 0.08, 0.15, 0.5, 2.0)  # GB/s
GPU_RATES = (0.1, 0.25, 0.5, 1.0, 2.0)
NAME = "two-ended-benchmark"

Choose = Callable[[Match, int], LoadChoice]


def run(directory: Path) -> Iterator[Row]:
    for rate in CPU_RATES:
        yield from _measure(rate)


def _measure(rate: float) -> Iterator[Row]:
    memory.forget_shared(NAME)
    config = load_config(
        env={},
        overrides={
            "host.size": "1GiB",
            "remote.url": f"memory://{NAME}?gb_per_second={rate}",
            "transfer.load_deadline_seconds": 3600,
            "remote.lookup_deadline_seconds": 10,
        },
    )
    with LLM(device_kv_gib=1, config=config, dtype="float32") as llm:
        engine = llm.engine
        chooses = engine.scheduler._choose
        ids = prompt(NUM_TOKENS, 7)
        llm.generate([prompt(NUM_TOKENS, 8)], FIRST)
        (expected,) = llm.generate([ids], FIRST)

        def first_token(choose: Choose) -> tuple[float, int]:
            _forget(engine)
            engine.scheduler._choose = choose
            (output,) = llm.generate([ids], FIRST)
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            metrics = output.metrics
            assert metrics is not None
            assert metrics.first_token_seconds is not None
            return metrics.first_token_seconds, metrics.num_loaded_tokens

        def loaded(match: Match, num_past: int) -> LoadChoice:
            return LoadChoice(match.num_blocks)

        def computed(match: Match, num_past: int) -> LoadChoice:
            return LoadChoice(0)

        seconds: dict[str, list[float]] = {"ours": [], "loaded": [], "computed": []}
        num_loaded = 0
        for _ in range(ROUNDS):
            for name, choose in (("loaded", loaded), ("computed", computed), ("ours", chooses)):
                taken, num = first_token(choose)
                seconds[name].append(taken)
                num_loaded = num if name == "ours" else num_loaded
        medians = {name: median(values) for name, values in seconds.items()}
        better = min("loaded", "computed", key=lambda name: medians[name])
        yield Row(
            f"first token, {NUM_TOKENS} tokens, {rate} GB/s, {num_loaded} loaded "
            f"(all loaded {medians['loaded'] * 1000:.0f} ms, "
            f"all computed {medians['computed'] * 1000:.0f} ms)",
            medians["ours"] * 1000,
            "ms",
            medians[better] * 1000,
            f"all {better}",
            "≥ 1",
            medians[better] / medians["ours"],
        )
    memory.forget_shared(NAME)


def _forget(engine: Engine) -> None:
    """Empty the device and DRAM; the store keeps everything."""
    assert engine.offloader is not None
    engine.offloader.drain()
    engine.step()
    engine.pool.forget()
    engine.offloader.empty_host()
