"""What a store is: a dumb keeper of blocks, moved in batches, that trusts nothing it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from penstock.errors import StoreError
from penstock.types import BlockKey, Slot


class Block(NamedTuple):
    """One block of a batch: its name, its place in the store, and memory to read or write.

    `memory` begins on a page and is one whole slot long: the block and its padding.
    """

    key: BlockKey
    slot: Slot
    memory: memoryview
    tenant: str = ""
    parent: BlockKey | None = None  # the block before it in its prompt, if known


Found = tuple[Slot, BlockKey | None]


class Incident(NamedTuple):
    """Something that befell a store, and that no answer to a read or a write tells."""

    what: str
    num_damaged: int = 0  # records or blocks that were found damaged
    # What the store held is lost, but for these, which were written since then.
    survivors: Collection[BlockKey] | None = None


Answers = list[StoreError | None]
"""Block by block: None for success, else what was wrong with that block."""

Verify = Callable[[], Answers]
Digests = Callable[[], Sequence[bytes]]


class Store(Protocol):
    """DISK by slot, REMOTE by key.

    I/O and checksums are apart, so that threads that wait for a device need not compute, and the
    next block is on its way while the last is verified. No block's fault touches another's, and
    no exception leaves `write`, `read` or the check for a tier's faults.
    """

    def digest(self, memory: memoryview) -> bytes:
        """The fingerprint this store keeps with a block. Computes only; releases the GIL."""
        ...

    def write(self, blocks: Sequence[Block], digests: Digests) -> Answers:
        """Store blocks. `digests` is called once, as late as the store can."""
        ...

    def read(self, blocks: Sequence[Block]) -> Verify:
        """Fill each block's memory. Nothing of it may be used before the check returned says so.

        Where it tells of an error, the block's memory is undefined.
        """
        ...

    def drop(self, key: BlockKey, slot: Slot) -> None:
        """Make sure that the block is not found again. Never raises for a tier's fault."""
        ...

    def scan(self) -> Iterator[list[Found]]:
        """After a restart: every slot once, in batches, with the block found in it or None."""
        ...

    def close(self) -> None: ...


class WholeBlocks:
    """`put` and `get` for whoever has no threads to spare: I/O and checksum in one call."""

    def put(self: Store, blocks: Sequence[Block]) -> Answers:
        return self.write(blocks, lambda: [self.digest(block.memory) for block in blocks])

    def get(self: Store, blocks: Sequence[Block]) -> Answers:
        return self.read(blocks)()


class Arena(Protocol):
    """Memory of equal slots that the processor can address."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def stride_bytes(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def address(self) -> int:
        """Of the first slot; slot i lies i * stride_bytes further."""
        ...

    def view(self, slot: Slot) -> memoryview:
        """One whole slot: the block and its padding to full pages."""
        ...
