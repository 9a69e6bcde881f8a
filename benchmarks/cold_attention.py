"""The CPU's part in decode with cold KV: how fast it attends, and what whole steps gain.

    python -m benchmarks.cold_attention [--kernel-only | --steps-only] [--tiny] [--out FILE]

First the threads alone and beside a busy link, by their number, with raw and with packed blocks;
then whole decode steps with `cold_attention` device, cpu and auto. Figures are GB/s of raw KV; the
limit is one large pinned copy in the same run. `--tiny` shows on a CPU that it works.
"""

from __future__ import annotations

import argparse
import gc
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_decode import Bench
from benchmarks.gpu_model import BLOCK_TOKENS, link_bytes_per_second, random_llama
from benchmarks.harness import seconds_of
from penstock.codecs.lossless import LosslessCodec
from penstock.codecs.lossless_format import LosslessFormat, fit_lossless
from penstock.codecs.names import LOSSLESS, RAW
from penstock.config.options import COLD_AUTO, COLD_CPU, COLD_DEVICE
from penstock.engine.attention.cold_serving import WORD, load_word, store_word
from penstock.engine.cold_opening import measure_rates
from penstock.engine.cold_threads import ColdShape, ColdTasks, ColdThreads
from penstock.engine.models import LoadedModel
from penstock.engine.scheduler import Chunk
from penstock.engine.table import PACKED_MARK, BlockTable
from penstock.engine.triton_runner import TritonRunner

_cuda: Any = torch.cuda
LLAMA = ColdShape(32, 32, 8, 128, 16, 2)
TINY = ColdShape(2, 4, 2, 64, 16, 2)
STEPS = ((1, 32_768, 0.9), (1, 131_072, 0.9), (4, 32_768, 0.9), (4, 32_768, 0.1))
_RUN_BLOCKS = 32
_SAMPLES = 64  # different blocks; the others are copies of them


class Rows:
    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        self._rows.append(row)
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(shown), flush=True)
        if self._out is not None:
            self._out.write_text(json.dumps(self._rows, indent=1))


