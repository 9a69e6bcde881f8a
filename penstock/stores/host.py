"""HOST: an arena of equal slots in DRAM.

The arena is one anonymous mapping: page-aligned for direct I/O, one address range that CUDA can
pin, on huge pages if the kernel has them, and bound to a NUMA node if one is set. It takes the
configured size, rounded down to whole slots.

A shared arena is a memfd that other processes of this user map through its `handle`. It has no
name, so nothing is left when the last process that maps it ends. The slots are followed by their
seals (see `penstock.transfer.seals`):

    slot 0 | slot 1 | ... | slot n-1 | n keys of 32 bytes, zero if the slot is empty
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from dataclasses import dataclass
from weakref import WeakValueDictionary, finalize

from penstock.errors import ConfigError
from penstock.stores.memory_file import end_changes, make_memory_file
from penstock.types import KEY_BYTES, PAGE_BYTES, BlockSpec, Slot, round_up
from penstock.units import format_bytes

log = logging.getLogger(__name__)

_MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers: libc has no wrapper
_MPOL_BIND = 2
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_HUGE_PAGE = 2 << 20

_here: WeakValueDictionary[str, HostArena] = WeakValueDictionary()  # arenas that are not shared


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """What a worker needs to map an arena, in another process if it is shared. Plain data."""

    path: str  # of a node: of its socket
    num_slots: int
    block_bytes: int
    stride_bytes: int
    token: str = ""  # of a client's session at a node; empty if the memory is not a node's


class HostMemory:
    """A file in memory that other processes map, without a name that could be left behind."""

    def __init__(self, num_bytes: int, *, huge_pages: bool, numa_node: int | None) -> None:
        self.num_bytes = num_bytes
        self.file = make_memory_file("penstock-host", num_bytes)
        end_changes(self.file)
        self._memory = _map_file(self.file, num_bytes)
        self._address = _address_of(self._memory)
        self._huge_pages = huge_pages
        _advise_huge_pages(self._address, num_bytes, wanted=huge_pages)
        if numa_node is not None:
            _bind_to_node(self._address, num_bytes, numa_node)

    def allocate(self, start: int, num_bytes: int) -> None:
        """Have the kernel allocate a part of it now. What is there stays. Raises OSError."""
        begin, end = self._address + start, self._address + start + num_bytes
        if self._huge_pages:
            # The kernel makes a huge page of small ones, of which one at least must be there. It
            # does so whatever its setting shmem_enabled is, except for "deny".
            for address in range(begin, end, _HUGE_PAGE):
                _advise(address, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
            _advise(begin, num_bytes, _MADV_COLLAPSE)
        failed = _advise(begin, num_bytes, _MADV_POPULATE_WRITE)
        if failed:
            raise OSError(failed, os.strerror(failed))

    def close(self) -> None:
        """Who has mapped it keeps it."""
        self._memory.release()
        os.close(self.file)


class HostArena:
    def __init__(
        self,
        spec: BlockSpec,
        size_bytes: int,
        *,
        huge_pages: bool = True,
        numa_node: int | None = None,
        shared: bool = False,
        headroom_bytes: int = 0,
    ) -> None:
        """`headroom_bytes`, a multiple of the page size, are left free after each block."""
        self.block_bytes = spec.block_bytes
        self.stride_bytes = spec.stride_bytes + headroom_bytes
        self.num_slots = size_bytes // self.stride_bytes
        if self.num_slots < 1:
            raise ConfigError(
                f"host.size is {format_bytes(size_bytes)}, less than one block of "
                f"{format_bytes(self.stride_bytes)}; set it to at least that."
            )
        self.num_for_device = self.num_slots  # a GPU can use the first ones while pinning goes on
        self.num_bytes = self.num_slots * self.stride_bytes
        mapped_bytes = self.num_bytes + self.num_slots * KEY_BYTES
        if shared:
            file = os.memfd_create("penstock-host")
            os.ftruncate(file, mapped_bytes)
            self._take(_map_file(file, mapped_bytes))
            path = f"/proc/{os.getpid()}/fd/{file}"
            finalize(self, os.close, file)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._take(memoryview(mmap.mmap(-1, mapped_bytes, flags=flags)))
            path = f"here:{id(self):x}"
            _here[path] = self
        self.handle = ArenaHandle(path, self.num_slots, self.block_bytes, self.stride_bytes)
        _advise_huge_pages(self.address, mapped_bytes, wanted=huge_pages)
        if numa_node is not None:
            _bind_to_node(self.address, self.num_bytes, numa_node)

    @classmethod
    def open(cls, handle: ArenaHandle) -> HostArena:
        """Map an arena shared by another process of this user, or find one in this process."""
        if handle.path in _here:
            return _here[handle.path]
        arena = cls.__new__(cls)
        arena.handle = handle
        arena.block_bytes = handle.block_bytes
        arena.stride_bytes = handle.stride_bytes
        arena.num_slots = arena.num_for_device = handle.num_slots
        arena.num_bytes = handle.num_slots * handle.stride_bytes
        mapped_bytes = arena.num_bytes + arena.num_slots * KEY_BYTES
        file = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            arena._take(_map_file(file, mapped_bytes))
        finally:
            os.close(file)  # the mapping keeps the memory
        return arena

    @classmethod
    def over(cls, file: int, spec: BlockSpec, num_bytes: int, headroom_bytes: int = 0) -> HostArena:
        """Slots over the first `num_bytes` of a file in memory. Their seals are elsewhere."""
        arena = cls.__new__(cls)
        arena.block_bytes = spec.block_bytes
        arena.stride_bytes = spec.stride_bytes + headroom_bytes
        arena.num_slots = arena.num_for_device = num_bytes // arena.stride_bytes
        arena.num_bytes = arena.num_slots * arena.stride_bytes
        path = f"/proc/{os.getpid()}/fd/{file}"
        arena.handle = ArenaHandle(path, arena.num_slots, arena.block_bytes, arena.stride_bytes)
        arena._take(_map_file(file, arena.num_bytes))
        return arena

    def replace_memory(self, file: int) -> None:
        """Map another file of the same size in place of this arena's. Addresses stay valid."""
        _map_file_at(self.address, file, round_up(self.num_bytes, PAGE_BYTES))

    @property
    def buffer(self) -> memoryview:
        """All slots at once."""
        return self._memory[: self.num_bytes]

    @property
    def seals(self) -> memoryview:
        """The memory of the slots' seals."""
        return self._memory[self.num_bytes :]

    def make_huge(self, first: int, count: int) -> None:
        """Move slots to huge pages: shared memory is not on them by default, and GPUs need them."""
        page = mmap.PAGESIZE
        start = first * self.stride_bytes // page * page
        # Refused by an old kernel, or if memory is too fragmented.
        if failed := _advise(self.address + start, count * self.stride_bytes, _MADV_COLLAPSE):
            reason = os.strerror(failed)
            log.debug("huge pages are not available for part of DRAM: %s", reason)

    def view(self, slot: Slot) -> memoryview:
        start = slot * self.stride_bytes
        return self._memory[start : start + self.stride_bytes]

    def _take(self, memory: memoryview) -> None:
        self._memory = memory
        self.address = _address_of(memory)


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _map_file(file: int, num_bytes: int) -> memoryview:
    """Map a file in memory at a multiple of a huge page, because it can only then be on huge pages.

    Python's mmap cannot choose an address, and the kernel aligns such files only if its setting
    shmem_enabled puts them on huge pages by itself. Unmapped once no view is left.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    reserved_bytes = round_up(num_bytes, mmap.PAGESIZE) + _HUGE_PAGE
    reserved = libc.mmap(
        None,
        ctypes.c_size_t(reserved_bytes),
        ctypes.c_int(0),  # no access
        ctypes.c_int(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
        ctypes.c_int(-1),
        ctypes.c_long(0),
    )
    if reserved == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "no addresses are left for DRAM")
    start = round_up(reserved, _HUGE_PAGE)
    end = start + round_up(num_bytes, mmap.PAGESIZE)
    try:
        _map_file_at(start, file, num_bytes)
    except OSError:
        _unmap(reserved, reserved_bytes)
        raise
    _unmap(reserved, start - reserved)
    _unmap(end, reserved + reserved_bytes - end)
    mapped = (ctypes.c_char * num_bytes).from_address(start)
    # Not at exit: other threads may still copy.
    finalize(mapped, _unmap, start, num_bytes).atexit = False
    return memoryview(mapped).cast("B")


def _map_file_at(address: int, file: int, num_bytes: int) -> None:
    """In place of what is mapped there. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    found = libc.mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(num_bytes),
        ctypes.c_int(mmap.PROT_READ | mmap.PROT_WRITE),
        ctypes.c_int(mmap.MAP_SHARED | _MAP_FIXED),
        ctypes.c_int(file),
        ctypes.c_long(0),
    )
    if found != address:
        raise OSError(ctypes.get_errno(), "DRAM could not be mapped")


