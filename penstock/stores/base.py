"""The interface of a store: it moves blocks in batches and trusts nothing it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from penstock.errors import StoreError
from penstock.types import BlockKey, Slot


class Block(NamedTuple):
    """One block of a batch: its key, its slot in the store, and memory to read or write.

    `memory` starts at a page boundary and is one slot long: the block and its padding.
    """

    key: BlockKey
    slot: Slot
    memory: memoryview
    tenant: str = ""
    parent: BlockKey | None = None  # the block before it in its prompt, if known


Found = tuple[Slot, BlockKey | None]


class Incident(NamedTuple):
    """Something that happened to a store and that no read or write reports."""

    what: str
    num_damaged: int = 0  # damaged records or blocks
    # If set, the store's blocks are lost, except these, which were written since.
    survivors: Collection[BlockKey] | None = None


Answers = list[StoreError | None]
"""One answer per block: None for success, else the error."""

Verify = Callable[[], Answers]
Digests = Callable[[], Sequence[bytes]]


class Store(Protocol):
    """DISK finds a block by its slot, REMOTE by its key.

    I/O and checksums are separate calls: threads that wait for a device need not compute, and the
    next block is read while the last is verified. Each block has its own answer: one bad block
    does not fail the others. `write`, `read` and the check never raise for faults of a tier.
    """

    def digest(self, memory: memoryview) -> bytes:
        """The checksum that this store keeps with a block. No I/O; releases the GIL."""

    def write(self, blocks: Sequence[Block], digests: Digests) -> Answers:
        """Store blocks. `digests` is called once, as late as possible."""

    def read(self, blocks: Sequence[Block]) -> Verify:
        """Fill each block's memory, and return a check that must run before the memory is used.

        Where the check returns an error, the block's memory is undefined.
        """

    def drop(self, key: BlockKey, slot: Slot) -> None:
        """Make sure that the block is not found again. Never raises for faults of a tier."""

    def scan(self) -> Iterator[list[Found]]:
        """After a restart: every slot once, in batches, each with its block or None."""

    def close(self) -> None: ...


class WholeBlocks:
    """`put` and `get`: I/O and checksums in one call, on the caller's thread."""

    def put(self: Store, blocks: Sequence[Block]) -> Answers:
        return self.write(blocks, lambda: [self.digest(block.memory) for block in blocks])

    def get(self: Store, blocks: Sequence[Block]) -> Answers:
        return self.read(blocks)()


class Arena(Protocol):
    """Memory that the processor can address, divided into slots of equal size."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def stride_bytes(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def address(self) -> int:
        """Address of the first slot; slot i is at address + i * stride_bytes."""

    def view(self, slot: Slot) -> memoryview:
        """One whole slot: the block, padded to whole pages."""
