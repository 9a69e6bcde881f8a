"""HOST: one arena of equal slots in DRAM. Exactly the bytes asked for, in whole slots.

The arena is one anonymous mapping: page-aligned for direct I/O, one address range for CUDA to pin
later, on huge pages where the kernel gives them, bound to a NUMA node where one is named.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform

from penstock.errors import ConfigError
from penstock.types import BlockSpec, Slot
from penstock.units import format_bytes

log = logging.getLogger(__name__)

_MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers: libc has no wrapper
_MPOL_BIND = 2


class HostArena:
    def __init__(
        self,
        spec: BlockSpec,
        size_bytes: int,
        *,
        huge_pages: bool = True,
        numa_node: int | None = None,
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
        self._map = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                log.info("no huge pages for the host arena: %s", error)
        self._memory = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if numa_node is not None:
            _bind_to_node(self.address, self.num_bytes, numa_node)

    @property
    def buffer(self) -> memoryview:
        """All slots at once."""
        return self._memory

    def view(self, slot: Slot) -> memoryview:
        start = slot * self.stride_bytes
        return self._memory[start : start + self.stride_bytes]


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
