"""Checkpoints: blocks that are of use only together, and are therefore evicted together.

A window or a state needs all its blocks at one boundary. If HOST or DISK loses one of them, the
rest of that checkpoint only occupies room, so it is demoted there: the next claims evict it.
Successive windows overlap, so a block may belong to several checkpoints. It is demoted once all of
them are broken.

Pure. Memory is bounded: a checkpoint is forgotten when its last block has left HOST and DISK, and
the oldest ones are forgotten if blocks belong to very many. Forgetting one costs nothing but room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.books.ledger import Ledger
from penstock.books.ledgers import Ledgers
from penstock.books.retention import Retention
from penstock.errors import BookError
from penstock.types import BlockKey, Tier

_MAX_CHECKPOINTS_PER_BLOCK = 4  # on average


@dataclass(slots=True, eq=False)
class _Checkpoint:
    keys: tuple[BlockKey, ...]
    broken: set[Tier] = field(default_factory=set)  # tiers that have lost a block of it
    # The position of a block that was in HOST or DISK when last looked at. Looking there first
    # makes it cheap to see that a checkpoint is not gone.
    witness: int = 0


class Checkpoints:
    """The checkpoints in HOST and DISK. `Ledgers` reports what is stored and what is lost."""

    def __init__(self, ledgers: Ledgers, retention: Retention) -> None:
        self._retention = retention
        self._ledgers: dict[Tier, Ledger] = {
            tier: ledger for tier, ledger in ledgers if tier in (Tier.HOST, Tier.DISK)
        }
        self._num_members = 0  # the sum over all checkpoints
        self._checkpoints: OrderedDict[tuple[BlockKey, ...], _Checkpoint] = OrderedDict()
        self._of: dict[BlockKey, list[_Checkpoint]] = {}  # by block
        # To be demoted in DISK on arrival. `Retention` does the same for HOST.
        self._late: set[BlockKey] = set()
        ledgers.on_stored.append(self._stored)
        ledgers.on_lost.append(self._lost)

    def __len__(self) -> int:
        return len(self._checkpoints)

    @property
    def _max_members(self) -> int:
        num_slots = sum(ledger.capacity for ledger in self._ledgers.values())
        return _MAX_CHECKPOINTS_PER_BLOCK * num_slots

    def keep(self, keys: Sequence[BlockKey]) -> None:
        """Evict these blocks together from now on. Ignored if HOST and DISK hold none of them."""
        name = tuple(dict.fromkeys(keys))
        checkpoint = self._checkpoints.get(name)
        if checkpoint is None:
            checkpoint = _Checkpoint(name)
            if not self._find_witness(checkpoint):
                return
            self._checkpoints[name] = checkpoint
            self._num_members += len(name)
            for key in name:
                self._of.setdefault(key, []).append(checkpoint)
        checkpoint.broken.clear()  # what is missing is expected to arrive
        self._checkpoints.move_to_end(name)
        while self._num_members > self._max_members:
            self._forget(next(iter(self._checkpoints.values())))

    def supersede(self, keys: Sequence[BlockKey]) -> None:
        """Let HOST and DISK evict this checkpoint first, because a later one has replaced it.

        Blocks that another checkpoint needs are left alone.
        """
        checkpoint = self._checkpoints.get(tuple(dict.fromkeys(keys)))
        if checkpoint is not None:
            self._forget(checkpoint)
        for tier in self._ledgers:
            self._demote(tier, keys)

    def check(self) -> None:
        """Raise BookError if the checkpoints do not add up."""
        num_members = sum(map(len, self._checkpoints))
        of_blocks = sum(map(len, self._of.values()))
        if not num_members == of_blocks == self._num_members <= self._max_members:
            raise BookError("the blocks of checkpoints are miscounted")
        for name, checkpoint in self._checkpoints.items():
            if not all(checkpoint in self._of.get(key, ()) for key in name):
                raise BookError("a block does not know its checkpoint")
            if not any(key in book for book in self._ledgers.values() for key in name):
                raise BookError("a checkpoint is remembered although all its blocks are gone")

    def _stored(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """Blocks have arrived. A checkpoint that is complete again is no longer broken."""
        if tier not in self._ledgers or not (self._checkpoints or self._late):
            return
        ledger = self._ledgers[tier]
        if tier is Tier.DISK and self._late:
            late = [key for key in keys if key in self._late]
            self._late.difference_update(late)
            self._demote(tier, late)
        for checkpoint in self._touching(keys):
            if tier in checkpoint.broken and all(key in ledger for key in checkpoint.keys):
                checkpoint.broken.discard(tier)
                for key in checkpoint.keys:
                    ledger.touch(key)  # undo the demotion

    def _lost(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """Blocks were evicted or dropped, or did not arrive."""
        if tier not in self._ledgers or not self._checkpoints:
            return
        touched = self._touching(keys)
        # Mark all before demoting any: a block of two that broke together is of no use either.
        fresh = [checkpoint for checkpoint in touched if tier not in checkpoint.broken]
        for checkpoint in fresh:
            checkpoint.broken.add(tier)
        self._demote(tier, dict.fromkeys(key for each in fresh for key in each.keys))
        for checkpoint in touched:
            if not self._find_witness(checkpoint):
                self._forget(checkpoint)

    def _touching(self, keys: Sequence[BlockKey]) -> list[_Checkpoint]:
        of = self._of
        return list(dict.fromkeys(each for key in keys if key in of for each in of[key]))

    def _demote(self, tier: Tier, keys: Iterable[BlockKey]) -> None:
        """Demote those blocks that no unbroken checkpoint needs in this tier."""
        of = self._of
        useless = [key for key in keys if all(tier in each.broken for each in of.get(key, ()))]
        if tier is Tier.HOST:
            self._retention.demote(useless)
            return
        ledger = self._ledgers[tier]
        self._late = {key for key in self._late if ledger.is_filling(key)}
        for key in useless:
            ledger.demote(key)
            if ledger.is_filling(key):
                self._late.add(key)

    def _find_witness(self, checkpoint: _Checkpoint) -> bool:
        """Whether HOST or DISK has a block of it."""
        keys, start = checkpoint.keys, checkpoint.witness
        for position in (*range(start, len(keys)), *range(start)):
            if any(keys[position] in ledger for ledger in self._ledgers.values()):
                checkpoint.witness = position
                return True
        return False

    def _forget(self, checkpoint: _Checkpoint) -> None:
        del self._checkpoints[checkpoint.keys]
        self._num_members -= len(checkpoint.keys)
        for key in checkpoint.keys:
            self._of[key].remove(checkpoint)
            if not self._of[key]:
                del self._of[key]
