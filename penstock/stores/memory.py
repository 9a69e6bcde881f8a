"""A store in memory, with faults on demand, for clients that test their own error handling.

faults = Faults()
store = MemoryStore(spec, num_slots=64, faults=faults)
faults.corrupting = True        # from now on every get returns a flipped bit
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

import xxhash

from penstock.config.urls import without_password
from penstock.errors import ConfigError, Corrupt, Full, Missing, StoreError
from penstock.stores.base import Answers, Block, Digests, Found, Verify, WholeBlocks
from penstock.stores.remote import Client, Item, Listed, absent, wrong_size
from penstock.types import BlockKey, BlockSpec, Slot


@dataclass(slots=True)
class Faults:
    """What goes wrong from now on. `only` restricts it to some blocks."""

    failing: bool = False
    corrupting: bool = False
    full: bool = False
    only: Callable[[BlockKey], bool] = lambda key: True
    # While it is cleared, every put and get waits: use it to make the store slow.
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()


class MemoryStore(WholeBlocks):
    def __init__(self, spec: BlockSpec, num_slots: int, faults: Faults | None = None) -> None:
        self.num_slots = num_slots
        self.faults = faults or Faults()
        self._block_bytes = spec.block_bytes
        self._held: dict[Slot, tuple[BlockKey, bytes, bytes]] = {}

    def digest(self, memory: memoryview) -> bytes:
        return xxhash.xxh3_128_digest(memory[: self._block_bytes])

    def write(self, blocks: Sequence[Block], digests: Digests) -> Answers:
        pairs = zip(blocks, digests(), strict=True)
        return [self._write(block, digest) for block, digest in pairs]

    def read(self, blocks: Sequence[Block]) -> Verify:
        answers = [self._read(block) for block in blocks]

        def verify() -> Answers:
            return [
                self._verify(block, answer) if isinstance(answer, bytes) else answer
                for block, answer in zip(blocks, answers, strict=True)
            ]

        return verify

    def drop(self, key: BlockKey, slot: Slot) -> None:
        if slot in self._held and self._held[slot][0] == key:
            del self._held[slot]

    def scan(self) -> Iterator[list[Found]]:
        for number in range(self.num_slots):
            slot = Slot(number)
            yield [(slot, self._held[slot][0] if slot in self._held else None)]

    def close(self) -> None:
        self._held.clear()

    def _write(self, block: Block, digest: bytes) -> StoreError | None:
        error = self._fault(block, Full("full on request") if self.faults.full else None)
        self._held.pop(block.slot, None)
        if error is None:
            data = bytes(block.memory[: self._block_bytes])
            self._held[block.slot] = (block.key, data, digest)
        return error

    def _read(self, block: Block) -> StoreError | bytes:
        """Copy the block. Returns its stored digest, or an error."""
        error = self._fault(block, None)
        if error is not None:
            return error
        key, data, digest = self._held.get(block.slot, (None, b"", b""))
        if key != block.key:
            return Missing(f"slot {block.slot} does not hold this block")
        block.memory[: self._block_bytes] = data
        if self.faults.corrupting and self.faults.only(block.key):
            block.memory[self._block_bytes // 2] ^= 1
        return digest

    def _verify(self, block: Block, digest: bytes) -> StoreError | None:
        if self.digest(block.memory) == digest:
            return None
        return Corrupt(f"slot {block.slot} fails its checksum")

    def _fault(self, block: Block, error: StoreError | None) -> StoreError | None:
        if not self.faults.only(block.key):
            return None
        self.faults.gate.wait()
        return StoreError("failed on request") if self.faults.failing else error


_shared: dict[str, MemoryClient] = {}


def open_shared(url: str, *, timeout_seconds: float) -> MemoryClient:
    """memory://name?gb_per_second=0.5: one store per name, shared within this process."""
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query))
    try:
        rate = float(given.pop("gb_per_second", "inf"))
    except ValueError:
        rate = 0.0
    if given or not parts.netloc or not rate > 0:
        raise ConfigError(
            f"remote.url is {without_password(url)!r}: expected memory://name or "
            "memory://name?gb_per_second=0.5."
        )
    store = _shared.setdefault(parts.netloc, MemoryClient())
    store.bytes_per_second = rate * 1e9
    return store


def forget_shared(name: str) -> None:
    """Delete a store and its values, which otherwise outlive the instances that use it."""
    _shared.pop(name, None)


class MemoryClient(Client):
    """A remote store's client that keeps values in `values`, for tests to read and change.

    `bytes_per_second` limits all callers together, like one shared link.
    """

    def __init__(self, faults: Faults | None = None, *, bytes_per_second: float = math.inf) -> None:
        self.faults = faults or Faults()
        self.values: dict[str, bytes] = {}
        self.bytes_per_second = bytes_per_second
        self._link_is_free = 0.0
        self._link = threading.Lock()

    def put(self, items: Sequence[Item], ttl_seconds: float | None) -> Answers:
        self.faults.gate.wait()
        if self.faults.failing or self.faults.full:
            error = Full("full on request") if self.faults.full else StoreError("failed on request")
            return [error] * len(items)
        for item in items:
            self.values[item.name] = bytes(item.head) + bytes(item.body)
        return [None] * len(items)

    def get(self, items: Sequence[Item]) -> Answers:
        self.faults.gate.wait()
        self._cross(sum(item.num_bytes for item in items if item.name in self.values))
        return [self._get(item) for item in items]

    def exists(self, names: Sequence[str]) -> list[bool]:
        self.faults.gate.wait()
        if self.faults.failing:
            raise StoreError("failed on request")
        return [name in self.values for name in names]

    def remove(self, names: Sequence[str]) -> None:
        self.faults.gate.wait()
        for name in names:
            self.values.pop(name, None)

    def find(self, prefix: str) -> Iterator[list[Listed]]:
        self.faults.gate.wait()
        yield [Listed(n, len(v)) for n, v in self.values.items() if n.startswith(prefix)]

    def _cross(self, num_bytes: int) -> None:
        with self._link:
            begin = max(time.monotonic(), self._link_is_free)
            self._link_is_free = begin + num_bytes / self.bytes_per_second
            end = self._link_is_free
        time.sleep(max(0.0, end - time.monotonic()))

    def _get(self, item: Item) -> StoreError | None:
        if self.faults.failing:
            return StoreError("failed on request")
        value = self.values.get(item.name)
        if value is None:
            return absent()
        if len(value) != item.num_bytes:
            return wrong_size(len(value), item.num_bytes)
        item.head[:] = value[: len(item.head)]
        item.body[:] = value[len(item.head) :]
        if self.faults.corrupting:
            item.body[len(item.body) // 2] ^= 1
        return None
