"""Memory that a node shares: addresses stay when it is replaced, and seals are only read."""

from __future__ import annotations

import mmap
import os

import pytest

from penstock.stores.host import HostArena, HostMemory
from penstock.transfer.seals import ReadSeals, Seals
from penstock.types import KEY_BYTES, BlockKey, BlockSpec, Slot, Verdict
from tests.node.nodes import num_files

SPEC = BlockSpec(bytes(32), 10_000, 4)
SIZE = 64 * SPEC.stride_bytes
A, B = (BlockKey(bytes([n]) * 32) for n in (1, 2))


def test_two_arenas_over_one_file_are_the_same_memory() -> None:
    memory = HostMemory(SIZE, huge_pages=False, numa_node=None)
    one, two = (HostArena.over(memory.file, SPEC, SIZE) for _ in range(2))
    one.view(Slot(63))[:] = b"x" * one.stride_bytes
    assert bytes(two.view(Slot(63))) == b"x" * one.stride_bytes
    assert one.num_slots == 64
    memory.close()
    one.view(Slot(0))[:] = b"y" * one.stride_bytes
    assert bytes(two.view(Slot(0))) == b"y" * one.stride_bytes, "who has mapped it keeps it"


def test_replaced_memory_has_the_same_addresses_and_none_of_the_old_contents() -> None:
    files = num_files()
    old, new = (HostMemory(SIZE, huge_pages=False, numa_node=None) for _ in range(2))
    arena = HostArena.over(old.file, SPEC, SIZE)
    other = HostArena.over(old.file, SPEC, SIZE)
    view, address = arena.view(Slot(5)), arena.address
    for slot in range(64):
        arena.view(Slot(slot))[:] = b"o" * arena.stride_bytes
    arena.replace_memory(new.file)
    assert arena.address == address
    assert not any(arena.buffer)
    view[:4] = b"here"
    assert bytes(arena.view(Slot(5))[:4]) == b"here", "views from before show the new memory"
    assert bytes(other.view(Slot(5))[:4]) == b"oooo", "others keep the old one"
    assert os.pread(new.file, 4, 5 * arena.stride_bytes) == b"here"
    old.close()
    new.close()
    assert num_files() <= files + 2  # the mappings hold theirs until they are freed


def test_memory_that_cannot_be_mapped_is_an_error() -> None:
    memory = HostMemory(SIZE, huge_pages=False, numa_node=None)
    arena = HostArena.over(memory.file, SPEC, SIZE)
    with open(os.devnull, "rb") as wrong, pytest.raises(OSError, match="could not be mapped"):
        arena.replace_memory(wrong.fileno())
    memory.close()


def test_a_client_reads_the_seals_that_the_node_writes() -> None:
    memory = HostMemory(SIZE, huge_pages=False, numa_node=None)
    arena = HostArena.over(memory.file, SPEC, SIZE)
    num_bytes = arena.num_slots * KEY_BYTES
    file = os.memfd_create("seals")
    os.ftruncate(file, num_bytes)
    written = Seals(arena, memory=memoryview(mmap.mmap(file, num_bytes)))
    read = ReadSeals(arena, memoryview(mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)))
    slots = [Slot(3), Slot(4)]
    assert read.verdicts([A, B], slots) == [Verdict.MISSING, Verdict.MISSING]
    written.seal([A, B], slots)
    assert read.verdicts([A, B], slots) == [Verdict.OK, Verdict.OK]
    read.open(slots)
    read.seal([B, A], slots)
    assert written.verdicts([A, B], slots) == [Verdict.OK, Verdict.OK], "a reader writes nothing"
    written.open([Slot(3)])
    assert read.verdicts([A, B], slots) == [Verdict.MISSING, Verdict.OK]
    read.replace_memory(memoryview(bytes(num_bytes)))
    assert read.verdicts([A, B], slots) == [Verdict.MISSING, Verdict.MISSING]
    os.close(file)
    memory.close()
