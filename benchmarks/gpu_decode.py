"""Decode on a GPU with part of the KV in DRAM, read in place; Llama-3.1-8B's shapes, bf16.

    python -m benchmarks.gpu_decode [--longest 32768] [--codecs raw,lossless]

Each figure has its limit: without cold blocks, a step of vLLM 0.26 with CUDA graphs on an H200
(5.05, 6.0 and 9.0 ms at batch 1, 16 and 64, 2,048 tokens); with cold blocks, the time of one large
pinned copy over the same link in the same run. First, logits are checked to be the same, bit for
bit, whichever blocks are cold. Contexts too long for any GPU repeat a smaller set of blocks, which
is still far larger than any cache. Cold bytes are those of raw KV: packed without loss, fewer cross
the link, and their rate can be higher than that of the copy.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_model import BLOCK_TOKENS, Sequence, link_bytes_per_second, random_llama
from benchmarks.harness import seconds_of
from penstock.codecs.lossless_format import fit_lossless
from penstock.codecs.names import LOSSLESS, RAW
from penstock.config.options import COLD_DEVICE
from penstock.engine.models import LoadedModel
from penstock.engine.runner import PackedRow
from penstock.engine.triton_runner import TritonRunner
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.transfer.cuda_stage import LosslessStage
from penstock.transfer.paged import PagedMemory, PageStretch
from penstock.transfer.pinning import PinnedSlots
from penstock.types import BlockSpec, Slot

VLLM_MS = {1: 5.05, 16: 6.0, 64: 9.0}
SHARES = (0.0, 0.1, 0.5, 0.9)
_cuda: Any = torch.cuda


class Bench:
    def __init__(
        self,
        pool_gib: float,
        host_gib: float,
        codec: str = RAW,
        loaded: LoadedModel | None = None,
        cold_attention: str = COLD_DEVICE,
    ) -> None:
        self.loaded = loaded or random_llama()
        shape = (self.loaded.num_layers, BLOCK_TOKENS, self.loaded.num_kv_heads)
        self.block_bytes = 2 << 20
        num_blocks = int(pool_gib * (1 << 30)) // self.block_bytes
        self.pool = DevicePool(num_blocks, *shape, self.loaded.head_dim, torch.bfloat16, "cuda")
        assert self.pool.block_bytes == self.block_bytes
        # Like KV: each channel has its own scale.
        torch.manual_seed(0)
        scale = torch.randn(*shape[2:], self.loaded.head_dim, device="cuda").exp()
        for piece in self.pool.tensor.split(256):
            piece.normal_().mul_(scale)
        self.form = None
        if codec == LOSSLESS:
            halves = [self.block_bytes // (2 * shape[0])] * (2 * shape[0])
            self.form = fit_lossless(halves, self.loaded.head_dim)
            assert self.form is not None
        held_bytes = self.block_bytes if self.form is None else self.form.packed_bytes
        spec = BlockSpec(bytes(32), held_bytes, BLOCK_TOKENS)
        num_slots = min(num_blocks, int(host_gib * (1 << 30)) // self.block_bytes)
        self.host = HostArena(spec, num_slots * spec.stride_bytes)
        self._pins = PinnedSlots(self.host, torch.device("cuda", 0))
        self._pins.start()
        self._pins.wait_for([Slot(self.host.num_slots - 1)])
        self._fill_host()
        self.runner = TritonRunner(
            self.loaded,
            self.pool,
            BLOCK_TOKENS,
            self.host,
            max_num_seqs=64,
            host_form=self.form,
            cold_attention=cold_attention,
        )

    def close(self) -> None:
        self.runner.close()
        self._pins.close()

    def _fill_host(self) -> None:
        """Copy each block of the device to the block with the same number in HOST."""
        flat = torch.frombuffer(self.host.buffer, dtype=torch.uint8)
        flat = flat.view(-1, self.host.stride_bytes)[:, : self.host.block_bytes]
        raw = self.pool.tensor.view(self.pool.tensor.shape[0], -1).view(torch.uint8)
        stage = None
        if self.form is not None:
            stretch = PageStretch(self.pool.address, self.pool.stride_bytes, self.block_bytes)
            memory = PagedMemory((stretch,), self.pool.num_slots)
            stage = LosslessStage(memory, 1, raw.device, self.form)
        for block in range(len(flat)):  # a copy must not span two pinned regions
            if stage is None:
                flat[block].copy_(raw[block], non_blocking=True)
            else:
                stage.gather(torch.tensor([block], device=raw.device))
                flat[block].copy_(stage.bytes[0], non_blocking=True)
        _cuda.synchronize()

    def sequences(self, batch: int, context: int, cold: float, seed: int = 0) -> list[Sequence]:
        """The same blocks for every share of cold blocks; only their location differs."""
        num = -(-context // BLOCK_TOKENS)
        limit = min(self.pool.tensor.shape[0], self.host.num_slots)
        self._order = random.Random(seed).sample(range(limit - batch), limit - batch)
        made = []
        for row in range(batch):
            rng = random.Random(f"{seed}-{row}")
            first = row * num  # as if each sequence had its own, as long as there are enough
            blocks = [self._order[(first + i) % len(self._order)] for i in range(num - 1)]
            is_cold = set(rng.sample(range(num - 1), min(num - 1, int(cold * num))))
            places = [~block if i in is_cold else block for i, block in enumerate(blocks)]
            places.append(limit - 1 - row)  # written to: belongs to one sequence and is never cold
            made.append(Sequence([5] * context, places))
        return made

    def cold_bytes(self, sequences: list[Sequence]) -> int:
        """Bytes that a step reads over the link; what several parts of a wave read counts once."""
        reads = self.runner._reads([sequence.last() for sequence in sequences])
        return len(reads.fetches.sources) * self.block_bytes

    def step_ms(self, sequences: list[Sequence]) -> tuple[float, float]:
        """Wall time of a step, and the GPU's own time for it."""
        chunks = [sequence.last() for sequence in sequences]

        def step() -> None:
            self.runner.run(chunks)
            self.runner.wait()

        step()
        rounds = max(2, min(20, int(1.0 / seconds_of(step))))
        walls = [seconds_of(step) * 1000 for _ in range(rounds)]
        if self.runner._plan.num_waves > 1:  # without a graph
            return median(walls), median(walls)
        return median(walls), median(self._replay_ms(chunks) for _ in range(rounds))

    @torch.inference_mode()
    def _replay_ms(self, chunks: list[Any]) -> float:
        graphs = self.runner._graphs
        assert graphs is not None
        size = next(size for size in graphs._sizes if size >= len(chunks))
        kind = self.runner.fill(PackedRow.of(chunks, BLOCK_TOKENS), size)
        graph, _ = graphs._captured[size, kind]
        self.runner.wait()
        begin, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def check_bits(bench: Bench, before: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Check that logits do not depend on where blocks are. Cold blocks change with every step.

    `before`: the logits of the same blocks with another codec.
    """
    graphs = bench.runner._graphs
    found = []
    for index, (batch, context) in enumerate(((1, 3000), (5, 1777))):
        first = None if before is None else before[index]
        for cold in (0.0, 0.1, 0.5, 0.9, 1.0, 0.3):
            for use_graphs in (True, False):
                bench.runner._graphs = graphs if use_graphs else None
                sequences = bench.sequences(batch, context, cold)
                chunks = [sequence.last() for sequence in sequences]
                for _ in range(5):  # from the third step on, the first layers are fetched ahead
                    logits = bench.runner.run(chunks)
                    first = logits.clone() if first is None else first
                    if not torch.equal(logits, first):
                        raise SystemExit(f"{cold:.0%} cold, graphs {use_graphs}: the logits differ")
        assert first is not None
        found.append(first)
    bench.runner._graphs = graphs
    same = "" if before is None else "those of the other codec, and "
    print(f"logits are {same}the same, bit for bit, with 0 to 100% cold, with graphs and without")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_decode", description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--longest", type=int, default=131_072)
    parser.add_argument("--pool-gib", type=float, default=16.0)
    parser.add_argument("--host-gib", type=float, default=16.0)
    parser.add_argument("--codecs", default=f"{RAW},{LOSSLESS}", help="how DRAM holds the KV")
    options = parser.parse_args()
    loaded = random_llama()
    link = link_bytes_per_second() / 1e9
    print(f"link: {link:.1f} GB/s, one pinned copy")
    rows: list[dict[str, Any]] = []

    def measure(bench: Bench, codec: str, batch: int, context: int, cold: float) -> None:
        sequences = bench.sequences(batch, context, cold)
        wall, gpu = bench.step_ms(sequences)
        cold_bytes = bench.cold_bytes(sequences)
        row: dict[str, Any] = {
            "codec": codec,
            "batch": batch,
            "context": context,
            "cold": cold,
            "ms": wall,
        }
        row["gpu_ms"] = gpu
        if cold_bytes:
            row["cold_gb_per_second"] = cold_bytes / wall / 1e6
            row["of_link"] = row["cold_gb_per_second"] / link
            row["of_link_on_gpu"] = cold_bytes / gpu / 1e6 / link
        elif context == 2048 and batch in VLLM_MS:
            row["of_vllm"] = VLLM_MS[batch] / wall
        rows.append(row)
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}))
        if options.out is not None:
            options.out.write_text(json.dumps({"link": link, "rows": rows}, indent=1))

    contexts = [length for length in (32_768, 131_072) if length <= options.longest]
    logits = None
    for codec in options.codecs.split(","):
        bench = Bench(options.pool_gib, options.host_gib, codec, loaded)
        logits = check_bits(bench, logits)
        for batch in VLLM_MS:
            measure(bench, codec, batch, 2048, 0.0)
        for context in contexts:
            for batch in (1, 4, 16):
                for cold in SHARES:
                    measure(bench, codec, batch, context, cold)
        bench.close()
        del bench
        gc.collect()
        _cuda.empty_cache()


if __name__ == "__main__":
    main()
