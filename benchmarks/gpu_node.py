"""Engines on one GPU that share a node: what a node costs, and prefill apart from decode.

    python -m benchmarks.gpu_node ttft     first tokens from DRAM: through a node, and in-process
    python -m benchmarks.gpu_node roles    decode steps while 32,768-token prompts are computed:
                                           by nobody, by the same engine, by another process

Llama-3.1-8B's shapes in bf16. With `--tiny` both run at a small scale on a CPU, to show that they
work. In `roles`, processes that share a GPU take turns on it (without MPS), so the neighbor's
kernels delay steps even when it is apart; on a GPU of its own it could not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

from benchmarks.gpu_engine import BLOCK_TOKENS, Scale, forget, prompt_of, say, serve
from benchmarks.node_link import serving_node
from penstock.config import Config, HostConfig, NodeConfig
from penstock.costs.choose import LoadChoice
from penstock.engine.engine import Engine
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.units import MiB

BATCH = 16
ANSWER_TOKENS = 4_000  # more than are decoded while it is measured


@contextmanager
def engine_of(scale: Scale, tiers: Config, pool_tokens: int, max_num_seqs: int) -> Iterator[Engine]:
    step_tokens = 128 if scale.tiny else 4096
    size = pool_tokens * scale.token_bytes
    config = EngineConfig(size, BLOCK_TOKENS, step_tokens, max_num_seqs)
    engine = Engine(scale.loaded, config, tiers)
    engine.runner.warm_up(lambda _: None)
    engine.scheduler._choose = lambda match, num_past: LoadChoice(match.num_blocks)
    try:
        yield engine
    finally:
        engine.close()


def _wait_until_pinned(engine: Engine) -> None:
    assert engine.offloader is not None
    arena = engine.offloader.host
    while arena.num_for_device < arena.num_slots:
        engine.step()
        time.sleep(0.1)


def ttft(scale: Scale, rounds: int) -> None:
    lengths = [scale.tokens(n) for n in (512, 2_048, 8_192, 32_768)]
    room = 2 * sum(lengths)
    size = max(64 * MiB, room * scale.token_bytes)
    own_tiers = Config(HostConfig(size_bytes=size, codec="raw"))
    with (
        serving_node(size, codec="raw") as node_tiers,
        engine_of(scale, node_tiers, room, 4) as node,
        engine_of(scale, own_tiers, room, 4) as own,
    ):
        engines = {"node": node, "own": own}
        for engine in engines.values():
            if not scale.tiny:
                _wait_until_pinned(engine)
            serve(engine, [prompt_of(n, -n) for n in lengths[:3]])  # kernels are compiled
        for length in lengths:
            prompt = prompt_of(length, length)
            answers = {name: serve(engine, [prompt])[1][0] for name, engine in engines.items()}
            taken: dict[str, list[float]] = {name: [] for name in engines}
            for number in range(rounds):
                for name in list(engines)[:: 1 if number % 2 else -1]:
                    forget(engines[name])
                    seconds, (found,) = serve(engines[name], [prompt])
                    taken[name].append(seconds * 1e3)
                    if found.output_ids != answers["own"].output_ids:
                        raise SystemExit(f"{length} tokens: the answer from DRAM differs")
                    if found.num_loaded_tokens < length - BLOCK_TOKENS:
                        raise SystemExit(f"{name}: only {found.num_loaded_tokens} tokens loaded")
            row: dict[str, Any] = {"tokens": length}
            row |= {f"{name}_ms": median(times) for name, times in taken.items()}
            row |= {f"{name}_fastest_ms": min(times) for name, times in taken.items()}
            say(row | {"of_own": row["node_ms"] / row["own_ms"]})


def _step_times(engine: Engine, scale: Scale, seconds: float, *, prefills: bool) -> list[float]:
    """The ms between tokens of a decoding batch. `prefills`: prompts are computed in between."""
    context = scale.tokens(2_048)
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    requests = [engine.add(f"d{n}", prompt_of(context, n), params) for n in range(BATCH)]
    while any(len(request.output_ids) < 8 for request in requests):
        engine.step()
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    taken: list[float] = []
    length, number, prompt = scale.tokens(32_768), 0, None
    last, end = time.perf_counter(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        if prefills and (prompt is None or prompt.finish_reason is not None):
            number += 1
            prompt = engine.add(f"p{number}", prompt_of(length, 1000 + number), one)
        before = len(requests[0].output_ids)
        engine.step()
        if len(requests[0].output_ids) > before:
            now = time.perf_counter()
            taken.append((now - last) * 1e3)
            last = now
    for request in (*requests, *([] if prompt is None else [prompt])):
        if request.finish_reason is None:
            engine.abort(request.id)
    while engine.has_work:
        engine.step()
    return taken


def roles(scale: Scale, seconds: float) -> None:
    room = BATCH * (scale.tokens(2_048) + ANSWER_TOKENS + BLOCK_TOKENS) + scale.tokens(40_000)
    size = max(64 * MiB, 4 * scale.tokens(40_000) * scale.token_bytes)
    options = ["--tiny"] if scale.tiny else []
    with (
        serving_node(size, codec="raw") as tiers,
        engine_of(scale, tiers, room, 17) as engine,
    ):
        _step_times(engine, scale, seconds / 3, prefills=True)  # kernels are compiled
        rows = {"nobody": _step_times(engine, scale, seconds, prefills=False)}
        rows["the same engine"] = _step_times(engine, scale, seconds, prefills=True)
        url = str(tiers.node.url)
        command = [sys.executable, "-m", "benchmarks.gpu_node", "prefill", "--url", url, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as neighbor:
            assert neighbor.stdout is not None
            try:
                assert neighbor.stdout.readline() == "ready\n"
                rows["another process"] = _step_times(engine, scale, seconds, prefills=False)
            finally:
                neighbor.terminate()
            computed = [json.loads(line) for line in neighbor.stdout]
    alone = median(rows["nobody"])
    for who, times in rows.items():
        row = {"prompts_by": who, "steps": len(times), "p50_ms": median(times)}
        row |= {"p99_ms": quantiles(times, n=100)[98], "longest_ms": max(times)}
        say(row | {"p99_of_alone": row["p99_ms"] / alone})
    if computed:
        say({"neighbor_prompts": len(computed), "prefill_ms": median(computed) * 1e3})


def prefill(scale: Scale, url: str) -> None:
    """The neighbor: compute prompts until terminated, and hand them to the node."""
    length = scale.tokens(32_768)
    with engine_of(scale, Config(node=NodeConfig(url=url)), 2 * length, 2) as engine:
        serve(engine, [prompt_of(length, 5)])
        print("ready", flush=True)
        for seed in range(10_000, 20_000):
            print(serve(engine, [prompt_of(length, seed)])[0], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_node", description=__doc__)
    parser.add_argument("part", choices=["ttft", "roles", "prefill"])
    parser.add_argument("--rounds", type=int, default=9, help="of ttft")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement of roles")
    parser.add_argument("--url", help="of the node; for the neighbor in roles")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    scale = Scale(options.tiny)
    match options.part:
        case "ttft":
            ttft(scale, options.rounds)
        case "roles":
            roles(scale, options.seconds)
        case _:
            prefill(scale, options.url)


if __name__ == "__main__":
    main()
