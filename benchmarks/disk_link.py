"""DISK save and load, compared with raw O_DIRECT with the same threads and sizes.

First only the hop between HOST and DISK, as the transfer threads run it, with checksums, records
and verification. Then end to end through the façade, including the books; there every block is also
copied between DEVICE and HOST by memcpy on the same cores, which the raw figure does not include.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from benchmarks.harness import (
    BLOCK_SIZES,
    MIB,
    Row,
    block_spec,
    compare,
    filled_arena,
    fresh_keys,
    in_threads,
    seconds_of,
    slots_up_to,
)
from benchmarks.hop import Hop
from penstock.build import build_offloader
from penstock.config import Config, DiskConfig, HostConfig, TransferConfig
from penstock.stores.disk import DiskStore
from penstock.stores.host import HostArena
from penstock.types import Slot, Tier

TOTAL_BYTES = 512 * MIB
THREADS = 4


def run(directory: Path) -> Iterator[Row]:
    for label, block_bytes in BLOCK_SIZES.items():
        folder = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=directory))
        try:
            yield from _measure(label, block_bytes, folder)
        finally:
            shutil.rmtree(folder)


def _measure(label: str, block_bytes: int, folder: Path) -> Iterator[Row]:
    spec = block_spec(block_bytes)
    num = TOTAL_BYTES // spec.stride_bytes
    device, raw_memory = filled_arena(spec, num), filled_arena(spec, num)
    slots = slots_up_to(num)
    descriptor = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(descriptor, 0, num * spec.stride_bytes)
    config = Config(
        HostConfig(size_bytes=2 * num * spec.stride_bytes),
        # Room for exactly one round: from the second round on, every save overwrites. LRU, so
        # that DISK always holds the whole of the newest round.
        DiskConfig(
            path=str(folder / "store"),
            size_bytes=num * (spec.stride_bytes + 256) + 64 * 1024,
            threads=THREADS,
            policy="lru",
        ),
        TransferConfig(max_pending_save_bytes=2 * TOTAL_BYTES),
    )

    def raw_write() -> float:
        return in_threads(THREADS, lambda i: _raw_share(descriptor, raw_memory, i, os.pwritev))

    def raw_read() -> float:
        return in_threads(THREADS, lambda i: _raw_share(descriptor, raw_memory, i, os.preadv))

    limit = f"raw O_DIRECT, {THREADS} threads"
    size = num * block_bytes
    cap_bytes = device.num_slots * (spec.stride_bytes + 256) + 64 * 1024
    with Hop(DiskStore(folder / "hop", spec, cap_bytes), device, Tier.DISK, THREADS) as hop:
        yield compare(f"DISK save, {label}", size, hop.save, raw_write, limit)
        yield compare(f"DISK load, {label}", size, hop.load, raw_read, limit)
    with build_offloader(config, spec, device) as offloader:
        offloader.recover()
        rounds = count()
        saved: list[list] = []

        def save() -> float:
            keys = fresh_keys(num, next(rounds))
            saved[:] = [keys]

            def work() -> None:
                offloader.save(keys, slots)
                assert offloader.drain()

            seconds = seconds_of(work)
            offloader.empty_host()
            assert offloader.match(keys).num_blocks == num, "not all blocks were written"
            return seconds

        def load() -> float:
            offloader.empty_host()
            results = []
            seconds = seconds_of(
                lambda: results.extend(offloader.wait([offloader.load(saved[0], slots)]))
            )
            assert results[0].ok
            return seconds

        yield compare(f"DISK save end to end, {label}", size, save, raw_write, limit, aim="")
        yield compare(f"DISK load end to end, {label}", size, load, raw_read, limit, aim="")
    os.close(descriptor)


def _raw_share(descriptor: int, memory: HostArena, thread: int, move) -> None:
    for slot in range(thread, memory.num_slots, THREADS):
        move(descriptor, [memory.view(Slot(slot))], slot * memory.stride_bytes)
