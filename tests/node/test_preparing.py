"""DRAM is allocated in the background, without harm to what is there."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from penstock.node import preparing
from penstock.node.preparing import Preparation, available_memory
from penstock.stores.host import HostMemory
from penstock.units import MiB
from tests.node.node_process import wait_until


def test_all_of_it_is_allocated_and_what_is_there_stays() -> None:
    memory = HostMemory(130 * MiB, huge_pages=True, numa_node=None)
    with mmap.mmap(memory.file, memory.num_bytes, flags=mmap.MAP_SHARED) as other:
        other[100 * MiB : 100 * MiB + 5] = b"block"
        preparation = Preparation(memory)
        wait_until(lambda: not preparation.is_running, "it does not end")
        assert preparation.num_bytes == memory.num_bytes
        assert other[100 * MiB : 100 * MiB + 5] == b"block"
    preparation.stop()
    memory.close()


def test_it_waits_for_memory_and_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_PAUSE_SECONDS", 0.01)
    available = 0
    monkeypatch.setattr(preparing, "available_memory", lambda: available)
    memory = HostMemory(4 * MiB, huge_pages=False, numa_node=None)
    preparation = Preparation(memory)
    assert preparation.is_running
    assert preparation.num_bytes == 0
    available = 1 << 40
    wait_until(lambda: preparation.num_bytes == memory.num_bytes, "it does not go on")
    available = 0
    stuck = Preparation(memory)
    stuck.stop()
    assert not stuck.is_running
    assert stuck.num_bytes == 0
    memory.close()


def test_available_memory_is_read_from_the_kernel(tmp_path: Path) -> None:
    assert (available_memory() or 0) > 0
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 10 kB\nMemAvailable:    3 kB\n")
    assert available_memory(file) == 3 << 10
    file.write_text("nonsense")
    assert available_memory(file) is None
    assert available_memory(tmp_path / "none") is None
