"""HOST: one arena of equal slots in DRAM. Exactly the bytes asked for, in whole slots.

The arena is one anonymous mapping: page-aligned for direct I/O, one address range for CUDA to pin
later, on huge pages where the kernel gives them, bound to a NUMA node where one is named.

Shared, it is a memfd that other processes of this user map by its `handle`. It has no name that
could be left behind: it is gone with the last process that holds it. Behind its slots lie their
seals (see `penstock.transfer.seals`):

    slot 0 | slot 1 | ... | slot n-1 | n times the 32 bytes of a key, or zeros
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.types import KEY_BYTES, BlockSpec, Slot
from penstock.units import format_bytes

log = logging.getLogger(__name__)

_MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers: libc has no wrapper
_MPOL_BIND = 2


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """What another process needs to map a shared arena. Plain data."""

    path: str
    num_slots: int
    block_bytes: int
    stride_bytes: int


class HostArena:
    def __init__(
        self,
        spec: BlockSpec,
        size_bytes: int,
        *,
        huge_pages: bool = True,
        numa_node: int | None = None,
        shared: bool = False,
    ) -> None:
        self.block_bytes = spec.block_bytes
        self.stride_bytes = spec.stride_bytes
        self.num_slots = size_bytes // self.stride_bytes
        if self.num_slots < 1:
            raise ConfigError(
                f"host.size is {format_bytes(size_bytes)}, less than one block of "
                f"{format_bytes(self.stride_bytes)}; give it room for at least one."
            )
        self.num_bytes = self.num_slots * self.stride_bytes
        self._file = -1
        if shared:
            self._file = os.memfd_create("penstock-host")
            mapped_bytes = self.num_bytes + self.num_slots * KEY_BYTES
            os.ftruncate(self._file, mapped_bytes)
            self._map = mmap.mmap(self._file, mapped_bytes, flags=mmap.MAP_SHARED)
        else:
            self._map = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                log.info("no huge pages for the host arena: %s", error)
        self._take(self._map)
        if numa_node is not None:
            _bind_to_node(self.address, self.num_bytes, numa_node)

    @classmethod
    def open(cls, handle: ArenaHandle) -> HostArena:
        """Map an arena that another process of this user shares."""
        arena = cls.__new__(cls)
        arena.block_bytes = handle.block_bytes
        arena.stride_bytes = handle.stride_bytes
        arena.num_slots = handle.num_slots
        arena.num_bytes = handle.num_slots * handle.stride_bytes
        arena._file = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        mapped_bytes = arena.num_bytes + arena.num_slots * KEY_BYTES
        arena._map = mmap.mmap(arena._file, mapped_bytes, flags=mmap.MAP_SHARED)
        arena._take(arena._map)
        return arena

    @property
    def handle(self) -> ArenaHandle:
        """How another process finds a shared arena, while this one lives."""
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        return ArenaHandle(path, self.num_slots, self.block_bytes, self.stride_bytes)

    @property
    def buffer(self) -> memoryview:
        """All slots at once."""
        return self._memory[: self.num_bytes]

    @property
    def seals(self) -> memoryview | None:
        """Where a shared arena keeps its slots' keys."""
        return self._memory[self.num_bytes :] if self._file >= 0 else None

    def view(self, slot: Slot) -> memoryview:
        start = slot * self.stride_bytes
        return self._memory[start : start + self.stride_bytes]

    def _take(self, mapping: mmap.mmap) -> None:
        self._memory = memoryview(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _bind_to_node(address: int, num_bytes: int, node: int) -> None:
    if not os.path.isdir(f"/sys/devices/system/node/node{node}"):
        raise ConfigError(
            f"host.numa_node is {node}, and this machine has no such node; "
            "see /sys/devices/system/node, or leave it out."
        )
    number = _MBIND.get(platform.machine())
    if number is None:
        log.warning("host.numa_node is not supported on %s; ignored", platform.machine())
        return
    libc = ctypes.CDLL(None, use_errno=True)
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(_MPOL_BIND),
        ctypes.byref(mask),
        ctypes.c_ulong(bits * len(mask) + 1),
        ctypes.c_uint(0),
    )
    if failed:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(
            f"host.numa_node {node} was refused by the kernel ({reason}); "
            "allow mbind for this process, or leave the setting out."
        )
