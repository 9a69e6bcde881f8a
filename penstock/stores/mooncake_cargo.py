"""Where the parts of a batch lie, for a library that wants addresses.

A value is the block and behind it its head: where both are one piece of memory, it crosses in one
piece, which takes a sixth less time than two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from penstock.stores.remote import Item


class Cargo:
    """Where the parts of a batch lie: bodies in place if they have an address, else in a buffer.

    Lives as long as the call, and what it refers to with it.
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
