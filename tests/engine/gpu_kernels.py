"""Compiles the project's Triton kernels for an H100 or H200 (sm_90), without a GPU.

Run as a program, without TRITON_INTERPRET: the interpreter accepts what the compiler does not, for
example a float constexpr as a condition. The project's own functions launch the kernels, with
the shapes of real models; each launch compiles and does nothing else. Prints a line per kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from penstock.codecs import lossless_triton
from penstock.codecs.lossless_format import LosslessFormat, fit_lossless
from penstock.engine import elementwise
from penstock.engine.anywhere.placing_triton import place_tokens
from penstock.engine.attention import bring_triton, cold_triton
from penstock.engine.attention import packed_triton as packed
from penstock.engine.attention import triton as kernels
from penstock.engine.attention.halves_triton import merge
from penstock.engine.attention.rules import CAUSAL, LayerRules
from penstock.engine.attention.scattered_triton import attend_scattered
from penstock.engine.decode_plan import DecodePlan, PartRoom
from penstock.engine.drawing_triton import pick_rows
from penstock.transfer.cuda_stage import CopyStage
from penstock.transfer.paged import PagedMemory, PageStretch

CPU = torch.device("cpu")
MAX_SHARED_BYTES = 227 << 10  # that one program may have on sm_90
ADDRESS = 0x7F00_0000_0000  # of pinned DRAM: beyond 32 bits, as addresses are
ROWS = 4
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """What a model's kernels are compiled for."""

    heads: int
    kv_heads: int
    dim: int
    rules: tuple[LayerRules, ...] = (CAUSAL,)
    dtype: torch.dtype = BF16
    is_fp8: bool = False
    block_tokens: int = 16

    @property
    def layer_bytes(self) -> int:
        return 2 * self.block_tokens * self.kv_heads * self.dim * (1 if self.is_fp8 else 2)

    def tokens(self, heads: int) -> torch.Tensor:
        return torch.zeros(ROWS, heads, self.dim, dtype=self.dtype)


LLAMA = Shape(32, 8, 128)  # Llama 3.1 8B
SHAPES = {
    "llama": LLAMA,
    "llama, fp8": Shape(32, 8, 128, is_fp8=True),
    "smollm2, float32": Shape(9, 3, 64, dtype=torch.float32),
    "gpt-oss": Shape(64, 8, 64, tuple(LayerRules(w, 0.0, torch.zeros(64)) for w in (128, 0))),
    "gemma 2": Shape(16, 8, 256, (LayerRules(4096, 50.0), LayerRules(0, 50.0))),
    # Keys of 192, and values of 128 padded to that.
    "deepseek v3": Shape(128, 128, 192),
}


