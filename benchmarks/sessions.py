"""Long sessions on a device pool that holds few of them: who gets in, and how fast tokens come.

    python -m benchmarks.sessions                       a GPU: Llama-3.1-8B's shapes, 28,000 tokens
    python -m benchmarks.sessions --tiny                a CPU: a small model, the same proportions

Sessions share a template, come at a given rate (the peak of a month's end), and each asks for some
tokens. A pool for 2.8 of them, DRAM for the rest. Three systems see the same arrivals: the device
alone; naive residency, which lets the oldest blocks of anybody go, whatever they are; and prefix,
tail and budget. A session that finds the queue full is turned away. Answers of all three are
compared with each other.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu_model import random_llama
from penstock.config import Config, HostConfig
from penstock.engine.admission import Busy, TooLong
from penstock.engine.engine import Engine, EngineConfig
from penstock.engine.params import SamplingParams
from penstock.engine.residency import ResidencyConfig


@dataclass
class Load:
    session_tokens: int
    template_tokens: int
    output_tokens: int
    num_sessions: int
    per_second: float
    pool_sessions: float = 2.8
    max_waiting: int = 2


@dataclass
class Result:
    num_admitted: int = 0
    num_rejected: int = 0
    most_at_once: int = 0
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
            "seconds": round(self.seconds, 1),
        }


def run(engine: Engine, load: Load) -> Result:
    rng = random.Random(0)
    result = Result()
    template = [rng.randrange(5, 90) for _ in range(load.template_tokens)]
    arrivals, at = [], 0.0
    for number in range(load.num_sessions):
        own = random.Random(number)
        rest = load.session_tokens - load.template_tokens - load.output_tokens
        arrivals.append((at, template + [own.randrange(5, 90) for _ in range(rest)]))
        at += rng.expovariate(load.per_second)
    params = SamplingParams(temperature=0.0, max_tokens=load.output_tokens, ignore_eos=True)
    started = time.monotonic()
    last_token: dict[str, float] = {}
    came: dict[str, float] = {}
    waiting = list(enumerate(arrivals))
    while waiting or engine.has_work:
        now = time.monotonic() - started
        while waiting and waiting[0][1][0] <= now:
            number, (_, prompt) = waiting.pop(0)
            try:
                engine.add(str(number), prompt, params)
                came[str(number)] = time.monotonic()
                result.num_admitted += 1
            except (Busy, TooLong):
                result.num_rejected += 1
        if not engine.has_work:
            time.sleep(max(0.0, min(0.01, waiting[0][1][0] - now)))
            continue
        for progress in engine.step():
            request, then = progress.request, time.monotonic()
            before = last_token.get(request.id)
            if before is None:
                result.first_token_seconds.append(then - came[request.id])
            else:
                result.token_seconds.append(then - before)
            last_token[request.id] = then
            result.answers[int(request.id)] = list(request.output_ids)
        result.most_at_once = max(result.most_at_once, engine.scheduler.num_running)
    result.seconds = time.monotonic() - started
    engine.check()
    return result


def systems(load: Load) -> dict[str, tuple[ResidencyConfig, bool]]:
    budget = int(load.pool_sessions * load.session_tokens / 8)
    return {
        "device alone": (ResidencyConfig(cold=False), False),
        "naive": (ResidencyConfig(prefix_tokens=0, tail_tokens=0), True),
        "prefix, tail and budget": (
            ResidencyConfig(
                prefix_tokens=load.template_tokens,
                tail_tokens=max(32, load.session_tokens // 56),
                session_tokens=budget,
            ),
            True,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sessions", description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--per-second", type=float, default=0.5)
    parser.add_argument("--host-gib", type=float, default=48.0)
    options = parser.parse_args()
    if options.tiny:
        load = Load(448, 64, 32, options.sessions, 4 * options.per_second)
        loaded = random_llama(
            "cpu",
            num_hidden_layers=3,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=100,
            max_position_embeddings=16384,
        )
        loaded.model.float()
        loaded = type(loaded)(**{**_fields(loaded), "dtype": torch.float32})
    else:
        load = Load(28_000, 3_800, 200, options.sessions, options.per_second)
        loaded = random_llama("cuda")
    words = {f"w{i}": i for i in range(100)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), unk_token="w0"
    )
    loaded = type(loaded)(**{**_fields(loaded), "tokenizer": tokenizer})
    token_bytes = 2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim
    token_bytes *= loaded.dtype.itemsize
    pool_bytes = int(load.pool_sessions * load.session_tokens * token_bytes)
    answers: dict[int, list[int]] = {}
    for name, (residency, has_host) in systems(load).items():
        tiers = None
        if has_host:
            host = 64 << 20 if options.tiny else int(options.host_gib * (1 << 30))
            tiers = Config(HostConfig(size_bytes=host))
        config = EngineConfig(
            pool_bytes,
            16,
            128 if options.tiny else 4096,
            32,
            load.max_waiting,
            residency,
        )
        engine = Engine(loaded, config, tiers)
        engine.runner.warm_up(lambda _: None)
        result = run(engine, load)
        engine.close()
        for number, answer in result.answers.items():
            same = answers.setdefault(number, answer) == answer
            if not same:
                print(f"session {number}: {name} answered otherwise")
        print(json.dumps(result.row(name)), flush=True)


def _fields(loaded: Any) -> dict[str, Any]:
    return {name: getattr(loaded, name) for name in loaded.__dataclass_fields__}


if __name__ == "__main__":
    main()
