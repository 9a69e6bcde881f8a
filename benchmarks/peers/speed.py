"""Prefill and decode speed of one engine, as JSON. `benchmarks.engine_speed` runs it per engine.

    python speed.py {penstock,transformers,vllm} MODEL_FOLDER DTYPE [--lengths 512,2048,8000]

Only the requested engine is imported. Prompts are random token ids, different each time, so that no
prefix cache helps a prefill. The time of a decode step is the slope between a long and a short
answer to the same prompts, whose KV is on the device already.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from statistics import median

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], object]

STEPS = 32
BATCHES = ((1, 512), (8, 512))


def draw(num: int, length: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    return [[rng.randrange(100, 40_000) for _ in range(length)] for _ in range(num)]


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(generate: Generate, lengths: list[int]) -> dict[str, float]:
    generate(draw(1, 64, 0), 4)  # kernels, threads, allocations
    found: dict[str, float] = {}
    for length in lengths:
        rounds = 3 if length <= 512 else 1
        found[f"prefill {length}"] = median(
            timed(lambda n=n, length=length: generate(draw(1, length, 1000 + length + n), 1))
            for n in range(rounds)
        )
    for batch, length in BATCHES:
        prompts = draw(batch, length, 7 + batch)
        generate(prompts, 1)
        slopes = []
        for _ in range(3):
            short = timed(lambda prompts=prompts: generate(prompts, 1))
            long = timed(lambda prompts=prompts: generate(prompts, 1 + STEPS))
            slopes.append((long - short) / STEPS)
        found[f"decode {batch}x{length}"] = median(slopes)
    return found


def penstock(folder: str, dtype: str) -> Generate:
    from penstock import LLM, SamplingParams

    llm = LLM(folder, dtype=dtype, kv_offloading_size=0, device_kv_gib=1)

    def generate(prompts: Prompts, num: int) -> object:
        return llm.generate(prompts, SamplingParams(temperature=0, max_tokens=num, ignore_eos=True))

    return generate


def vllm(folder: str, dtype: str) -> Generate:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype=dtype, max_model_len=8192, enable_prefix_caching=True)

    def generate(prompts: Prompts, num: int) -> object:
        params = SamplingParams(temperature=0, max_tokens=num, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return llm.generate(asked, params, use_tqdm=False)

    return generate


def transformers(folder: str, dtype: str) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    caches: dict[str, object] = {}  # the KV of the last prompts, so that only decode is repeated

    def generate(prompts: Prompts, num: int) -> object:
        name = repr(prompts)
        with torch.inference_mode():
            if name not in caches:
                caches.clear()
                output = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
                caches[name] = (output.past_key_values, output.logits[:, -1:].argmax(-1))
            cache, token = caches[name]
            for _ in range(num - 1):
                output = model(token, past_key_values=cache, use_cache=True)
                token = output.logits[:, -1:].argmax(-1)
            if num > 1:
                cache.crop(-(num - 1))
        return token

    return generate


ENGINES = {"penstock": penstock, "transformers": transformers, "vllm": vllm}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("folder")
    parser.add_argument("dtype")
    parser.add_argument("--lengths", default="512,2048,8000")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    generate = ENGINES[options.engine](options.folder, options.dtype)
    print("RESULT " + json.dumps(measure(generate, lengths)), flush=True)


if __name__ == "__main__":
    main()
