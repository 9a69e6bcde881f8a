"""Ledger: the book of one tier. It knows which block is in which slot, its state and leases.

Pure: no I/O, no threads, no clock. The life of a block:

    claim -> FILLING -> commit -> READY -> evicted by a later claim, or dropped
                     -> abort  -> FREE

A leased block is READY and is neither evicted nor overwritten until it is released. A block that
is dropped while leased becomes DOOMED: lookups no longer find it, and its slot is freed when the
last lease ends. After a restart slots are UNKNOWN until `adopt` makes them READY or FREE.

Ledgers that divide one memory between them open and close slots: a CLOSED slot is not used, because
its memory belongs to another ledger.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import KeysView, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from penstock.errors import BookError
from penstock.policies.base import Policy
from penstock.types import BlockKey, Slot, State

_NEIGHBOURS = 16
_UNKNOWN, _FREE, _FILLING, _READY, _DOOMED, _CLOSED = (int(state) for state in State)


class Claim(NamedTuple):
    slots: tuple[Slot, ...]
    evicted: tuple[BlockKey, ...]


class Ledger:
    """Every method is atomic: when it raises BookError or returns None, nothing has changed."""

    def __init__(
        self, capacity: int, policy: Policy, *, recovering: bool = False, closed: bool = False
    ) -> None:
        """If `recovering`, all slots are UNKNOWN at first; if `closed`, they are CLOSED."""
        if capacity < 1:
            raise BookError(f"a ledger needs at least one slot, got {capacity}")
        self._policy = policy
        self._slot_of: dict[BlockKey, Slot] = {}
        self._key_in: list[BlockKey | None] = [None] * capacity
        self._parents: list[BlockKey | None] = [None] * capacity  # by slot; None if unknown
        state = _CLOSED if closed else _UNKNOWN if recovering else _FREE
        self._state = bytearray([state]) * capacity
        self._num_leases = array("I", bytes(4 * capacity))
        # Slots from `_fresh` on were never used. They are handed out in order, so that blocks
        # claimed together are neighbours and one transfer moves them as one run.
        self._fresh = capacity if recovering or closed else 0
        self._freed: list[Slot] = []
        self._num_filling = 0
        self._num_leased = 0  # READY or DOOMED slots with at least one lease
        self._num_doomed = 0
        self._num_closed = capacity if closed else 0
        self._closing: set[Slot] = set()  # slots in use that close as soon as nothing uses them

    @property
    def capacity(self) -> int:
        """How many slots are open, and will stay so."""
        return len(self._key_in) - self._num_closed - len(self._closing)

    @property
    def num_free(self) -> int:
        return len(self._freed) + len(self._key_in) - self._fresh

    @property
    def num_leased(self) -> int:
        return self._num_leased

    @property
    def num_used(self) -> int:
        """Slots that hold a block or are being filled."""
        return len(self._slot_of) + self._num_doomed

    @property
    def num_claimable(self) -> int:
        """How many blocks a claim could take now: free slots plus idle blocks."""
        ready_leased = self._num_leased - self._num_doomed
        return self.num_free + len(self._slot_of) - self._num_filling - ready_leased

    @property
    def num_filling(self) -> int:
        return self._num_filling

    @property
    def held(self) -> KeysView[BlockKey]:
        """The blocks that are here or on their way here. A live view, for fast lookups."""
        return self._slot_of.keys()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slot_of

    def slot_of(self, key: BlockKey) -> Slot | None:
        return self._slot_of.get(key)

    def is_ready(self, key: BlockKey) -> bool:
        slot = self._slot_of.get(key)
        return slot is not None and self._state[slot] == _READY

    def are_ready(self, keys: Sequence[BlockKey]) -> bool:
        slots = [slot for slot in map(self._slot_of.get, keys) if slot is not None]
        states = bytes(map(self._state.__getitem__, slots))
        return len(slots) == len(keys) and states.count(_READY) == len(slots)

    def is_filling(self, key: BlockKey) -> bool:
        slot = self._slot_of.get(key)
        return slot is not None and self._state[slot] == _FILLING

    def admits(self, key: BlockKey) -> bool:
        """Whether the policy would accept this block. Changes nothing."""
        return self._policy.admit(key)

    def claim(
        self, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None] = ()
    ) -> Claim | None:
        """Take a slot for each key, evicting idle blocks if needed. None if there is no room.

        `parents` names each block's parent in its prompt, or None if it is unknown.
        """
        if len(set(keys)) != len(keys):
            raise BookError("a claim names a block twice")
        if parents and len(parents) != len(keys):
            raise BookError(f"a claim of {len(keys)} blocks names {len(parents)} parents")
        if not self._slot_of.keys().isdisjoint(keys):
            again = next(key for key in keys if key in self._slot_of)
            raise BookError(f"cannot claim a block that is already {self._describe(again)}")
        if len(keys) > self.num_claimable:
            return None
        num_short = len(keys) - self.num_free
        victims: list[BlockKey] = []
        if num_short > 0:
            victims = self._policy.pick(num_short, self._is_idle)
            if not victims:
                raise BookError("the policy found fewer idle blocks than the ledger counts")
        slots = self._take(len(keys) - len(victims))
        if victims:
            slots += map(self._slot_of.pop, victims)
            slots.sort()  # neighbours become one run
        parents = parents or [None] * len(keys)
        self._slot_of.update(zip(keys, slots, strict=True))
        _put_all(self._key_in, slots, keys)
        _put_all(self._parents, slots, parents)
        _put_all(self._state, slots, bytes([_FILLING]) * len(slots))
        self._num_filling += len(keys)
        return Claim(tuple(slots), tuple(victims))

    def commit(self, keys: Sequence[BlockKey]) -> None:
        """Offer claimed blocks from now on, because they have arrived."""
        slots = self._filling(keys)
        _put_all(self._state, slots, bytes([_READY]) * len(slots))
        self._policy.insert_all(keys, [self._parents[slot] for slot in slots])
        self._num_filling -= len(slots)

    def abort(self, keys: Sequence[BlockKey]) -> None:
        """Free the slots of claimed blocks that will not arrive."""
        for key, slot in zip(keys, self._filling(keys), strict=True):
            del self._slot_of[key]
            self._free(slot)
            self._num_filling -= 1

    def lease(self, keys: Sequence[BlockKey]) -> tuple[Slot, ...]:
        """Keep these READY blocks in the returned slots until they are released.

        A lease does not count as a use; call `touch` for that.
        """
        for key in keys:
            if not self.is_ready(key):
                raise BookError(f"cannot lease a block that is {self._describe(key)}")
        slots = tuple(self._slot_of[key] for key in keys)
        self._count_leases(slots)
        return slots

    def use_ready(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        """Lease and touch the READY blocks among `keys`; returns None in place of the others."""
        state = self._state
        found = [
            slot if slot is not None and state[slot] == _READY else None
            for slot in map(self._slot_of.get, keys)
        ]
        used = [slot for slot in found if slot is not None]
        self._count_leases(used)
        if len(used) < len(found):
            keys = [key for key, slot in zip(keys, found, strict=True) if slot is not None]
        self._policy.touch_all(keys)
        return found

    def release(self, slots: Sequence[Slot]) -> None:
        """End one lease on each slot. By slot, because a doomed block's key may be here again."""
        num_leases = self._num_leases
        if len(set(slots)) < len(slots):
            for slot, count in Counter(slots).items():
                if num_leases[slot] < count:
                    raise BookError(f"slot {slot} is released more often than leased")
        elif 0 in map(num_leases.__getitem__, slots):
            slot = next(slot for slot in slots if not num_leases[slot])
            raise BookError(f"slot {slot} is released more often than leased")
        state = self._state
        for slot in slots:
            num_left = num_leases[slot] = num_leases[slot] - 1
            if not num_left:
                self._num_leased -= 1
                if state[slot] == _DOOMED:
                    self._num_doomed -= 1
                    self._free(slot)

    def drop(self, key: BlockKey) -> None:
        """Stop offering a READY block. If it is leased, it keeps its slot until released."""
        if not self.is_ready(key):
            raise BookError(f"cannot drop a block that is {self._describe(key)}")
        slot = self._slot_of.pop(key)
        self._policy.forget(key)
        if self._num_leases[slot]:
            self._state[slot] = _DOOMED
            self._num_doomed += 1
        else:
            self._free(slot)

    def touch(self, key: BlockKey) -> None:
        """Note a use of a block, if it is READY."""
        if self.is_ready(key):
            self._policy.touch(key)

    def demote(self, key: BlockKey) -> None:
        """Evict a block before all others, if it is READY."""
        if self.is_ready(key):
            self._policy.demote(key)

    def adopt(self, slot: Slot, key: BlockKey | None) -> bool:
        """Enter what an UNKNOWN slot was found to hold. False if the block is already elsewhere."""
        if self._state[slot] != _UNKNOWN:
            raise BookError(f"slot {slot} is adopted twice")
        if key is None or key in self._slot_of:
            self._free(slot)
            return key is None
        self._slot_of[key] = slot
        self._key_in[slot] = key
        self._state[slot] = _READY
        # Parents are not stored on disk. Guess: neighbouring slots usually belong to one prompt.
        parent = self._key_in[slot - 1] if slot % _NEIGHBOURS else None
        self._policy.insert(key, parent)
        return True

    def open(self, slots: Sequence[Slot]) -> None:
        """Start using CLOSED slots."""
        if not self._are(slots, _CLOSED):
            raise BookError("a slot is opened that is not closed")
        if len(set(slots)) < len(slots):
            raise BookError("a slot to open is named twice")
        self._num_closed -= len(slots)
        for slot in slots:
            self._state[slot] = _FREE
            heappush(self._freed, slot)

    def close(self, slots: Sequence[Slot]) -> list[BlockKey]:
        """Stop using slots; returns the blocks that are no longer offered.

        Leased blocks keep their slots until released. Blocks on their way here still arrive: call
        this again until `are_closed`.
        """
        if self._fresh < len(self._key_in):
            raise BookError("only a ledger that began closed can close slots")
        dropped = [
            key
            for slot in slots
            if self._state[slot] == _READY and (key := self._key_in[slot]) is not None
        ]
        for key in dropped:
            self.drop(key)
        free = {slot for slot in slots if self._state[slot] == _FREE}
        if free:
            self._freed = [slot for slot in self._freed if slot not in free]
            heapify(self._freed)
            for slot in free:
                self._shut(slot)
        self._closing.update(slot for slot in slots if self._state[slot] != _CLOSED)
        return dropped

    def are_closed(self, slots: Sequence[Slot]) -> bool:
        return self._are(slots, _CLOSED)

    def leases(self) -> dict[Slot, int]:
        """How many leases each leased slot has, for the audit."""
        return {Slot(slot): num for slot, num in enumerate(self._num_leases) if num}

    def filling_keys(self) -> set[BlockKey]:
        return {key for key, slot in self._slot_of.items() if self._state[slot] == _FILLING}

    def ready_keys(self) -> list[BlockKey]:
        return [key for key, slot in self._slot_of.items() if self._state[slot] == _READY]

    def check(self) -> None:
        """Raise BookError at the first thing that does not add up."""
        counts = [self._state.count(state) for state in range(len(State))]
        free = set(self._freed)
        free.update(Slot(slot) for slot in range(self._fresh, self.capacity))
        _expect(len(free) == self.num_free == counts[_FREE], "free slots are miscounted")
        _expect(counts[_FILLING] == self._num_filling, "filling slots are miscounted")
        _expect(counts[_DOOMED] == self._num_doomed, "doomed slots are miscounted")
        _expect(
            len(self._policy) == counts[_READY], "the policy knows other blocks than the ledger"
        )
        _expect(len(self._slot_of) == counts[_READY] + counts[_FILLING], "the index has extra keys")
        for key, slot in self._slot_of.items():
            _expect(self._key_in[slot] == key, "the index and the slots disagree")
            _expect(self._state[slot] in (_READY, _FILLING), "an indexed slot holds no block")
        num_leased = 0
        for slot in self.leases():
            num_leased += 1
            _expect(self._state[slot] in (_READY, _DOOMED), "a lease on a slot with no block")
        _expect(num_leased == self._num_leased, "leased slots are miscounted")
        for slot in free:
            _expect(self._key_in[slot] is None, "a free slot still names a block")
        _expect(counts[_CLOSED] == self._num_closed, "closed slots are miscounted")
        for slot in self._closing:
            in_use = self._state[slot] not in (_FREE, _CLOSED)
            _expect(in_use, "a slot that nothing uses is not closed")

    def _is_idle(self, key: BlockKey) -> bool:
        return not self._num_leases[self._slot_of[key]]

    def _count_leases(self, slots: Sequence[Slot]) -> None:
        num_leases, num_new = self._num_leases, 0
        for slot in slots:
            if not num_leases[slot]:
                num_new += 1
            num_leases[slot] += 1
        self._num_leased += num_new

    def _take(self, count: int) -> list[Slot]:
        num_recycled = min(count, len(self._freed))
        # Lowest slots first: neighbours become one run, and a disk fills from its start.
        slots = [heappop(self._freed) for _ in range(num_recycled)]
        num_fresh = count - num_recycled
        slots.extend(map(Slot, range(self._fresh, self._fresh + num_fresh)))
        self._fresh += num_fresh
        return slots

    def _free(self, slot: Slot) -> None:
        self._key_in[slot] = None
        self._parents[slot] = None
        if slot in self._closing:
            self._shut(slot)
            return
        self._state[slot] = _FREE
        heappush(self._freed, slot)

    def _shut(self, slot: Slot) -> None:
        self._closing.discard(slot)
        self._state[slot] = _CLOSED
        self._num_closed += 1

    def _filling(self, keys: Sequence[BlockKey]) -> list[Slot]:
        slots = [slot for slot in map(self._slot_of.get, keys) if slot is not None]
        if len(slots) < len(keys) or not self._are(slots, _FILLING):
            wrong = next(key for key in keys if not self.is_filling(key))
            raise BookError(f"cannot commit or abort a block that is {self._describe(wrong)}")
        return slots

    def _are(self, slots: Sequence[Slot], state: int) -> bool:
        return bytes(map(self._state.__getitem__, slots)).count(state) == len(slots)

    def _describe(self, key: BlockKey) -> str:
        slot = self._slot_of.get(key)
        return "absent" if slot is None else State(self._state[slot]).name


def _put_all(book: Any, slots: Sequence[Slot], values: Sequence[Any]) -> None:
    """Set `book[slot] = value` for each slot; in one go if they are neighbours, as most are."""
    if slots and list(slots) == list(range(slots[0], slots[0] + len(slots))):
        book[slots[0] : slots[0] + len(slots)] = values
        return
    for slot, value in zip(slots, values, strict=True):
        book[slot] = value


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BookError(f"the ledger does not add up: {otherwise}")
