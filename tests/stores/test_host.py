from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import logging
import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import shared_child
from tools import ODD_BLOCK_BYTES, TIMEOUT_SECONDS, content, key_of, keys_of, spec

from penstock.errors import ConfigError
from penstock.stores import host
from penstock.stores.base import Arena
from penstock.stores.host import ArenaHandle, HostArena, HostMemory
from penstock.transfer.seals import Seals
from penstock.types import PAGE_BYTES, Slot, Verdict

MiB = 1 << 20


@pytest.mark.parametrize(
    ("block_bytes", "size_bytes", "num_slots"),
    [
        (8192, 8192, 1),
        (8192, 16_383, 1),
        (8192, 16_384, 2),
        (ODD_BLOCK_BYTES, 12_288, 1),
        (ODD_BLOCK_BYTES, 3 * 12_288 + 12_287, 3),
        (1, 10 * PAGE_BYTES, 10),
        (2 * MiB, 9 * MiB, 4),
    ],
)
@pytest.mark.parametrize("huge_pages", [False, True])
def test_exactly_the_bytes_asked_for_in_whole_slots(
    block_bytes: int, size_bytes: int, num_slots: int, huge_pages: bool
) -> None:
    arena: Arena = HostArena(spec(block_bytes), size_bytes, huge_pages=huge_pages)
    assert arena.num_slots == num_slots
    assert arena.block_bytes == block_bytes
    assert arena.stride_bytes == -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
    assert isinstance(arena, HostArena)
    assert arena.num_bytes == num_slots * arena.stride_bytes <= size_bytes


@pytest.mark.parametrize("block_bytes", [1, 4096, 8192, ODD_BLOCK_BYTES])
def test_every_slot_begins_on_a_page_at_its_address(block_bytes: int) -> None:
    arena = HostArena(spec(block_bytes), 10 * spec(block_bytes).stride_bytes)
    assert arena.address % PAGE_BYTES == 0
    for slot in range(arena.num_slots):
        view = arena.view(Slot(slot))
        assert len(view) == arena.stride_bytes
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        assert address == arena.address + slot * arena.stride_bytes


def test_views_are_disjoint_and_lasting() -> None:
    arena = HostArena(spec(ODD_BLOCK_BYTES), 16 * 12_288)
    keys = keys_of(16)
    for slot, key in enumerate(keys):
        arena.view(Slot(slot))[:] = content(key, arena.stride_bytes)
    for slot, key in enumerate(keys):
        assert arena.view(Slot(slot)) == content(key, arena.stride_bytes)


def test_a_view_outlives_the_arena() -> None:
    view = HostArena(spec(), 8192).view(Slot(0))
    view[:] = b"\x07" * 8192
    assert bytes(view) == b"\x07" * 8192


def test_a_new_arena_is_zero() -> None:
    arena = HostArena(spec(), 4 * 8192)
    assert all(arena.view(Slot(slot)) == bytes(8192) for slot in range(4))


@pytest.mark.parametrize("size_bytes", [0, 1, 8191])
def test_too_small_for_one_block_is_refused(size_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"host\.size .* less than one block of 8"):
        HostArena(spec(), size_bytes)


@pytest.mark.parametrize("node", [1023, 4096, 1 << 20])
def test_a_numa_node_that_is_not_there_is_refused(node: int) -> None:
    with pytest.raises(ConfigError, match=rf"host\.numa_node is {node}, .* no such node"):
        HostArena(spec(), 8192, numa_node=node)


@pytest.mark.skipif(
    not Path("/sys/devices/system/node/node0").is_dir(), reason="the kernel names no NUMA nodes"
)
def test_numa_node_0_works_or_is_refused_clearly() -> None:
    try:
        arena = HostArena(spec(), 4 * MiB, numa_node=0)
    except ConfigError as refusal:
        assert "host.numa_node 0 was refused by the kernel" in str(refusal)  # noqa: PT017
        return
    for slot in range(arena.num_slots):
        arena.view(Slot(slot))[:] = b"\x01" * 8192
    maps = Path("/proc/self/numa_maps")
    if maps.exists():
        start = f"{arena.address:x} "
        lines = [line for line in maps.read_text().splitlines() if line.startswith(start)]
        assert all("bind:0" in line for line in lines)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("refused", ["by the kernel", "by Python"])
