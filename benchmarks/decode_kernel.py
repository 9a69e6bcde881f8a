"""Decode attention on a GPU by how its kernel is cut, next to what the GPU's memory can deliver.

    python -m benchmarks.decode_kernel

Llama-3.1-8B's shapes in bf16: 32 layers, captured in one graph. Each row is the best and the usual
choice of tile, warps, stages and programs; `--all` prints every one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from statistics import median
from typing import Any

import numpy as np
import torch

from penstock.engine.attention import triton as kernels
from penstock.engine.attention.triton import DecodeCut
from penstock.engine.decode_plan import DecodePlan, PartRoom

LAYERS, HEADS, KV_HEADS, DIM, BLOCK_TOKENS = 32, 32, 8, 128, 16
LAYER_BYTES = 2 * BLOCK_TOKENS * KV_HEADS * DIM * 2
TOKEN_BYTES = LAYERS * LAYER_BYTES // BLOCK_TOKENS
BATCHES = ((1, 2_048), (16, 2_048), (64, 2_048), (4, 32_768))
_cuda: Any = torch.cuda


CUTS = [
    DecodeCut(*each)
    for each in itertools.product((32, 64, 128), (4, 8), (2, 3, 4), (2, 3, 4, 8))
    if each[0] * each[2] <= 256  # or they need more shared memory than there is
]


class Bench:
    def __init__(self, pool_gib: int) -> None:
        self.device = torch.device("cuda", 0)
        self.num_blocks = (pool_gib << 30) // (LAYERS * LAYER_BYTES)
        shape = (self.num_blocks, LAYERS * LAYER_BYTES // 2)
        self.pool = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        for piece in self.pool.split(256):
            piece.normal_()
        self.num_processors = _cuda.get_device_properties(self.device).multi_processor_count

    def read_gb_s(self) -> float:
        """What a kernel that only reads gets from the memory."""
        flat = self.pool.view(torch.int64).flatten()
        ms = self._ms(lambda: flat.max())
        return flat.numel() * 8 / ms / 1e6

    def step(self, batch: int, context: int) -> tuple[DecodePlan, PartRoom, torch.Tensor]:
        num = context // BLOCK_TOKENS
        plan = DecodePlan(batch, batch * num, BLOCK_TOKENS, kernels.PART_TOKENS, self.device)
        order = list(range(self.num_blocks))
        random.Random(0).shuffle(order)
        slots = np.array([order[n % len(order)] for n in range(batch * num)], np.int64)
        table = self.pool.data_ptr() + slots * (LAYERS * LAYER_BYTES)
        plan.fill(table, [num] * batch, [context] * batch)
        plan.send()
        room = PartRoom.make(plan.max_items, HEADS, DIM, self.device)
        query = torch.randn(batch, HEADS, DIM, dtype=torch.bfloat16, device=self.device)
        return plan, room, query

    def attention_ms(
        self, made: tuple[DecodePlan, PartRoom, torch.Tensor], cut: DecodeCut
    ) -> float:
        plan, room, query = made
        kernels.cut_for = lambda _: cut
        num_programs = self.num_processors * cut.programs_per_processor

        def all_layers() -> None:
            for layer in range(LAYERS):
                kernels.attend_wave(
                    query,
                    plan,
                    room,
                    layer * LAYER_BYTES,
                    DIM**-0.5,
                    KV_HEADS,
                    BLOCK_TOKENS,
                    num_programs,
                )
                kernels.merge_parts(query, plan, room)

        all_layers()
        graph = _cuda.CUDAGraph()
        with _cuda.graph(graph):
            all_layers()
        return self._ms(graph.replay)

    def _ms(self, run: Any) -> float:
        taken = []
        for _ in range(8):
            begin, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            taken.append(float(begin.elapsed_time(end)))
        return median(taken[2:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode_kernel", description=__doc__)
    parser.add_argument("--pool-gib", type=int, default=18)
    parser.add_argument("--all", action="store_true", help="print every choice")
    options = parser.parse_args()
    bench = Bench(options.pool_gib)
    limit = bench.read_gb_s()
    usual = kernels.cut_for(bench.device)
    print(json.dumps({"memory_gb_s": round(limit)}), flush=True)
    for batch, context in BATCHES:
        made = bench.step(batch, context)
        found: dict[DecodeCut, float] = {}
        for cut in [usual, *(each for each in CUTS if each != usual)]:
            try:
                found[cut] = bench.attention_ms(made, cut)
            except Exception as error:  # too much shared memory, for example
                print(json.dumps({"cut": cut._asdict(), "error": str(error)[:100]}), flush=True)
        best = min(found, key=lambda cut: found[cut])
        for cut, ms in sorted(found.items(), key=lambda each: each[1]):
            if not (options.all or cut in (best, usual)):
                continue
            rate = batch * context * TOKEN_BYTES / ms / 1e6
            row: dict[str, Any] = {"batch": batch, "context": context, **cut._asdict()}
            row |= {"ms": round(ms, 3), "gb_s": round(rate), "of_memory": round(rate / limit, 3)}
            print(json.dumps(row | {"is_usual": cut == usual}), flush=True)


if __name__ == "__main__":
    main()
