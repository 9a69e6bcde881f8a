"""Several blocks in one value, for stores that are faster with large values.

An object store takes tens of milliseconds and costs money for every request, whatever its size,
and serves one large object faster than many small ones; vendors advise 8 to 16 MiB. So consecutive
blocks of a prompt are written together, up to `PACK_BYTES` per pack. A pack is the concatenated
values of its blocks, each with its own head:

    head of block 0 | block 0 | head of block 1 | block 1 | ...

A pack is named after its last block, whose key depends on all blocks before it. A reader that has
a prompt's keys in order finds the pack by that name, learns from its size how many blocks it has,
and so knows which. It reads only the stretch of the pack with the blocks it needs; adjacent
stretches are one request. The drawback: if two prompts diverge in the middle of a pack, only the
prompt that wrote the pack can use its beginning.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.errors import Corrupt, Missing
from penstock.stores.base import Answers, Block, Digests, Verify
from penstock.stores.envelope import HEAD_BYTES, Envelope
from penstock.stores.remote import Client, Item, RemoteStore
from penstock.types import BlockKey, BlockSpec, Slot

PACK_BYTES = 16 << 20
_MAX_BLOCKS = 16  # a reader must try this many names to find the end of a short pack
_MAX_PLACES = 1 << 18  # about 50 MB of memory; forgotten places are looked up again
_MAX_ROUNDS = 8


class PackStretch(NamedTuple):
    """Consecutive values in a pack, starting at byte `start`."""

    name: str
    start: int
    items: Sequence[Item]

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


class PackClient(Client, Protocol):
    """A client of a store that is faster with large values. One answer per pack or stretch."""

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """The size of each value in bytes, None if it does not exist. Raises StoreError."""

    def put_packs(self, packs: Sequence[Sequence[Item]]) -> Answers:
        """Write each pack under the name of its last value."""

    def get_stretches(self, stretches: Sequence[PackStretch]) -> Answers: ...


class _Place(NamedTuple):
    last: BlockKey  # the pack's last block
    number: int  # the block's position in the pack


class PackedStore(RemoteStore):
    def __init__(
        self, client: PackClient, spec: BlockSpec, envelope: Envelope, **options: Any
    ) -> None:
        super().__init__(client, spec, envelope, **options)
        self._packs = client
        self._value_bytes = HEAD_BYTES + spec.block_bytes
        self._max_blocks = max(1, min(_MAX_BLOCKS, PACK_BYTES // spec.block_bytes))
        self._places: OrderedDict[BlockKey, _Place] = OrderedDict()
        self._lock = threading.Lock()

    def exists(self, keys: Sequence[BlockKey], limit: int) -> list[bool]:
        """As in `RemoteStore`. Blocks found earlier are not looked up again."""
        limit = min(limit, len(keys))
        end = min(len(keys), limit + self._max_blocks - 1)  # the last block's pack may end here
        with self._lock:
            known = [key in self._places for key in keys[:end]]
        for _ in range(_MAX_ROUNDS):
            first = known.index(False) if False in known else end
            if first >= limit:
                break
            # Most packs are full, and each starts where the previous one ends.
            self._ask(keys, known, range(first + self._max_blocks - 1, end, self._max_blocks))
            if not known[first]:
                self._ask(keys, known, range(first, min(first + 2 * self._max_blocks, end)))
            if not known[first]:
                break
        return known[:limit]

    def write(self, blocks: Sequence[Block], digests: Digests) -> Answers:
        packs: list[list[Item]] = []
        previous: BlockKey | None = None
        for block, item in zip(blocks, self._sealed(blocks, digests), strict=True):
            continues = previous is not None and block.parent == previous
            previous = block.key
            if continues and len(packs[-1]) < self._max_blocks:
                packs[-1].append(item)
            else:
                packs.append([item])
        answers: Answers = []
        for pack, answer in zip(packs, self._packs.put_packs(packs), strict=True):
            if answer is None:
                start = len(answers)
                self._note([block.key for block in blocks[start : start + len(pack)]])
            answers += [answer] * len(pack)
        return answers

    def read(self, blocks: Sequence[Block]) -> Verify:
        with self._lock:
            places = [self._places.get(block.key, _Place(block.key, 0)) for block in blocks]
        items = [self._empty(block) for block in blocks]
        runs: list[list[int]] = []
        for index, place in enumerate(places):
            before = places[index - 1] if index else None
            if before is not None and place == _Place(before.last, before.number + 1):
                runs[-1].append(index)
            else:
                runs.append([index])
        stretches = [
            PackStretch(
                self.name(places[run[0]].last),
                places[run[0]].number * self._value_bytes,
                [items[index] for index in run],
            )
            for run in runs
        ]
        answers: Answers = []
        for run, answer in zip(runs, self._packs.get_stretches(stretches), strict=True):
            answers += [answer] * len(run)

        def verify() -> Answers:
            judged = self._opened(blocks, items, answers)
            found = list(zip(blocks, places, judged, strict=True))
            self._forget(block.key for block, _, error in found if isinstance(error, Missing))
            # A damaged pack is dropped whole, so none of its blocks may count as stored.
            damaged = {place.last for _, place, error in found if isinstance(error, Corrupt)}
            return [
                Corrupt("another block of its pack is damaged")
                if error is None and place.last in damaged
                else error
                for _, place, error in found
            ]

        return verify

    def drop(self, key: BlockKey, slot: Slot) -> None:
        """Delete the whole pack. It is written again when its blocks are used again."""
        with self._lock:
            last = self._places.get(key, _Place(key, 0)).last
            gone = [other for other, place in self._places.items() if place.last == last]
        self._forget(gone)
        super().drop(last, slot)

    def _ask(self, keys: Sequence[BlockKey], known: list[bool], ends: Sequence[int]) -> None:
        """Look up packs that end at these positions."""
        ends = [end for end in ends if not known[end]]
        sizes = self._packs.sizes([self.name(keys[end]) for end in ends])
        for end, size in zip(ends, sizes, strict=True):
            num_blocks = 0 if size is None else size // self._value_bytes
            start = max(0, end + 1 - num_blocks)  # the pack may start before the keys we have
            mine = keys[start : end + 1]
            self._note(mine, num_blocks - len(mine))
            known[start : end + 1] = [True] * len(mine)

    def _note(self, keys: Sequence[BlockKey], first: int = 0) -> None:
        """Remember that these blocks end a pack and that the first is at position `first` in it."""
        with self._lock:
            for number, key in enumerate(keys, first):
                self._places[key] = _Place(keys[-1], number)
                self._places.move_to_end(key)
            while len(self._places) > _MAX_PLACES:
                self._places.popitem(last=False)

    def _forget(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._places.pop(key, None)
