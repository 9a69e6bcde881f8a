"""A process that keeps KV in tiers. demo/core/main.py starts it twice.

    python demo/core/worker.py save DIRECTORY     saves conversations until it is killed
    python demo/core/worker.py load DIRECTORY     loads all of them and compares every bit

Prints events as JSON lines. Times are CLOCK_MONOTONIC, so both processes share one time axis.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import count

from blake3 import blake3

from penstock.build import build_offloader
from penstock.config import Config, DiskConfig, HostConfig
from penstock.events import Event, Recovered, TierUsage
from penstock.keys import Namespace, chain
from penstock.offload import Offloader
from penstock.shapes.sizing import PRESETS
from penstock.stores.host import HostArena
from penstock.types import BlockKey, BlockSpec, Slot, Tier

BLOCK_TOKENS = 64
BLOCKS = 48  # of one conversation: 3,072 tokens
NAMESPACE = Namespace("smollm2-135m", "demo", "bf16", "demo", BLOCK_TOKENS)
SPEC = BlockSpec(
    NAMESPACE.physical().digest(),
    PRESETS["smollm2-135m"].bytes_per_token * BLOCK_TOKENS,
    BLOCK_TOKENS,
)
HOST_BYTES, DISK_BYTES = 192 << 20, 768 << 20


def tell(what: str, **facts: object) -> None:
    print(json.dumps({"what": what, "time": time.monotonic(), **facts}), flush=True)


def conversation(number: int) -> list[BlockKey]:
    return chain(NAMESPACE, range(number * 1_000_000, number * 1_000_000 + BLOCKS * BLOCK_TOKENS))


def fill(device: HostArena, slot: Slot, key: BlockKey) -> None:
    """Stand-in for a prefill: bytes derived from the key, so that they can be checked."""
    page = blake3(key).digest(length=SPEC.block_bytes // 30)
    device.view(slot)[: SPEC.block_bytes] = page * 30


def observe(event: Event) -> None:
    if isinstance(event, TierUsage):
        tell("usage", tier=event.tier.label, used=event.num_used, slots=event.num_slots)
    elif isinstance(event, Recovered):
        tell("recovered", blocks=event.num_blocks, slots=event.num_slots)


def start(directory: str) -> tuple[Offloader, HostArena]:
    device = HostArena(SPEC, BLOCKS * SPEC.stride_bytes)
    config = Config(
        HostConfig(size_bytes=HOST_BYTES), DiskConfig(path=directory, size_bytes=DISK_BYTES)
    )
    return build_offloader(config, SPEC, device, observers=[observe]), device


def save(directory: str) -> None:
    offloader, device = start(directory)
    slots = [Slot(i) for i in range(BLOCKS)]
    for number in count():
        keys = conversation(number)
        for key, slot in zip(keys, slots, strict=True):
            fill(device, slot, key)
        started = time.monotonic()
        (done,) = offloader.wait([offloader.save(keys, slots)])
        tell("saved", number=number, blocks=BLOCKS, ok=done.ok, seconds=time.monotonic() - started)
        while not offloader.drain(0.005):
            pass
        tell("spilled", number=number)


def load(directory: str) -> None:
    offloader, device = start(directory)
    expected = HostArena(SPEC, SPEC.stride_bytes)
    slots = [Slot(i) for i in range(BLOCKS)]
    offloader.recover()
    for source in ("disk", "host"):
        for number in count():
            keys = conversation(number)
            match = offloader.match(keys)
            if not match.num_blocks:
                break
            if source == "host" and match.num_from(Tier.HOST) < BLOCKS:
                continue
            for slot in slots:
                device.view(slot)[:] = bytes(SPEC.stride_bytes)
            wanted = keys[: match.num_blocks]
            started = time.monotonic()
            (done,) = offloader.wait([offloader.load(wanted, slots[: len(wanted)])])
            seconds = time.monotonic() - started
            num_right = 0
            for key, slot in zip(wanted, slots, strict=False):
                fill(expected, Slot(0), key)
                num_right += device.view(slot) == expected.view(Slot(0))
            tell(
                "loaded",
                number=number,
                blocks=len(wanted),
                right=num_right if done.ok else 0,
                source=source,
                seconds=seconds,
            )
    offloader.check()
    offloader.close()


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](sys.argv[2])