def make_blocks(
    shape: ColdShape, num_blocks: int, *, is_packed: bool, pinned: bool
) -> tuple[torch.Tensor, LosslessFormat | None]:
    """Blocks in DRAM, like KV: each channel has its own scale."""
    torch.manual_seed(0)
    size = (_SAMPLES, shape.num_layers, 2, shape.block_tokens, shape.kv_heads, shape.head_dim)
    scale = torch.randn(size[-2:]).exp()
    values = (torch.randn(size) * scale).to(torch.bfloat16)
    samples = values.view(_SAMPLES, -1).view(torch.uint8)
    form = None
    if is_packed:
        halves = [samples.shape[1] // (2 * shape.num_layers)] * (2 * shape.num_layers)
        form = fit_lossless(halves, shape.head_dim)
        assert form is not None
        codec, stride = LosslessCodec(form), -(-form.packed_bytes // 4096) * 4096
        packed = torch.zeros(_SAMPLES, stride, dtype=torch.uint8)
        for raw, target in zip(samples, packed, strict=True):
            assert codec.pack(memoryview(raw.numpy().data), target.numpy().data)
        samples = packed
    blocks = torch.empty(num_blocks, samples.shape[1], dtype=torch.uint8, pin_memory=pinned)
    for piece in blocks.split(_SAMPLES):
        piece.copy_(samples[: len(piece)])
    return blocks, form


def attend_once(threads: ColdThreads, work: ColdTasks) -> float:
    """The seconds of a step in which each layer is asked for as soon as the last one is done."""
    assert threads.is_ready()
    threads.open(work)
    started = time.perf_counter()
    for layer in range(threads.shape.num_layers):
        store_word(threads.asked_address + layer * 8 * WORD, threads.step)
        while load_word(threads.done_address + layer * 8 * WORD) < threads.step:
            time.sleep(0)
    return time.perf_counter() - started


@contextmanager
def busy_link(moved: list[int]) -> Iterator[None]:
    """Copy to the GPU all the time; `moved[0]` counts bytes."""
    size = 256 << 20
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    is_over = threading.Event()

    def copy() -> None:
        stream = _cuda.Stream()
        with _cuda.stream(stream):
            while not is_over.is_set():
                target.copy_(source, non_blocking=True)
                stream.synchronize()
                moved[0] += size

    thread = threading.Thread(target=copy)
    thread.start()
    time.sleep(0.1)
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def measure_kernel(rows: Rows, shape: ColdShape, num_blocks: int, counts: list[int]) -> None:
    on_gpu = torch.cuda.is_available()
    for is_packed in (False, True):
        blocks, form = make_blocks(shape, num_blocks, is_packed=is_packed, pinned=on_gpu)
        addresses = blocks.data_ptr() + np.arange(num_blocks) * blocks.shape[1]
        addresses += PACKED_MARK if is_packed else 0
        begins = np.arange(0, num_blocks, _RUN_BLOCKS)
        ends = np.minimum(begins + _RUN_BLOCKS, num_blocks)
        tasks = np.stack([np.zeros_like(begins), begins, ends], axis=1)
        work = ColdTasks(addresses, tasks)
        num_bytes = num_blocks * shape.num_layers * shape.layer_bytes
        for count in counts:
            threads = ColdThreads(shape, 1, len(tasks), num_blocks, count, form, pinned=on_gpu)
            threads.queries.normal_().mul_(1.44 * shape.head_dim**-0.5)
            attend_once(threads, work)
            seconds = min(attend_once(threads, work) for _ in range(2))
            row: dict[str, Any] = {
                "codec": "lossless" if is_packed else "raw",
                "threads": count,
                "alone_gb_per_second": num_bytes / seconds / 1e9,
            }
            if on_gpu:
                moved = [0]
                with busy_link(moved):
                    before, started = moved[0], time.perf_counter()
                    seconds = min(attend_once(threads, work) for _ in range(2))
                    passed = time.perf_counter() - started
                    row["beside_gb_per_second"] = num_bytes / seconds / 1e9
                    row["link_gb_per_second"] = (moved[0] - before) / passed / 1e9
            rows.add(**row)
            threads.close()
        del blocks


def _step(runner: TritonRunner, chunks: list[Chunk]) -> None:
    runner.run(chunks)
    runner.wait()


def measure_steps(rows: Rows, codec: str, link: float, loaded: LoadedModel) -> None:
    """Decode steps whose sequences are cold from their beginning, with each setting."""
    bench = Bench(16.0, 16.0, codec, loaded, COLD_AUTO)
    runner = bench.runner
    cold, fetcher = runner._cold, runner._fetcher
    if cold is None or fetcher is None:
        raise SystemExit("the CPU takes no part: see the log")
    runner.run([sequence.last() for sequence in bench.sequences(1, 2048, 0.0)])
    runner.wait()
    cold.rates = measure_rates(cold.threads, bench.form, runner._seconds_without_cold())
    assert cold.rates is not None
    rows.add(codec=codec, threads=cold.threads.num_threads, rates=str(cold.rates))
    split, rates = cold._split, cold.rates
    for batch, context, share in STEPS:
        sequences = bench.sequences(batch, context, 0.0)
        num = int(share * context) // BLOCK_TOKENS
        for sequence in sequences:
            places = sequence.table.places.tolist()
            moved = [~place if index < num else place for index, place in enumerate(places)]
            sequence.table = BlockTable()
            sequence.table.extend_places(moved)
        chunks = [sequence.last() for sequence in sequences]
        cold_bytes = batch * num * bench.block_bytes
        first: torch.Tensor | None = None
        for mode in (COLD_DEVICE, COLD_CPU, COLD_AUTO):
            cold._split, cold.rates = replace(split, mode=mode), rates
            fetcher.choose_nothing()
            logits = runner.run(chunks).clone()
            runner.wait()
            again = runner.run(chunks).clone()
            runner.wait()
            first = logits if first is None else first
            if mode == COLD_CPU and not torch.equal(logits, again):
                raise SystemExit("the same split gave other logits")
            spans = cold.num_spans
            for _ in range(4):  # the rates settle
                _step(runner, chunks)
            spans = (cold.num_spans - spans) // 4
            wall = median(seconds_of(partial(_step, runner, chunks)) for _ in range(6))
            rows.add(
                codec=codec,
                batch=batch,
                context=context,
                cold=share,
                mode=mode,
                ms=wall * 1000,
                cold_gb_per_second=cold_bytes / wall / 1e9,
                of_raw_link=cold_bytes / wall / link,
                on_cpu=spans * split.span_bytes / cold_bytes,
                cpu_gb_per_second=(cold.threads.bytes_per_second() or 0.0) / 1e9,
                largest_difference=float((again - first).abs().max()),
                largest_logit=float(first.abs().max()),
            )
    bench.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_attention")
    parser.add_argument("--kernel-only", action="store_true")
    parser.add_argument("--steps-only", action="store_true")
    parser.add_argument("--codecs", default=f"{RAW},{LOSSLESS}", help="of DRAM, in steps")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--gib", type=float, default=4.0, help="DRAM for the kernel's blocks")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = Rows(options.out)
    if options.tiny:
        measure_kernel(rows, TINY, 128, [1, 2])
    else:
        num_blocks = int(options.gib * (1 << 30)) // (LLAMA.num_layers * LLAMA.layer_bytes)
        if not options.steps_only:
            measure_kernel(rows, LLAMA, num_blocks, [8, 12, 14, 15])
        if not options.kernel_only:
            link = link_bytes_per_second()
            rows.add(link_gb_per_second=link / 1e9)
            loaded = random_llama()
            for codec in options.codecs.split(","):
                measure_steps(rows, codec, link, loaded)
                gc.collect()
                _cuda.empty_cache()


if __name__ == "__main__":
    main()