def test_a_machine_without_huge_pages_is_served_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: str,
    shared: bool,
) -> None:
    caplog.set_level(logging.DEBUG, "penstock.stores.host")
    monkeypatch.setattr(host, "_MADV_COLLAPSE", 9999)  # the kernel answers EINVAL
    if refused == "by the kernel":
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    arena = HostArena(spec(), 4 * 8192, huge_pages=True, shared=shared)
    assert arena.num_slots == 4
    keys = keys_of(4)
    for slot, key in enumerate(keys):
        arena.view(Slot(slot))[:] = content(key, 8192)
    arena.make_huge(0, 4)
    assert [bytes(arena.view(Slot(slot))) for slot in range(4)] == [content(k, 8192) for k in keys]
    refusals = [record for record in caplog.records if "huge pages" in record.getMessage()]
    assert len(refusals) == (2 if refused == "by the kernel" else 1)


def test_shared_memory_lies_where_huge_pages_fit() -> None:
    """The kernel puts a file on huge pages only if address and offset are aligned alike."""
    memory = HostMemory(6 * MiB, huge_pages=True, numa_node=None)
    arena = HostArena(spec(), 3 * MiB, shared=True)
    for each in (HostArena.over(memory.file, spec(), 6 * MiB), arena, HostArena.open(arena.handle)):
        assert each.address % (2 * MiB) == 0
    memory.close()


def test_allocated_memory_is_on_huge_pages() -> None:
    memory = HostMemory(8 * MiB, huge_pages=True, numa_node=None)
    memory.allocate(0, 2 * MiB)
    if not pmd_mapped(memory):
        pytest.skip("the kernel has no huge pages for shared memory (Linux 6.1, not denied)")
    arena = HostArena.over(memory.file, spec(), 8 * MiB)
    arena.buffer[2 * MiB] = 7
    memory.allocate(2 * MiB, 6 * MiB)
    assert pmd_mapped(memory) == 8 * MiB
    assert arena.buffer[2 * MiB] == 7
    assert bytes(arena.buffer[4 * MiB :]) == bytes(4 * MiB)
    memory.close()


def pmd_mapped(memory: HostMemory) -> int:
    """How many bytes of its own mapping are on huge pages."""
    start = f"{memory._address:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    while not next(lines).startswith(start):
        pass
    return int(next(line.split()[1] for line in lines if line.startswith("ShmemPmdMapped"))) << 10


def test_memory_is_unmapped_with_its_last_view() -> None:
    memory = HostMemory(4 * MiB, huge_pages=False, numa_node=None)
    arena = HostArena.over(memory.file, spec(), 4 * MiB)
    view = arena.view(Slot(0))
    inode = str(os.fstat(memory.file).st_ino)
    memory.close()
    del arena
    gc.collect()
    view[0] = 1  # still there
    assert num_mappings(inode) == 1
    del view
    gc.collect()
    assert num_mappings(inode) == 0


def num_mappings(inode: str) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[4] == inode for line in lines)


# Shared with other processes.


