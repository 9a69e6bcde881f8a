"""Which blocks are held in which tiers, and what has changed since routers were last told.

The engine's thread enters changes. The publisher's thread takes them, or a copy of everything. A
router identifies a block by its tokens, so only blocks whose tokens are known are published. A
block that was found on disk after a restart has only a key: it is published when the first request
with its tokens arrives.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from penstock.errors import BookError
from penstock.events import Event, NodeLost, Quarantined, Removed, Stored
from penstock.kv_events.salts import published_salt
from penstock.types import BlockKey, Tier

MAX_QUEUED = 100_000  # changes that wait for the publisher
MAX_REMOTE = 1 << 20  # blocks that only REMOTE holds: nobody tells us when it loses them

_BIT = {tier: 1 << number for number, tier in enumerate(Tier)}
_REMOTE_ONLY = _BIT[Tier.REMOTE]
_HASH_BYTES = 8


def short_hash(key: BlockKey) -> int:
    """A key as vLLM publishes its hashes: the last 64 bits, as a number."""
    return int.from_bytes(key[-_HASH_BYTES:], "big")


@dataclass(slots=True, eq=False)
class HeldBlock:
    """A block as routers identify it."""

    hash: int
    parent: int | None  # the hash of the block before it
    tokens: array[int]
    salt: str  # "" if every request may share it
    tiers: int = 0  # one bit for each tier that holds it

    def is_in(self, tier: Tier) -> bool:
        return bool(self.tiers & _BIT[tier])


class TierChange(NamedTuple):
    """A tier has started or stopped to hold a block."""

    tier: Tier
    block: HeldBlock
    is_stored: bool


class NamedSequence(NamedTuple):
    """The tokens and keys of one sequence."""

    keys: Sequence[BlockKey]  # of all full blocks
    tokens: Sequence[int]
    block_tokens: int
    tenant: str


class HeldBlocks:
    """An observer of the tiers below the device. The device's pool calls it directly."""

    def __init__(
        self,
        *,
        max_queued: int = MAX_QUEUED,
        max_remote: int = MAX_REMOTE,
        on_change: Callable[[], None] = lambda: None,
        on_dropped: Callable[[int], None] = lambda num_changes: None,
    ) -> None:
        """`on_change`: the first change waits, or `must_reset` was set. Called by any thread."""
        self._lock = Lock()
        self._named: dict[BlockKey, HeldBlock] = {}
        self._unnamed: dict[BlockKey, int] = {}  # tiers of blocks whose tokens are unknown
        self._remote_only: OrderedDict[BlockKey, None] = OrderedDict()
        self._max_remote = max_remote
        self._changes: deque[TierChange] = deque()
        self._max_queued = max_queued
        self._must_reset = False
        self._is_quarantined = False
        self.on_change = on_change
        self.on_dropped = on_dropped
        self.num_dropped = 0  # changes that did not fit the queue

    # The engine's thread.

    def name(self, sequence: NamedSequence, indices: Iterable[int]) -> None:
        """Remember the tokens of these blocks of a sequence: they are about to be stored."""
        keys, tokens, size = sequence.keys, sequence.tokens, sequence.block_tokens
        with self._lock:
            for index in indices:
                key = keys[index]
                if key in self._named:
                    continue
                block = HeldBlock(
                    short_hash(key),
                    short_hash(keys[index - 1]) if index else None,
                    array("I", tokens[index * size : (index + 1) * size]),
                    published_salt(sequence.tenant),
                )
                self._named[key] = block
                tiers = self._unnamed.pop(key, 0)
                for tier in Tier:
                    if tiers & _BIT[tier]:
                        self._add(block, tier)

    def recognize(self, sequence: NamedSequence) -> None:
        """Publish those blocks of a sequence that are held, but had no tokens until now."""
        if self._unnamed:
            self.name(sequence, [n for n, key in enumerate(sequence.keys) if key in self._unnamed])

    def stored(self, tier: Tier, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._store(tier, key)

    def removed(self, tier: Tier, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._remove(tier, key)

    def emptied(self, tier: Tier) -> None:
        """A tier has lost all its blocks."""
        bit = _BIT[tier]
        with self._lock:
            held = [key for key, block in self._named.items() if block.tiers & bit]
            held += [key for key, tiers in self._unnamed.items() if tiers & bit]
            for key in held:
                self._remove(tier, key)

    def __call__(self, event: Event) -> None:
        match event:
            case Stored(tier, keys):
                if not self._is_quarantined:
                    self.stored(tier, keys)
            case Removed(tier, keys):
                self.removed(tier, keys)
            case Quarantined():
                self._is_quarantined = True
                self._lower_emptied()
            case NodeLost():
                self._lower_emptied()

    def _lower_emptied(self) -> None:
        for tier in Tier:
            if tier is not Tier.DEVICE:
                self.emptied(tier)

    # The publisher's thread.

    def take(self, max_changes: int) -> list[TierChange] | None:
        """The oldest changes; None if some were dropped, so that `reset` is necessary."""
        with self._lock:
            if self._must_reset:
                return None
            changes = self._changes
            return [changes.popleft() for _ in range(min(max_changes, len(changes)))]

    def reset(self) -> list[HeldBlock]:
        """All blocks, each after its parent. Later changes are in the next `take`.

        A block may change while it is read. Then a change that says the same follows.
        """
        with self._lock:
            blocks = list(self._named.values())
            self._changes.clear()
            self._must_reset = False
        return list(_parents_first(blocks))

    def forget_changes(self) -> None:
        """Nobody listens: drop what waits. The next reader needs a `reset`."""
        with self._lock:
            self._changes.clear()
            self._must_reset = True

    def check(self) -> None:
        with self._lock:
            if self._named.keys() & self._unnamed.keys():
                raise BookError("a block has tokens and has none")
            if not all(block.tiers for block in self._named.values()):
                raise BookError("a block is published that no tier holds")
            remote = {key for key, b in self._named.items() if b.tiers == _REMOTE_ONLY}
            remote |= {key for key, tiers in self._unnamed.items() if tiers == _REMOTE_ONLY}
            if remote != set(self._remote_only):
                raise BookError("the blocks that only REMOTE holds are not those listed")

    # Locked.

    def _store(self, tier: Tier, key: BlockKey) -> None:
        block = self._named.get(key)
        if block is None:
            self._unnamed[key] = tiers = self._unnamed.get(key, 0) | _BIT[tier]
            self._note_remote(key, tiers)
        elif not block.tiers & _BIT[tier]:
            self._add(block, tier)
            self._note_remote(key, block.tiers)

    def _remove(self, tier: Tier, key: BlockKey) -> None:
        block = self._named.get(key)
        if block is None:
            tiers = self._unnamed.get(key, 0) & ~_BIT[tier]
            if tiers:
                self._unnamed[key] = tiers
            else:
                self._unnamed.pop(key, None)
        else:
            if block.tiers & _BIT[tier]:
                block.tiers &= ~_BIT[tier]
                self._queue(TierChange(tier, block, False))
            tiers = block.tiers
            if not tiers:
                del self._named[key]
        self._note_remote(key, tiers)

    def _add(self, block: HeldBlock, tier: Tier) -> None:
        block.tiers |= _BIT[tier]
        self._queue(TierChange(tier, block, True))

    def _note_remote(self, key: BlockKey, tiers: int) -> None:
        if tiers != _REMOTE_ONLY:
            self._remote_only.pop(key, None)
            return
        self._remote_only[key] = None
        if len(self._remote_only) > self._max_remote:
            self._remove(Tier.REMOTE, next(iter(self._remote_only)))

    def _queue(self, change: TierChange) -> None:
        if self._must_reset:
            return
        changes = self._changes
        if len(changes) >= self._max_queued:
            num_dropped = len(changes) + 1
            changes.clear()
            self._must_reset = True
            self.num_dropped += num_dropped
            self.on_dropped(num_dropped)
            self.on_change()
            return
        changes.append(change)
        if len(changes) == 1:
            self.on_change()


def _parents_first(blocks: Sequence[HeldBlock]) -> Iterator[HeldBlock]:
    by_hash = {block.hash: block for block in blocks}
    done: set[int] = set()
    for block in blocks:
        chain: list[HeldBlock] = []
        at: HeldBlock | None = block
        while at is not None and at.hash not in done:
            done.add(at.hash)
            chain.append(at)
            at = None if at.parent is None else by_hash.get(at.parent)
        yield from reversed(chain)
