"""Where the parts of a batch lie, for a library that wants addresses."""

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
        self.sizes = [[len(item.head), len(item.body)] for item in items]
        self.addresses = [[0, address(item.body)] for item in items]
        outside = [item for item, both in zip(items, self.addresses, strict=True) if not both[1]]
        self.buffer = take(sum(len(i.head) for i in items) + sum(len(i.body) for i in outside))
        self._items = items
        self._copies: list[tuple[int, memoryview, memoryview]] = []
        start, offset = address_of(self.buffer), 0
        for number, item in enumerate(items):
            for side, part in enumerate((item.head, item.body)):
                if not self.addresses[number][side]:
                    self.addresses[number][side] = start + offset
                    self._copies.append((number, part, self.buffer[offset : offset + len(part)]))
                    offset += len(part)

    def load(self) -> None:
        for _, part, copy in self._copies:
            copy[:] = part

    def unload(self, sound: Sequence[bool]) -> None:
        for number, part, copy in self._copies:
            if sound[number]:
                part[:] = copy


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
