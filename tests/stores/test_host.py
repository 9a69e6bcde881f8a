from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
from tools import ODD_BLOCK_BYTES, content, keys_of, spec

from penstock.errors import ConfigError
from penstock.stores.base import Arena
from penstock.stores.host import HostArena
from penstock.types import PAGE_BYTES, Slot

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


def test_a_machine_without_huge_pages_is_served_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)  # the kernel answers EINVAL
    arena = HostArena(spec(), 8192, huge_pages=True)
    arena.view(Slot(0))[:] = b"\x01" * 8192
