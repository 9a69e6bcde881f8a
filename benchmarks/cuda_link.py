"""HOST to and from a GPU through the façade, against one large copy of pinned memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import torch

from benchmarks.harness import Row, compare, fresh_keys, seconds_of
from penstock.build import build_offloader
from penstock.config import Config, HostConfig
from penstock.stores.device import DevicePool
from penstock.transfer.cuda import CopyAll, CudaMover, best_copy, copy_each
from penstock.types import BlockSpec, Done, Slot

NUM_BLOCKS = 1024
BLOCK_BYTES = 2 << 20


def run(_: Path) -> Iterator[Row]:
    if not torch.cuda.is_available():
        return
    for name, copy_all in (("one batch", best_copy()), ("a call a block", copy_each)):
        yield from _measure(name, copy_all)


def _measure(name: str, copy_all: CopyAll) -> Iterator[Row]:
    # A block of Llama-3.1-8B: 32 layers, keys and values, 16 tokens, 8 heads of 128, bf16.
    device = DevicePool(2 * NUM_BLOCKS, 32, 16, 8, 128, torch.bfloat16, "cuda")
    device.tensor.normal_()
    spec = BlockSpec(bytes(32), BLOCK_BYTES, 16)
    size = NUM_BLOCKS * BLOCK_BYTES
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
    rounds = count()
    rng = random.Random(0)
    with build_offloader(
        Config(HostConfig(size_bytes=3 * size)),
        spec,
        device,
        device_mover=partial(CudaMover, device, copy_all=copy_all),
    ) as offloader:
        keys = fresh_keys(NUM_BLOCKS, next(rounds))

        def places() -> list[Slot]:
            return [Slot(slot) for slot in rng.sample(range(2 * NUM_BLOCKS), NUM_BLOCKS)]

        def save() -> float:
            nonlocal keys
            keys = fresh_keys(NUM_BLOCKS, next(rounds))
            slots = places()
            return seconds_of(lambda: _whole(offloader.wait([offloader.save(keys, slots)])))

        def load() -> float:
            slots = places()
            return seconds_of(lambda: _whole(offloader.wait([offloader.load(keys, slots)])))

        def to_host() -> float:
            return _copy(pinned, on_gpu)

        def to_gpu() -> float:
            return _copy(on_gpu, pinned)

        for what, ours, limit in (("save", save, to_host), ("load", load, to_gpu)):
            title = f"GPU {what}, {NUM_BLOCKS} x 2 MiB, {name}"
            row = compare(title, size, ours, limit, "one pinned copy")
            if row.ratio is not None and row.ratio > 1.05:
                raise SystemExit(f"{title}: {row.ours:.0f} GB/s is more than the link carries")
            yield row


def _whole(dones: list[Done]) -> None:
    if not all(done.ok for done in dones):
        raise SystemExit("blocks were lost: what was timed is not what was asked")


def _copy(target: torch.Tensor, source: torch.Tensor) -> float:
    def work() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return seconds_of(work)
