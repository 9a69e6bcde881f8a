"""Saves blocks through the whole façade at full speed until it is killed. Run by test_crash.

    python crash_child.py DIRECTORY CAP_BYTES RUN

Prints one line for every block that DISK offers ("+ number") or gives up ("- number").
"""

from __future__ import annotations

import os
import sys
from itertools import count

from penstock.build import build_offloader
from penstock.config import Config, DiskConfig, HostConfig
from penstock.events import Event, Removed, Stored
from penstock.stores.host import HostArena
from penstock.types import BlockKey, BlockSpec, Slot, Tier

BLOCK_BYTES = 64 << 10
SPEC = BlockSpec(bytes(range(32)), BLOCK_BYTES, 16)
NUM_DEVICE_SLOTS = 32


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(8, "little") * 4)


def content_of(key: BlockKey) -> bytes:
    return key * (BLOCK_BYTES // len(key))


def config(directory: str, cap_bytes: int) -> Config:
    return Config(
        HostConfig(size_bytes=64 * BLOCK_BYTES),
        DiskConfig(path=directory, size_bytes=cap_bytes, threads=2),
    )


def report(event: Event) -> None:
    """Straight to the pipe: what was written there survives the kill."""
    if isinstance(event, Stored | Removed) and event.tier is Tier.DISK:
        sign = "+" if isinstance(event, Stored) else "-"
        lines = (f"{sign} {int.from_bytes(key[:8], 'little')}\n" for key in event.keys)
        os.write(1, "".join(lines).encode())


def main(directory: str, cap_bytes: int, run: int) -> None:
    device = HostArena(SPEC, NUM_DEVICE_SLOTS * BLOCK_BYTES)
    offloader = build_offloader(config(directory, cap_bytes), SPEC, device, observers=[report])
    offloader.recover()
    slots = [Slot(i) for i in range(NUM_DEVICE_SLOTS // 2)]
    for batch in count():
        keys = [key_of(run * 1_000_000 + batch * len(slots) + slot) for slot in slots]
        for key, slot in zip(keys, slots, strict=True):
            device.view(slot)[:BLOCK_BYTES] = content_of(key)
        offloader.wait([offloader.save(keys, slots)])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
