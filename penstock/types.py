"""The words of the house as types. Plain data only: it crosses process boundaries as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import NamedTuple, NewType

BlockKey = NewType("BlockKey", bytes)
"""32 bytes naming a block's content (see `penstock.keys`)."""

KEY_BYTES = 32

NO_PARENTS: Mapping[int, BlockKey | None] = MappingProxyType({})
"""A row of blocks each of which follows the one before; what the first follows is not known."""

Slot = NewType("Slot", int)
"""An index into a tier's fixed-size storage."""

TicketId = NewType("TicketId", int)
TransferId = NewType("TransferId", int)
LookupId = NewType("LookupId", int)

PAGE_BYTES = 4096
"""Direct I/O wants addresses, offsets and lengths in whole pages; so do pinned copies."""


def round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


class Tier(IntEnum):
    """Where a block can lie, fastest first. Lower tiers reach the device only through HOST."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3

    @property
    def label(self) -> str:
        return self.name.lower()


class State(IntEnum):
    """What a ledger knows of one slot."""

    UNKNOWN = 0  # not yet looked at after a restart; neither offered nor reused
    FREE = 1
    FILLING = 2  # claimed; its bytes are on the way
    READY = 3
    DOOMED = 4  # dropped while leased: no longer offered, freed with its last lease


class Verdict(IntEnum):
    """How the move of one block ended."""

    OK = 0
    MISSING = 1
    CORRUPT = 2
    FAILED = 3  # the tier answered with an error
    EXPIRED = 4  # its deadline passed first
    CANCELLED = 5
    DROPPED = 6  # refused by back-pressure, or there was no room

    @property
    def label(self) -> str:
        return self.name.lower()


class Direction(StrEnum):
    """load: towards the device. save: away from it."""

    LOAD = "load"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class Origin:
    """How whoever asked names a request. Handed on to stories and spans, and never acted upon."""

    request_id: str = ""
    operation: str = ""  # what was asked for, in OpenTelemetry's words: chat, text_completion
    traceparent: str = ""  # W3C's trace context, as it came
    tracestate: str = ""


NO_ORIGIN = Origin()


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """What every block of a store has in common."""

    namespace: bytes  # 32 bytes: digest of the physical namespace (see keys.Namespace.physical)
    block_bytes: int
    block_tokens: int
    # What the namespace stands for, as names and values for people to read.
    description: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def stride_bytes(self) -> int:
        """Distance between neighbouring slots: the block, padded to whole pages."""
        return round_up(self.block_bytes, PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Transfer:
    """An order from the books to the transfers: move these blocks one hop.

    The books hold a lease or a claim on every slot named here until the `Outcome` is settled.
    """

    id: TransferId
    source: Tier
    target: Tier
    keys: tuple[BlockKey, ...]
    source_slots: tuple[Slot, ...]
    target_slots: tuple[Slot, ...]
    deadline: float | None = None  # on the Clock that books and transfers share
    tenants: tuple[str, ...] = ()  # per block, whose it is; empty: nobody's in particular
    parents: tuple[BlockKey | None, ...] = ()  # the block before each in its prompt, if known
    ticket: TicketId | None = None  # the load or save it belongs to; None between lower tiers

    @property
    def direction(self) -> Direction:
        return Direction.LOAD if self.target < self.source else Direction.SAVE

    @property
    def link(self) -> Tier:
        """The lower of the two ends names the link: HOST for the device's, DISK for the disk's."""
        return max(self.source, self.target)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a `Transfer`, block by block, in the order of its keys."""

    transfer_id: TransferId
    verdicts: tuple[Verdict, ...]
    seconds: float = 0.0
    error: str = ""  # the first error's own words, for the log
    ended: float | None = None  # by a clock that all transfers of a link share


@dataclass(frozen=True, slots=True)
class Question:
    """The books want to know which of these blocks a tier that others write to holds."""

    id: LookupId
    tier: Tier
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the tier said of the first so many keys of a `Question`; the rest was not asked for."""

    lookup_id: LookupId
    present: tuple[bool, ...]
    seconds: float = 0.0
    error: str = ""  # why it said nothing


class Run(NamedTuple):
    """Consecutive blocks of a match that would be loaded from the same tier."""

    tier: Tier
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Match:
    """How many leading blocks of a prompt can be loaded, from where, at what estimated cost."""

    num_asked: int
    runs: tuple[Run, ...] = ()
    num_pending: int = 0  # of the matched blocks, those still on their way into HOST
    load_seconds: float = 0.0  # what the links' measured rates promise; 0 when none is known

    @property
    def num_blocks(self) -> int:
        return sum(run.num_blocks for run in self.runs)

    def num_from(self, tier: Tier) -> int:
        return sum(run.num_blocks for run in self.runs if run.tier is tier)


@dataclass(frozen=True, slots=True)
class Done:
    """A ticket has ended; none of its device slots is touched any more."""

    ticket: TicketId
    direction: Direction
    keys: tuple[BlockKey, ...]
    verdicts: tuple[Verdict, ...]
    sources: tuple[Tier | None, ...]  # per block of a load: the tier it came from
    seconds: float
    pins: tuple[Slot | None, ...] = ()  # per block of a load: where in HOST it is to be read

    @property
    def num_leading_ok(self) -> int:
        """Leading blocks that arrived: what a prefix cache can use."""
        if self.verdicts.count(Verdict.OK) == len(self.verdicts):
            return len(self.verdicts)
        for index, verdict in enumerate(self.verdicts):
            if verdict is not Verdict.OK:
                return index
        return len(self.verdicts)

    @property
    def ok(self) -> bool:
        return self.num_leading_ok == len(self.verdicts)
