"""Copies between HOST and a GPU through the façade, compared with one large pinned copy.

Blocks are scattered over the pool and moved in tickets the size of a prompt, in one direction and
in both at once: as they are, and packed without loss on the GPU. All rates are those of raw KV.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row, compare, fresh_keys, seconds_of
from penstock.build import build_offloader, tier_codecs
from penstock.codecs.names import LOSSLESS, RAW
from penstock.config import Config, HostConfig
from penstock.engine.parts import block_values
from penstock.stores.device import DevicePool
from penstock.transfer.cuda import CudaMover
from penstock.transfer.cuda_link import CopyAll, best_copy, copy_each
from penstock.types import BlockSpec, Done, Slot

# [layers, tokens, kv_heads, head_dim] of a block: SmolLM2-135M at 16 and 64 tokens, Llama-3.1-8B.
SHAPES = {
    "0.36 MiB": (30, 16, 3, 64),
    "1.4 MiB": (30, 64, 3, 64),
    "2 MiB": (32, 16, 8, 128),
}
TOTAL_BYTES = 4 << 30
AIMS = {RAW: ("≥ 0.95", "≥ 0.9"), LOSSLESS: ("≥ 1.26", "≥ 1.2")}
PROMPT_BYTES = 256 << 20  # Llama-3.1-8B: 2,048 tokens
_cuda: Any = torch.cuda


def run(_: Path) -> Iterator[Row]:
    if not _cuda.is_available():
        return
    for label in SHAPES:
        yield from _measure(label, "one batch", best_copy())
        yield from _measure(label, "one batch", best_copy(), LOSSLESS)
    yield from _measure("2 MiB", "one call per block", copy_each)


def _measure(label: str, how: str, copy_all: CopyAll, codec: str = RAW) -> Iterator[Row]:
    layers, tokens, kv_heads, head_dim = SHAPES[label]
    block_bytes = 2 * layers * tokens * kv_heads * head_dim * 2
    num = TOTAL_BYTES // block_bytes
    per_prompt = PROMPT_BYTES // block_bytes
    device = DevicePool(3 * num, layers, tokens, kv_heads, head_dim, torch.bfloat16, "cuda")
    # Like KV: each channel has its own scale. Filled in pieces, because it takes most of the GPU.
    scale = torch.randn(kv_heads, head_dim, device="cuda").exp()
    for piece in device.tensor.split(256):
        piece.normal_().mul_(scale)
    size = num * block_bytes
    pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    on_gpu = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [_cuda.Stream(), _cuda.Stream()]
    rounds = count()
    rng = random.Random(0)
    # The policy keeps the blocks saved last, which are loaded next.
    config = Config(HostConfig(size_bytes=4 * size, policy="lru", codec=codec))
    values = block_values("bfloat16", layers, tokens, kv_heads, head_dim, on_gpu=True)
    with build_offloader(
        config,
        BlockSpec(bytes(32), block_bytes, tokens),
        device,
        codecs=tier_codecs(config, values),
        device_mover=partial(CudaMover, device, copy_all=copy_all),
    ) as offloader:
        keys = fresh_keys(num, next(rounds))

        def places() -> list[Slot]:
            """Distinct slots, so that loads do not overwrite blocks that are being saved."""
            return [Slot(slot) for slot in rng.sample(range(3 * num), 2 * num)]

        def move(*, saves: bool, loads: bool) -> float:
            nonlocal keys
            old, slots = keys, places()
            sources, targets = slots[:num], slots[num:]
            if saves:
                keys = fresh_keys(num, next(rounds))

            def work() -> None:
                tickets = []
                for start in range(0, num, per_prompt):
                    prompt = slice(start, start + per_prompt)
                    if loads:  # first, because saves may evict these blocks
                        tickets.append(offloader.load(old[prompt], targets[prompt]))
                    if saves:
                        tickets.append(offloader.save(keys[prompt], sources[prompt]))
                _whole(offloader.wait(tickets))

            return seconds_of(work)

        def raw(*, saves: bool, loads: bool) -> float:
            def work() -> None:
                for stream, wanted, pair in zip(
                    streams,
                    (saves, loads),
                    ((pinned[0], on_gpu[0]), (on_gpu[1], pinned[1])),
                    strict=True,
                ):
                    if wanted:
                        with _cuda.stream(stream):
                            pair[0].copy_(pair[1], non_blocking=True)
                _cuda.synchronize()

            return seconds_of(work)

        move(saves=True, loads=False)
        for what, saves, loads, aim in (
            ("save", True, False, AIMS[codec][0]),
            ("load", False, True, AIMS[codec][0]),
            ("save and load at once", True, True, AIMS[codec][1]),
        ):
            if how != "one batch" and saves and loads:
                continue
            title = f"GPU {what}, {num} x {label}, {how if codec == RAW else codec}"
            ours: Callable[[], float] = partial(move, saves=saves, loads=loads)
            limit: Callable[[], float] = partial(raw, saves=saves, loads=loads)
            moved = size * (saves + loads)
            row = compare(title, moved, ours, limit, "one pinned copy each way", aim=aim)
            yield row
            most = 1.1 if saves and loads else 1.05  # both ways, the limit itself varies by 5%
            if codec == RAW and row.ratio is not None and row.ratio > most:
                raise SystemExit(f"{title}: {row.ours:.0f} GB/s is more than the link can carry")


def _whole(dones: list[Done]) -> None:
    if not all(done.ok for done in dones):
        raise SystemExit("blocks were lost: the measured time is not that of all blocks")
