"""HOST save and load through the façade, compared with memcpy with the same threads and blocks."""

from __future__ import annotations

import ctypes
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
from penstock.build import build_offloader
from penstock.config import Config, HostConfig, TransferConfig
from penstock.stores.host import HostArena

TOTAL_BYTES = 512 * MIB
THREADS = 2


def run(directory: Path) -> Iterator[Row]:
    for label, block_bytes in BLOCK_SIZES.items():
        yield from _measure(label, block_bytes, verify=False)
    yield from _measure("1.4 MiB", BLOCK_SIZES["1.4 MiB"], verify=True)


def _measure(label: str, block_bytes: int, *, verify: bool) -> Iterator[Row]:
    spec = block_spec(block_bytes)
    num = TOTAL_BYTES // spec.stride_bytes
    device, other = filled_arena(spec, num), filled_arena(spec, num)
    slots = slots_up_to(num)
    config = Config(
        HostConfig(size_bytes=num * spec.stride_bytes, verify=verify, policy="lru"),
        transfer=TransferConfig(copy_threads=THREADS, max_pending_save_bytes=2 * TOTAL_BYTES),
    )
    with build_offloader(config, spec, device) as offloader:
        rounds = count()
        saved: list[list] = []

        def save() -> float:
            keys = fresh_keys(num, next(rounds))
            saved[:] = [keys]
            seconds = seconds_of(lambda: offloader.wait([offloader.save(keys, slots)]))
            assert offloader.match(keys).num_blocks == num
            return seconds

        def load() -> float:
            results = []
            seconds = seconds_of(
                lambda: results.extend(offloader.wait([offloader.load(saved[0], slots)]))
            )
            assert results[0].ok
            return seconds

        def memcpy() -> float:
            return in_threads(THREADS, lambda i: _copy_share(device, other, i))

        checked = ", verifying checksums" if verify else ""
        name = f"memcpy, {THREADS} threads"
        aim = "" if verify else "≥ 0.9"
        size = num * block_bytes
        yield compare(f"HOST save, {label}{checked}", size, save, memcpy, name, aim=aim)
        yield compare(f"HOST load, {label}{checked}", size, load, memcpy, name, aim=aim)


def _copy_share(source: HostArena, target: HostArena, thread: int) -> None:
    for slot in range(thread, source.num_slots, THREADS):
        offset = slot * source.stride_bytes
        ctypes.memmove(target.address + offset, source.address + offset, source.block_bytes)
