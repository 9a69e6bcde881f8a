"""A writer killed at any moment leaves a store in which every block on offer is right."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import crash_child
import pytest
from crash_child import BLOCK_BYTES, SPEC, config, content_of, key_of

from penstock.build import build_offloader
from penstock.events import Event, Stored
from penstock.stores.host import HostArena
from penstock.types import BlockKey, Slot, Tier

NUM_KILLS = 25  # of each kind
KILLS_PER_STORE = 5  # then a new directory: restarts pile up, and the roomy store never fills
# A child that nobody reads stops when its pipe is full, after some 6,500 blocks: five of them,
# however late they are killed, evict nothing.
ROOMY, TIGHT = 40_960 * BLOCK_BYTES, 200 * BLOCK_BYTES


def run_until_killed(directory: Path, cap_bytes: int, run: int, seconds: float) -> set[BlockKey]:
    """Let a child save at full speed, kill it; returns what it had committed to DISK."""
    child = subprocess.Popen(
        [sys.executable, crash_child.__file__, str(directory), str(cap_bytes), str(run)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    first = child.stdout.readline()
    time.sleep(seconds)
    child.send_signal(signal.SIGKILL)
    lines = [first, *child.stdout.read().splitlines(keepends=True)]
    child.wait(10)
    child.stdout.close()
    committed: set[BlockKey] = set()
    for line in lines:
        if line.endswith("\n"):  # the kill may have cut the last one off
            sign, number = line.split()
            (committed.add if sign == "+" else committed.discard)(key_of(int(number)))
    return committed


def load_everything(directory: Path, cap_bytes: int) -> set[BlockKey]:
    """Restart, load every block that is offered, compare each bit for bit; returns their keys."""
    offered: list[BlockKey] = []

    def listen(event: Event) -> None:
        if isinstance(event, Stored) and event.tier is Tier.DISK:
            offered.extend(event.keys)

    device = HostArena(SPEC, 64 * BLOCK_BYTES)
    with build_offloader(
        config(str(directory), cap_bytes), SPEC, device, observers=[listen]
    ) as offloader:
        assert offloader.recover(60)
        everything = list(offered)
        for start in range(0, len(everything), device.num_slots):
            keys = everything[start : start + device.num_slots]
            slots = [Slot(i) for i in range(len(keys))]
            (done,) = offloader.wait([offloader.load(keys, slots)])
            assert done.ok, "a block was on offer and could not be loaded"
            for key, slot in zip(keys, slots, strict=True):
                assert device.view(slot)[:BLOCK_BYTES] == content_of(key)
        offloader.check()
    return set(everything)


@pytest.mark.parametrize("cap_bytes", [ROOMY, TIGHT], ids=["roomy", "overwriting"])
def test_killed_while_saving_at_full_speed(tmp_path: Path, cap_bytes: int) -> None:
    rng = random.Random(cap_bytes)
    for run in range(NUM_KILLS):
        if run % KILLS_PER_STORE == 0:
            directory = tmp_path / str(run)
            committed: set[BlockKey] = set()
        committed |= run_until_killed(directory, cap_bytes, run, rng.uniform(0, 0.08))
        sizes = [path.stat() for path in directory.iterdir()]
        assert sum(stat.st_size for stat in sizes) <= cap_bytes
        assert sum(stat.st_blocks * 512 for stat in sizes) <= cap_bytes
        offered = load_everything(directory, cap_bytes)
        assert offered
        if cap_bytes == ROOMY:  # nothing was evicted, so nothing may be missing
            assert committed <= offered, "the index lost what had been committed"
