"""REMOTE: blocks by key in a store that instances share, through one of several clients.

A client knows names and bytes; what the bytes mean, and whether they are believed, is decided
here. Every value is a head (see `envelope`) and a body of exactly one block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from penstock.errors import Corrupt, Missing, StoreError
from penstock.stores.base import Answers, Arena, Block, Digests, Found, Verify, WholeBlocks
from penstock.stores.envelope import HEAD_BYTES, Envelope
from penstock.types import BlockKey, BlockSpec, Slot

log = logging.getLogger(__name__)


class Item(NamedTuple):
    """A value on its way: `head` and `body` are read by a put and filled by a get."""

    name: str
    head: memoryview  # HEAD_BYTES
    body: memoryview  # one block

    @property
    def num_bytes(self) -> int:
        return len(self.head) + len(self.body)


class Listed(NamedTuple):
    name: str
    num_bytes: int


def absent() -> Missing:
    return Missing("the remote store does not hold this block (any more)")


def wrong_size(num_bytes: int | None, expected: int) -> Corrupt:
    return Corrupt(f"a remote value has {num_bytes} bytes, expected {expected}")


class Client(Protocol):
    """Names and bytes. Safe to use from many threads; no call takes longer than its timeout.

    `put` and `get` answer block by block and raise nothing for a store's faults; the others raise
    StoreError. A value that is not exactly as long as asked for is Corrupt.
    """

    def put(self, items: Sequence[Item], ttl_seconds: float | None) -> Answers: ...

    def get(self, items: Sequence[Item]) -> Answers: ...

    def exists(self, names: Sequence[str]) -> list[bool]: ...

    def remove(self, names: Sequence[str]) -> None: ...

    def find(self, prefix: str) -> Iterator[list[Listed]]:
        """All values whose name begins so, in pages."""
        ...

    def register(self, arena: Arena) -> None:
        """Bodies will lie in this memory, for clients whose network card wants to know."""
        ...

    def close(self) -> None: ...


class RemoteStore(WholeBlocks):
    """Slots mean nothing here: a block is found by its key."""

    def __init__(
        self,
        client: Client,
        spec: BlockSpec,
        envelope: Envelope,
        *,
        ttl_seconds: float | None = None,
        read_only: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.client = client
        self._block_bytes = spec.block_bytes
        self._envelope = envelope
        self._ttl_seconds = ttl_seconds
        self._read_only = read_only
        self._now = now
        self.prefix = f"penstock/1/{envelope.prefix}/"

    def name(self, key: BlockKey) -> str:
        return self.prefix + key.hex()

    def exists(self, keys: Sequence[BlockKey], limit: int) -> list[bool]:
        """Which of the first `limit` are there, in as few round trips as the store can.

        The keys are those of a prompt, in order. Raises StoreError.
        """
        return self.client.exists([self.name(key) for key in keys[:limit]])

    def digest(self, memory: memoryview) -> bytes:
        return self._envelope.digest(memory[: self._block_bytes])

    def write(self, blocks: Sequence[Block], digests: Digests) -> Answers:
        return self.client.put(self._sealed(blocks, digests), self._ttl_seconds)

    def _sealed(self, blocks: Sequence[Block], digests: Digests) -> list[Item]:
        """The values to be written."""
        now = self._now()
        items = []
        for block, digest in zip(blocks, digests(), strict=True):
            body = block.memory[: self._block_bytes]
            if self._envelope.encrypts:
                head, body = self._envelope.encrypt(block.key, block.tenant, body, now)
                items.append(Item(self.name(block.key), memoryview(head), body))
                continue
            # Right behind the block, if there is room: then both are one piece of memory.
            room = self._head_room(block)
            room[:] = self._envelope.pack(block.key, digest, now)
            items.append(Item(self.name(block.key), room, body))
        return items

    def read(self, blocks: Sequence[Block]) -> Verify:
        items = [self._empty(block) for block in blocks]
        answers = self.client.get(items)
        return lambda: self._opened(blocks, items, answers)

    def _empty(self, block: Block) -> Item:
        """A value to be filled."""
        head = self._head_room(block)
        return Item(self.name(block.key), head, block.memory[: self._block_bytes])

    def _head_room(self, block: Block) -> memoryview:
        room = block.memory[self._block_bytes : self._block_bytes + HEAD_BYTES]
        return room if len(room) == HEAD_BYTES else memoryview(bytearray(HEAD_BYTES))

    def _opened(self, blocks: Sequence[Block], items: Sequence[Item], answers: Answers) -> Answers:
        """Judge what came."""
        now = self._now()
        return [
            self._envelope.open(block.key, block.tenant, bytes(item.head), item.body, now)
            if answer is None
            else answer
            for block, item, answer in zip(blocks, items, answers, strict=True)
        ]

    def drop(self, key: BlockKey, slot: Slot) -> None:
        if self._read_only:
            return
        try:
            self.client.remove([self.name(key)])
        except StoreError as error:
            log.warning("a damaged remote value could not be removed: %s", error)

    def scan(self) -> Iterator[list[Found]]:
        """Nothing: what others keep there is asked for by name, not listed."""
        return iter(())

    def close(self) -> None:
        self.client.close()
