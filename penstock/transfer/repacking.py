"""Repacks blocks on their way between HOST and a store that packs them in another way."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from penstock.codecs.base import BlockCodec
from penstock.stores.base import Arena
from penstock.types import Slot


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory for some blocks as the store holds them."""

    repacker: Repacker
    slots: list[Slot]

    @property
    def views(self) -> list[memoryview]:
        return [self.repacker.arena.view(slot) for slot in self.slots]

    def give_back(self) -> None:
        self.repacker.give_back(self.slots)


class Repacker:
    """Thread-safe. `arena` has at least as many slots as the largest transfer has blocks."""

    def __init__(self, arena: Arena, host: BlockCodec, store: BlockCodec) -> None:
        self.arena = arena  # of the store's blocks
        self._host = host
        self._store = store
        self._free = [Slot(slot) for slot in range(arena.num_slots)]
        self._changed = threading.Condition()

    def take(self, count: int) -> Scratch:
        """Wait until there is memory for so many blocks. All at once: nobody waits with some."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
        return Scratch(self, taken)

    def give_back(self, slots: list[Slot]) -> None:
        with self._changed:
            self._free += slots
            self._changed.notify_all()

    def to_store(self, host: memoryview, store: memoryview) -> bool:
        """Repack a block of HOST. False if it does not fit the store's codec."""
        return _repack(self._host, host, self._store, store)

    def to_host(self, store: memoryview, host: memoryview) -> bool:
        return _repack(self._store, store, self._host, host)


def _repack(
    source: BlockCodec, packed: memoryview, target: BlockCodec, repacked: memoryview
) -> bool:
    if not source.version:
        return target.pack(packed, repacked)
    if not target.version:
        source.unpack(packed, repacked)
        return True
    raw = memoryview(bytearray(source.raw_bytes))
    source.unpack(packed, raw)
    return target.pack(raw, repacked)