def _unmap(address: int, num_bytes: int) -> None:
    if num_bytes:
        ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))


def _advise_huge_pages(address: int, num_bytes: int, *, wanted: bool) -> None:
    if wanted and hasattr(mmap, "MADV_HUGEPAGE"):
        failed = _advise(address, num_bytes, mmap.MADV_HUGEPAGE)
        if failed:
            log.info("huge pages are not available for DRAM: %s", os.strerror(failed))


def _advise(address: int, num_bytes: int, advice: int) -> int:
    """Return the error number, or 0. Unlike mmap.madvise, this lets other threads run."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(
        ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice)
    )
    return ctypes.get_errno() if failed else 0


def check_numa_node(node: int) -> None:
    """Raise ConfigError if memory cannot be bound to this node. Tries it with one page."""
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        held = ctypes.c_char.from_buffer(page)
        try:
            _bind_to_node(ctypes.addressof(held), mmap.PAGESIZE, node)
        finally:
            del held  # else the page could not be unmapped


def _bind_to_node(address: int, num_bytes: int, node: int) -> None:
    if not os.path.isdir(f"/sys/devices/system/node/node{node}"):
        raise ConfigError(
            f"host.numa_node is {node}, but this machine has no such node; choose one listed in "
            "/sys/devices/system/node, or remove the setting."
        )
    number = _MBIND.get(platform.machine())
    if number is None:
        log.warning("host.numa_node is ignored: not supported on %s", platform.machine())
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
            "allow mbind for this process, or remove the setting."
        )
