"""Long sessions on a device pool that holds few of them: how many are served, and how fast.

    python -m benchmarks.sessions                       a GPU: Llama-3.1-8B's shapes, 28,000 tokens
    python -m benchmarks.sessions --small               a GPU: a small model in float32
    python -m benchmarks.sessions --tiny                a CPU: the same proportions, at small scale

Sessions share a template, arrive in bursts (like a peak at the end of a month), and each requests
some tokens. The pool holds 2.8 of them, DRAM the rest. Four systems get the same arrivals: the
device alone; naive residency, which moves the oldest blocks of any session to DRAM; prefix, tail
and budget; and sessions that take turns. A session that finds the queue full is refused. After a
time limit, unfinished sessions are aborted and the next burst starts. In float32 (`--tiny`, or
`--small` on a GPU) answers are compared with those of the device alone; in bfloat16 they depend on
the rest of the batch.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.gpu_model import random_llama, small_llama, tiny_llama, token_bytes
from penstock.config import Config, HostConfig
from penstock.config.options import COLD_ATTENTION, COLD_DEVICE
from penstock.engine.admission import Busy, TooLong
from penstock.engine.engine import Engine
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.residency import ResidencyConfig


@dataclass
class Load:
    session_tokens: int
    template_tokens: int
    output_tokens: int
    num_bursts: int
    burst_sessions: int
    burst_seconds: float
    window_seconds: float
    turn_seconds: float = 0.5
    pool_sessions: float = 2.8
    max_waiting: int = 1


@dataclass
class Result:
    num_admitted: int = 0
    num_rejected: int = 0
    most_at_once: int = 0
    num_finished: int = 0
    num_tokens: int = 0
    token_seconds: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    answers: dict[int, list[int]] = field(default_factory=dict)
    seconds: float = 0.0

    def row(self, name: str) -> dict[str, Any]:
        def percentile(values: list[float], share: float) -> float:
            return round(sorted(values)[int(share * (len(values) - 1))] * 1000, 1)

        offered = self.num_admitted + self.num_rejected
        return {
            "system": name,
            "admitted": self.num_admitted,
            "rejected": round(self.num_rejected / offered, 3),
            "at_once": self.most_at_once,
            "token_ms_p50": percentile(self.token_seconds, 0.5),
            "token_ms_p99": percentile(self.token_seconds, 0.99),
            "first_token_ms_p50": percentile(self.first_token_seconds, 0.5),
            "first_token_ms_p99": percentile(self.first_token_seconds, 0.99),
            "tokens_per_second": round(self.num_tokens / self.seconds, 1),
            "seconds": round(self.seconds, 1),
            "finished": self.num_finished,
        }


def bursts(load: Load) -> list[list[tuple[float, int, list[int]]]]:
    """For each burst, the arrivals: time, number of the session, prompt."""
    rng = random.Random(0)
    template = [rng.randrange(5, 90) for _ in range(load.template_tokens)]
    num_own = load.session_tokens - load.template_tokens - load.output_tokens
    made = []
    for burst in range(load.num_bursts):
        sessions = []
        for place in range(load.burst_sessions):
            at = place * load.burst_seconds / load.burst_sessions
            number = burst * load.burst_sessions + place
            own = random.Random(number)
            prompt = template + [own.randrange(5, 90) for _ in range(num_own)]
            sessions.append((at, number, prompt))
        made.append(sessions)
    return made


def run(engine: Engine, load: Load) -> Result:
    result = Result()
    started = time.monotonic()
    for burst in bursts(load):
        _serve(engine, burst, load, result)
    result.seconds = time.monotonic() - started
    engine.check()
    return result


def _serve(
    engine: Engine, waiting: list[tuple[float, int, list[int]]], load: Load, result: Result
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=load.output_tokens, ignore_eos=True)
    started = time.monotonic()
    last_token: dict[str, float] = {}
    came: dict[str, float] = {}
    while waiting or engine.has_work:
        now = time.monotonic() - started
        if now > load.window_seconds:
            for name in came:
                engine.abort(name)
            continue
        while waiting and waiting[0][0] <= now:
            _, number, prompt = waiting.pop(0)
            try:
                engine.add(str(number), prompt, params)
                came[str(number)] = time.monotonic()
                result.num_admitted += 1
            except (Busy, TooLong):
                result.num_rejected += 1
        if not engine.has_work:
            time.sleep(max(0.0, min(0.01, waiting[0][0] - now)))
            continue
        for progress in engine.step():
            request, then = progress.request, time.monotonic()
            before = last_token.get(request.id)
            if before is None:
                result.first_token_seconds.append(then - came[request.id])
            else:
                result.token_seconds.append(then - before)
            last_token[request.id] = then
            result.num_tokens += 1
            result.answers[int(request.id)] = list(request.output_ids)
            if request.finish_reason is not None:
                result.num_finished += 1
                del last_token[request.id]
        # Sequences that have started to answer and have not finished.
        result.most_at_once = max(result.most_at_once, len(last_token))


def systems(load: Load, block_bytes: int) -> dict[str, tuple[ResidencyConfig, bool]]:
    budget = int(load.pool_sessions * load.session_tokens / 8)
    policy = ResidencyConfig(
        prefix_tokens=load.template_tokens,
        tail_tokens=max(32, load.session_tokens // 56),
        max_cold_bytes_per_step=1 << 50,
    )
    little = load.session_tokens // 16 // 14 * block_bytes  # 256 MiB of Llama-3.1-8B
    return {
        "device alone": (ResidencyConfig(cold=False), False),
        "naive": (replace(policy, prefix_tokens=0, tail_tokens=0), True),
        "prefix, tail and budget": (replace(policy, session_tokens=budget), True),
        "in turns": (
            replace(policy, max_cold_bytes_per_step=little, turn_seconds=load.turn_seconds),
            True,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sessions", description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--bursts", type=int, default=1)
    parser.add_argument("--burst", type=int, default=10, help="sessions in one")
    parser.add_argument("--every", type=float, default=1.6, help="seconds between two of them")
    parser.add_argument("--output", type=int, default=600, help="tokens that each asks for")
    parser.add_argument("--window", type=float, default=40.0, help="seconds for a burst")
    parser.add_argument("--turn", type=float, default=0.5, help="seconds")
    parser.add_argument("--host-gib", type=float, default=40.0)
    parser.add_argument("--only", help="one of the systems")
    parser.add_argument(
        "--cold-attention",
        choices=COLD_ATTENTION,
        default=COLD_DEVICE,
        help="who attends to KV in DRAM",
    )
    options = parser.parse_args()
    bursts_of = (options.bursts, options.burst)
    if options.tiny:
        load = Load(448, 64, 32, *bursts_of, 0.2, 60.0, 0.02)
        loaded = tiny_llama()
    elif options.small:
        load = Load(28_000, 3_800, 256, *bursts_of, 1.0, 60.0, 0.1)
        loaded = small_llama()
    else:
        load = Load(
            28_000,
            3_800,
            options.output,
            *bursts_of,
            options.every * options.burst,
            options.window,
            options.turn,
        )
        loaded = random_llama("cuda")
    pool_bytes = int(load.pool_sessions * load.session_tokens * token_bytes(loaded))
    answers: dict[int, list[int]] = {}
    for name, (residency, has_host) in systems(load, 16 * token_bytes(loaded)).items():
        if options.only not in (None, name):
            continue
        tiers = None
        if has_host:
            host = 64 << 20 if options.tiny else int(options.host_gib * (1 << 30))
            host = 4 << 30 if options.small else host
            tiers = Config(HostConfig(size_bytes=host))
        config = EngineConfig(
            pool_bytes,
            16,
            128 if options.tiny else 4096,
            32,
            load.max_waiting,
            residency,
            cold_attention=options.cold_attention,
        )
        engine = Engine(loaded, config, tiers)
        engine.runner.warm_up(lambda _: None)
        arena = None if engine.offloader is None else engine.offloader.host
        while arena is not None and arena.num_for_device < arena.num_slots:
            time.sleep(0.1)  # DRAM is pinned in the background
        result = run(engine, load)
        engine.close()
        row = result.row(name)
        if loaded.dtype is torch.float32:
            found = result.answers.items()
            others = [number for number, mine in found if answers.setdefault(number, mine) != mine]
            row["answered_otherwise"] = len(others)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