class NoGpu:
    """Triton's driver, as far as compiling asks."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_only(report: Callable[[str, int, float], None]) -> None:
    """From now on a launch compiles its kernel for sm_90. Nothing runs."""
    driver.set_active(NoGpu())
    run = JITFunction.run

    def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        started = time.perf_counter()
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        report(
            f"{self.__module__}.{self.__name__}",
            compiled.metadata.shared,
            time.perf_counter() - started,
        )
        return compiled

    JITFunction.run = compile_it
    # As on an H100: it converts e4m3 itself.
    for module in (kernels, elementwise):
        module.fp8_mode = lambda _, *, is_fp8: "native" if is_fp8 else ""  # type: ignore[attr-defined]


def compile_attention(shape: Shape) -> None:
    kv_heads, dim, block_tokens = shape.kv_heads, shape.dim, shape.block_tokens
    fp8 = {"is_fp8": shape.is_fp8}
    query, new = shape.tokens(shape.heads), shape.tokens(kv_heads)
    plan = DecodePlan(ROWS, 64, block_tokens, kernels.PART_TOKENS, CPU, 8)
    room = PartRoom.make(8, shape.heads, dim, CPU)
    for rules in shape.rules:
        numbers = (shape.layer_bytes, 0.1, kv_heads, block_tokens, 528)
        kernels.attend_wave(query, plan, room, *numbers, 0, ADDRESS, rules, **fp8)
        kernels.merge_parts(query, plan, room, rules)
        if not shape.is_fp8:
            attend_scattered(query, new, new, torch.arange(ROWS), 0.1, rules)
    kernels.store_tokens(new, new, torch.zeros(ROWS, dtype=torch.int64), 64, block_tokens, **fp8)


def compile_reads(shape: Shape) -> None:
    """What reads cold blocks: fetched for a decode step, and copied for a prompt."""
    plan = DecodePlan(ROWS, 64, shape.block_tokens, kernels.PART_TOKENS, CPU, 8)
    layer = (2, shape.block_tokens, shape.kv_heads, shape.dim)
    stored = torch.int16 if shape.is_fp8 else shape.dtype  # see `triton_runner`
    buffer = torch.zeros(8, shape.layer_bytes // stored.itemsize, dtype=stored)
    whole = torch.zeros(layer[0], ROWS, *layer[1:], dtype=shape.dtype)
    form = None if shape.is_fp8 else form_of(shape)
    for has_window in {bool(rules.window) for rules in shape.rules}:
        for is_first in (False, True) if shape is LLAMA else (False,):
            which = {"is_first": is_first, "has_window": has_window}
            kernels.fetch_layer(plan.fetched, plan.waves, 0, 64, buffer, 12, **which)
            if form is None:
                continue
            arrived = torch.zeros(8, packed.packed_layer_bytes(form, shape.layer_bytes))
            arrived = arrived.to(torch.uint8)
            at = packed.packed_at(form, shape.layer_bytes) - 1
            words = arrived.view(torch.int64)
            kernels.fetch_layer(plan.fetched, plan.waves, 0, at, words, 8, **which)
            packed.unpack_layer(arrived, plan.waves, 0, buffer, 264, form, **which)
    for layer in (0, 1):
        at, size = layer * shape.layer_bytes, shape.layer_bytes
        bring_triton.copy_blocks(
            plan.table, bring_triton.words_of(plan.table, size), at, at, size, 12
        )
        if form is not None:
            size = packed.packed_layer_bytes(form, shape.layer_bytes)
            arrived = torch.zeros(8, size, dtype=torch.uint8)
            packed_at = packed.packed_at(form, at) - 1
            words = bring_triton.words_of(arrived, size)
            bring_triton.copy_blocks(plan.table, words, packed_at, None, size, 8)
            constants = bring_triton.unpack_constants(form, shape.layer_bytes)
            bring_triton.unpack_blocks(plan.table, arrived, at, 264, constants)
    kernels.copy_layer(plan.table, shape.layer_bytes, whole, form, is_fp8=shape.is_fp8)
    num_variants = count_variants(kernels._copy_layer)
    # Layers with a window leave out the first blocks.
    kernels.copy_layer(plan.table[1:], shape.layer_bytes, whole, form, is_fp8=shape.is_fp8)
    assert count_variants(kernels._copy_layer) == num_variants


def count_variants(kernel: Any) -> int:
    """How often it was compiled. What the warm-up does not compile, a request waits for."""
    return sum(len(compiled) for compiled, *_ in kernel.device_caches.values())


def form_of(shape: Shape) -> LosslessFormat:
    form = fit_lossless([shape.layer_bytes // 2] * 8, shape.dim)
    assert form is not None
    return form


def compile_plan() -> None:
    numbers = torch.zeros(64, dtype=torch.int64)
    kernels.pull_plan(ADDRESS, numbers, 32, (32, 40, 48, 56, 60))
    kernels.push_numbers(numbers, ADDRESS, numbers)
    kernels.pull_words(ADDRESS, numbers)
    kernels.take_kept(numbers, numbers)


def compile_sampling() -> None:
    wishes = torch.zeros(ROWS, 5, dtype=torch.float64)
    for vocabulary in (128_256, 50_257):
        weights = torch.zeros(ROWS, vocabulary, dtype=torch.int64)
        pick_rows(weights, *wishes.unbind(1)[2:])


def compile_halves(shape: Shape) -> None:
    half = shape.tokens(shape.heads).transpose(0, 1)
    sums = torch.zeros(half.shape[:2])
    merge(half, sums, half, sums)


def compile_cpu_part(shape: Shape) -> None:
    """The device's side of `cold_attention`."""
    numbers = torch.zeros(64, dtype=torch.int64)
    room = PartRoom.make(8, shape.heads, shape.dim, CPU)
    cold_triton.pull_numbers(ADDRESS, numbers, ROWS)
    cold_triton.ask(shape.tokens(shape.heads), numbers, ADDRESS, ADDRESS, 0.1)
    cold_triton.await_answer(numbers, ADDRESS, ADDRESS, 5_000_000)
    cold_triton.collect(numbers, (ADDRESS,) * 3, room, ROWS, 64)


