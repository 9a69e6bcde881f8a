"""Memory for Mooncake's library, which takes addresses and sends only from registered memory."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Callable, Sequence

from penstock.errors import StoreError
from penstock.stores.base import Arena
from penstock.stores.remote import Item

log = logging.getLogger("penstock.stores.mooncake")

_MIN_BUFFER_BYTES = 64 << 10


class RegisteredMemory:
    """Arenas whose blocks are sent in place, and buffers for everything else."""

    def __init__(self, register: Callable[[int, int], None]) -> None:
        """`register` takes an address and a number of bytes. Raises StoreError if refused."""
        self._register = register
        self._unregistered: list[range] = []  # addresses of arenas
        self._registered: list[range] = []
        self.buffers: list[memoryview] = []  # registered and not in use, smallest first
        self._lock = threading.Lock()

    def add(self, arena: Arena) -> None:
        size = arena.num_slots * arena.stride_bytes
        self._unregistered.append(range(arena.address, arena.address + size))

    def register_arenas(self) -> None:
        """Register the arenas added so far. Blocks in an arena that is refused are copied."""
        for arena in self._unregistered:
            try:
                self._register(arena.start, len(arena))
                self._registered.append(arena)
            except StoreError as error:
                log.warning("blocks are copied to a buffer before Mooncake sends them: %s", error)
        self._unregistered = []

    def address(self, part: memoryview) -> int:
        """The address of `part` if it is in a registered arena, else 0."""
        if part.readonly:
            return 0
        start = address_of(part)
        last = start + len(part) - 1
        return start if any(start in arena and last in arena for arena in self._registered) else 0

    def take_buffer(self, num_bytes: int) -> memoryview:
        """Registered memory. Buffers are reused: there are as many as were ever in use at once."""
        with self._lock:
            for place, memory in enumerate(self.buffers):
                if len(memory) >= num_bytes:
                    return self.buffers.pop(place)
        size = max(_MIN_BUFFER_BYTES, 1 << (num_bytes - 1).bit_length())
        memory = memoryview(mmap.mmap(-1, size))
        self._register(address_of(memory), size)
        return memory

    def give_back(self, buffer: memoryview) -> None:
        with self._lock:
            self.buffers.append(buffer)
            self.buffers.sort(key=len)


class Cargo:
    """The addresses and sizes of a batch: parts without an address are copied to a buffer.

    A value is a block followed by its head. If both are contiguous they are sent in one piece,
    which takes a sixth less time than two. Must live as long as the library's call.
    """

    def __init__(
        self,
        items: Sequence[Item],
        address: Callable[[memoryview], int],
        take: Callable[[int], memoryview],
    ) -> None:
        self.sizes = [[len(item.body), len(item.head)] for item in items]
        self.addresses = [[address(item.body), address(item.head)] for item in items]
        parts = [
            (number, side, part)
            for number, item in enumerate(items)
            for side, part in enumerate((item.body, item.head))
            if not self.addresses[number][side]
        ]
        self.buffer = take(sum(len(part) for _, _, part in parts))
        self._copies: list[tuple[int, memoryview, memoryview]] = []
        start, offset = address_of(self.buffer), 0
        for number, side, part in parts:
            self.addresses[number][side] = start + offset
            self._copies.append((number, part, self.buffer[offset : offset + len(part)]))
            offset += len(part)
        for number, (body, head) in enumerate(self.addresses):
            if body + self.sizes[number][0] == head:
                self.sizes[number] = [sum(self.sizes[number])]
                self.addresses[number] = [body]

    def load(self) -> None:
        for _, part, copy in self._copies:
            copy[:] = part

    def unload(self, sound: Sequence[bool]) -> None:
        for number, part, copy in self._copies:
            if sound[number]:
                part[:] = copy


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
