"""What a store is: a dumb keeper of blocks, moved in batches, that trusts nothing it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


Found = tuple[Slot, BlockKey | None]


class Store(Protocol):
    """DISK by slot, REMOTE by key.

    A batch is answered block by block: None for success, else what was wrong with that block. No
    block's fault touches another's, and no exception leaves `put` or `get` for a tier's faults.
    """

    def put(self, blocks: Sequence[Block]) -> list[StoreError | None]: ...

    def get(self, blocks: Sequence[Block]) -> list[StoreError | None]:
        """Fill each block's memory. Where an error is returned, its memory is undefined."""
        ...

    def drop(self, key: BlockKey, slot: Slot) -> None:
        """Make sure that the block is not found again. Never raises for a tier's fault."""
        ...

    def scan(self) -> Iterator[list[Found]]:
        """After a restart: every slot once, in batches, with the block found in it or None."""
        ...

    def close(self) -> None: ...


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