def compile_elementwise(shape: Shape, *, has_norms: bool = False) -> None:
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.dim
    x = torch.zeros(ROWS, 4096, dtype=shape.dtype)
    for residual in (None, x):
        elementwise.add_norm(x, residual, x[0], 1e-5)
    elementwise.gate(torch.zeros(ROWS, 2 * 14336, dtype=shape.dtype))
    qkv = torch.zeros(ROWS, (heads + 2 * kv_heads) * dim, dtype=shape.dtype)
    angles = torch.zeros(64, dim // 2)
    positions = torch.zeros(ROWS, dtype=torch.int64)
    norms = (x[0, :dim], x[1, :dim]) if has_norms else None
    elementwise.rotate_and_store(
        qkv,
        (angles, angles),
        positions,
        positions,
        norms,
        shape.layer_bytes,
        1e-5,
        heads,
        kv_heads,
        dim,
        shape.block_tokens,
        is_fp8=shape.is_fp8,
    )


def compile_placing(shape: Shape) -> None:
    pool = torch.zeros(2, 2, 2, shape.block_tokens, shape.kv_heads, shape.dim, dtype=shape.dtype)
    numbers = torch.zeros(ROWS, dtype=torch.int64)
    angles = torch.zeros(1, 2, shape.dim // 2)
    for is_interleaved in (False, True):
        pair = (numbers, numbers)
        place_tokens(pool, pair, pair, numbers[:2], angles, is_interleaved=is_interleaved)


def compile_transfers(shape: Shape) -> None:
    """What packs and gathers blocks before a save, and unpacks and scatters them after a load."""
    form = form_of(shape)
    numbers = torch.zeros(form.num_regions, dtype=torch.int64)
    blocks = torch.zeros(ROWS, dtype=torch.int64)
    buffer = torch.zeros(ROWS, form.packed_bytes, dtype=torch.uint8)
    lossless_triton.pack_blocks(form, numbers, numbers, blocks, buffer)
    lossless_triton.unpack_blocks(form, numbers, numbers, blocks, buffer)
    stretches = tuple(PageStretch(n << 20, 1 << 16, 1 << 16) for n in range(2))
    stage = CopyStage(PagedMemory(stretches, 4), ROWS, CPU)
    stage.gather(blocks)
    stage.scatter(blocks)


def compile_faulty() -> None:
    """A kernel with a fault that the interpreter does not see, to show that this program does."""

    @triton.jit
    def _faulty(out, CAP: triton.language.constexpr):  # noqa: N803
        if CAP:
            triton.language.store(out, CAP)

    _faulty[(1,)](torch.zeros(1), CAP=2.5)


def main(argument: str = "") -> None:
    def report(name: str, shared_bytes: int, seconds: float) -> None:
        assert shared_bytes <= MAX_SHARED_BYTES, f"{name} needs {shared_bytes} bytes shared memory"
        print(name, shared_bytes, f"{seconds:.2f}", flush=True)

    compile_only(report)
    if argument == "faulty":
        compile_faulty()
        return
    for name, shape in SHAPES.items():
        print(f"# {name}", flush=True)
        compile_attention(shape)
        if shape.dtype is BF16:
            compile_reads(shape)
    compile_plan()
    compile_sampling()
    compile_halves(LLAMA)
    compile_cpu_part(LLAMA)
    compile_elementwise(LLAMA)
    compile_elementwise(SHAPES["llama, fp8"], has_norms=True)
    compile_placing(LLAMA)
    compile_transfers(LLAMA)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
