"""Tokens per second compared with transformers' offloaded cache: same model and context, on a GPU.

    python -m benchmarks.gpu_offloaded --context 32768

transformers keeps the KV of all layers but one in DRAM and loads each layer's KV at every step.
Ours keeps on the device what fits: here only the first 1,024 and last 512 tokens, then a tenth, a
half, and nine tenths of the context.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from benchmarks.gpu_decode import Bench
from benchmarks.gpu_model import BLOCK_TOKENS, Sequence
from benchmarks.harness import seconds_of

PREFIX, TAIL = 1024 // BLOCK_TOKENS, 512 // BLOCK_TOKENS
_cuda: Any = torch.cuda


def ours(bench: Bench, context: int, num_tokens: int, resident: float) -> float:
    num = -(-context // BLOCK_TOKENS)
    limit = min(bench.pool.tensor.shape[0], bench.host.num_slots)
    prefix = max(PREFIX, int(resident * num))
    places = [
        block % limit if block < prefix or block >= num - TAIL else ~(block % limit)
        for block in range(num)
    ]
    sequence = Sequence([5] * context, places)
    chunk = [sequence.last()]
    bench.runner.run(chunk)

    def work() -> None:
        for _ in range(num_tokens):
            bench.runner.run(chunk).argmax(-1).tolist()

    return num_tokens / seconds_of(work)


@torch.inference_mode()
def theirs(bench: Bench, context: int, num_tokens: int) -> float:
    from transformers import DynamicCache

    model = bench.loaded.model
    model.config._attn_implementation = "sdpa"
    cache = DynamicCache(config=model.config, offloading=True)
    shape = (1, bench.loaded.num_kv_heads, context - 1, bench.loaded.head_dim)
    for layer in range(bench.loaded.num_layers):
        key = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        cache.update(key, key.clone(), layer)
        del key
    token = torch.tensor([[5]], device="cuda")

    def work() -> None:
        for step in range(num_tokens):
            place = torch.tensor([[context - 1 + step]], device="cuda")
            out = model(input_ids=token, position_ids=place, past_key_values=cache, use_cache=True)
            out.logits[0, -1].argmax().item()

    work()
    return num_tokens / seconds_of(work)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_offloaded", description=__doc__)
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--tokens", type=int, default=8)
    options = parser.parse_args()
    bench = Bench(16.0, 16.0)
    mine = {
        share: ours(bench, options.context, options.tokens, share) for share in (0.0, 0.1, 0.5, 0.9)
    }
    try:
        other: float | None = theirs(bench, options.context, options.tokens)
    except Exception as error:
        print(f"transformers' offloaded cache failed: {error!r}")
        other = None
    for share, rate in mine.items():
        row = {"context": options.context, "resident": share, "ours": rate, "theirs": other}
        print(json.dumps(row | {"ratio": None if other is None else round(rate / other, 2)}))


if __name__ == "__main__":
    main()
