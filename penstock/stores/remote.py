"""REMOTE: blocks by key in a store that instances share, through one of several clients.

A client moves bytes by name; this file decides what they mean and verifies them. Every value is a
head (see `envelope`) and a body of exactly one block.
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
    """A value to be moved: a put reads `head` and `body`, a get fills them."""

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
    """Moves bytes by name. Thread-safe; no call takes longer than its timeout.

    `put` and `get` return one answer per block and do not raise for a store's faults; the other
    calls raise StoreError. A value of another length than requested is Corrupt.
    """

    def put(self, items: Sequence[Item], ttl_seconds: float | None) -> Answers: ...

    def get(self, items: Sequence[Item]) -> Answers: ...

    def exists(self, names: Sequence[str]) -> list[bool]: ...

    def remove(self, names: Sequence[str]) -> None: ...

    def find(self, prefix: str) -> Iterator[list[Listed]]:
        """All values whose name starts with `prefix`, in pages."""

    def register(self, arena: Arena) -> None:
        """Announce the memory of the blocks, for clients that register it with a network card."""
        return

    def close(self) -> None:
        return


class RemoteStore(WholeBlocks):
    """Finds a block by its key and ignores slots."""

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
        """Which of the first `limit` keys exist, in as few round trips as possible.

        The keys are those of a prompt, in order. Raises StoreError.
        """
        return self.client.exists([self.name(key) for key in keys[:limit]])

    def digest(self, memory: memoryview) -> bytes:
        return self._envelope.digest(memory[: self._block_bytes])

    def write(self, blocks: Sequence[Block], digests: Digests) -> Answers:
        return self.client.put(self._sealed(blocks, digests), self._ttl_seconds)

    def _sealed(self, blocks: Sequence[Block], digests: Digests) -> list[Item]:
        """The values to write."""
        now = self._now()
        items = []
        for block, digest in zip(blocks, digests(), strict=True):
            body = block.memory[: self._block_bytes]
            if self._envelope.encrypts:
                head, body = self._envelope.encrypt(block.key, block.tenant, body, now)
                items.append(Item(self.name(block.key), memoryview(head), body))
                continue
            # Directly after the block if there is room: then both are one piece of memory.
            room = self._head_room(block)
            room[:] = self._envelope.pack(block.key, digest, now)
            items.append(Item(self.name(block.key), room, body))
        return items

    def read(self, blocks: Sequence[Block]) -> Verify:
        items = [self._empty(block) for block in blocks]
        answers = self.client.get(items)
        return lambda: self._opened(blocks, items, answers)

    def _empty(self, block: Block) -> Item:
        """A value to read into."""
        head = self._head_room(block)
        return Item(self.name(block.key), head, block.memory[: self._block_bytes])

    def _head_room(self, block: Block) -> memoryview:
        room = block.memory[self._block_bytes : self._block_bytes + HEAD_BYTES]
        return room if len(room) == HEAD_BYTES else memoryview(bytearray(HEAD_BYTES))

    def _opened(self, blocks: Sequence[Block], items: Sequence[Item], answers: Answers) -> Answers:
        """Verify what was read."""
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
            log.warning("a damaged remote value could not be deleted: %s", error)

    def scan(self) -> Iterator[list[Found]]:
        """Nothing: remote blocks are looked up by name, not listed."""
        return iter(())

    def close(self) -> None:
        self.client.close()