class Child:
    """Another process that has opened an arena by its handle."""

    def __init__(self, handle: ArenaHandle) -> None:
        self._process = subprocess.Popen(
            [sys.executable, shared_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._write(asdict(handle))

    def ask(self, *command: object) -> Any:
        self._write(command)
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=TIMEOUT_SECONDS)
        assert self._process.returncode == 0

    def _write(self, line: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()


@pytest.fixture
def shared() -> HostArena:
    return HostArena(spec(ODD_BLOCK_BYTES), 4 * 12_288, shared=True)


@pytest.fixture
def child(shared: HostArena) -> Iterator[Child]:
    child = Child(shared.handle)
    yield child
    child.close()


def test_bytes_that_one_process_writes_are_read_by_the_other(
    shared: HostArena, child: Child
) -> None:
    for slot, key in enumerate(keys_of(4)):
        data = content(key, shared.stride_bytes)
        shared.view(Slot(slot))[:] = data
        assert child.ask("digest", slot) == hashlib.sha256(data).hexdigest()
    child.ask("fill", 2, 0x5C)
    assert shared.view(Slot(2)) == b"\x5c" * shared.stride_bytes
    assert shared.view(Slot(1)) == content(keys_of(4)[1], shared.stride_bytes)
    assert shared.view(Slot(3)) == content(keys_of(4)[3], shared.stride_bytes)


def test_seals_that_one_process_sets_or_breaks_are_seen_by_the_other(
    shared: HostArena, child: Child
) -> None:
    seals = Seals(shared, memory=shared.seals)
    mine, theirs = key_of("mine"), key_of("theirs")
    assert seals.verdicts([mine], [Slot(0)]) == [Verdict.MISSING], "a new arena holds nothing"
    seals.seal([mine], [Slot(0)])
    assert child.ask("verdict", mine.hex(), 0) == Verdict.OK
    assert child.ask("verdict", mine.hex(), 1) == Verdict.MISSING
    child.ask("seal", theirs.hex(), 3)
    assert seals.verdicts([theirs, mine], [Slot(3), Slot(0)]) == [Verdict.OK] * 2
    child.ask("open", 0)
    assert seals.verdicts([theirs, mine], [Slot(3), Slot(0)]) == [Verdict.OK, Verdict.MISSING]


def test_filling_every_slot_breaks_no_seal(shared: HostArena) -> None:
    seals = Seals(shared, memory=shared.seals)
    keys, places = keys_of(4), [Slot(slot) for slot in range(4)]
    seals.seal(keys, places)
    shared.buffer[:] = b"\xff" * len(shared.buffer)
    assert len(shared.buffer) == 4 * shared.stride_bytes
    assert seals.verdicts(keys, places) == [Verdict.OK] * 4


def test_a_shared_arena_has_no_name_that_could_be_left_behind(
    shared: HostArena, child: Child
) -> None:
    shared.view(Slot(0))[:] = b"\x01" * shared.stride_bytes
    child.ask("digest", 0)  # it is mapped by both
    target = os.readlink(shared.handle.path)
    assert target.startswith("/memfd:")
    assert not [path for path in Path("/dev/shm").iterdir() if "penstock" in path.name]


def test_the_memory_outlives_its_maker_in_whoever_mapped_it() -> None:
    made = HostArena(spec(), 2 * 8192, shared=True)
    opened = HostArena.open(made.handle)
    made.view(Slot(1))[:] = b"\x09" * 8192
    del made
    gc.collect()
    with pytest.raises(OSError, match="No such file"):
        HostArena.open(opened.handle)
    assert opened.view(Slot(1)) == b"\x09" * 8192


def held() -> tuple[int, int]:
    """Files that this process has open, and arenas that it has mapped."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:penstock-host")


def test_an_arena_that_is_let_go_gives_its_memory_back() -> None:
    before = held()
    for _ in range(8):
        arena = HostArena(spec(), 8192, shared=True)
        HostArena.open(arena.handle).view(Slot(0))[:] = b"\x01" * 8192
    assert held() != before
    del arena
    # What earlier tests left behind may be freed meanwhile.
    assert all(now <= then for now, then in zip(held(), before, strict=True))


def test_a_handle_is_plain_data(shared: HostArena) -> None:
    handle = shared.handle
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert ArenaHandle(**json.loads(json.dumps(asdict(handle)))) == handle
    opened = HostArena.open(handle)
    assert (opened.num_slots, opened.block_bytes, opened.stride_bytes) == (4, 9001, 12_288)
    assert opened.num_bytes == shared.num_bytes


def test_an_arena_that_is_not_shared_is_found_within_its_process_only() -> None:
    arena = HostArena(spec(), 8192)
    assert HostArena.open(arena.handle) is arena
    handle = arena.handle
    del arena
    gc.collect()
    with pytest.raises(OSError, match="No such file"):
        HostArena.open(handle)


def test_the_arena_of_a_process_that_is_gone_cannot_be_opened() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(TIMEOUT_SECONDS)
    handle = ArenaHandle(f"/proc/{gone.pid}/fd/3", 1, 8192, 8192)
    with pytest.raises(FileNotFoundError):
        HostArena.open(handle)
