"""A store in memory, with faults on demand. It ships, so that hosts can test their own recovery.

faults = Faults()
store = MemoryStore(spec, num_slots=64, faults=faults)
faults.corrupting = True        # from now on every get finds a flipped bit
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from penstock.errors import Corrupt, Full, Missing, StoreError
from penstock.stores.base import Block, Found
from penstock.types import BlockKey, BlockSpec, Slot


@dataclass(slots=True)
class Faults:
    """What should go wrong, from now on. `only` narrows it to some blocks."""

    failing: bool = False
    corrupting: bool = False
    full: bool = False
    only: Callable[[BlockKey], bool] = lambda key: True
    # Cleared, every put and get waits until it is set again: a store as slow as a test likes.
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()


class MemoryStore:
    def __init__(self, spec: BlockSpec, num_slots: int, faults: Faults | None = None) -> None:
        self.num_slots = num_slots
        self.faults = faults or Faults()
        self._block_bytes = spec.block_bytes
        self._held: dict[Slot, tuple[BlockKey, bytearray, bytes]] = {}

    def put(self, blocks: Sequence[Block]) -> list[StoreError | None]:
        return [self._put(block) for block in blocks]

    def get(self, blocks: Sequence[Block]) -> list[StoreError | None]:
        return [self._get(block) for block in blocks]

    def drop(self, key: BlockKey, slot: Slot) -> None:
        if slot in self._held and self._held[slot][0] == key:
            del self._held[slot]

    def scan(self) -> Iterator[list[Found]]:
        for number in range(self.num_slots):
            slot = Slot(number)
            yield [(slot, self._held[slot][0] if slot in self._held else None)]

    def close(self) -> None:
        self._held.clear()

    def _put(self, block: Block) -> StoreError | None:
        error = self._fault(block, Full("asked to be full") if self.faults.full else None)
        self._held.pop(block.slot, None)
        if error is None:
            data = bytearray(block.memory[: self._block_bytes])
            self._held[block.slot] = (block.key, data, xxhash.xxh3_128_digest(data))
        return error

    def _get(self, block: Block) -> StoreError | None:
        error = self._fault(block, None)
        if error is not None:
            return error
        key, data, checksum = self._held.get(block.slot, (None, bytearray(), b""))
        if key != block.key:
            return Missing(f"slot {block.slot} holds another block")
        if self.faults.corrupting and self.faults.only(block.key):
            data = bytearray(data)
            data[len(data) // 2] ^= 1
        block.memory[: self._block_bytes] = data
        if xxhash.xxh3_128_digest(data) != checksum:
            return Corrupt(f"slot {block.slot} fails its checksum")
        return None

    def _fault(self, block: Block, error: StoreError | None) -> StoreError | None:
        if not self.faults.only(block.key):
            return None
        self.faults.gate.wait()
        return StoreError("asked to fail") if self.faults.failing else error
