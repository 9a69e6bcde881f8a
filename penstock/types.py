"""The types that all parts share. Plain data only, because it crosses process boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import NamedTuple, NewType

BlockKey = NewType("BlockKey", bytes)
"""32 bytes that identify a block's content (see `penstock.keys`)."""

KEY_BYTES = 32

NO_PARENTS: Mapping[int, BlockKey | None] = MappingProxyType({})
"""Each block's parent is the block before it. The first one's parent is unknown."""

Slot = NewType("Slot", int)
"""An index into a tier's fixed-size storage."""

TicketId = NewType("TicketId", int)
TransferId = NewType("TransferId", int)
LookupId = NewType("LookupId", int)

PAGE_BYTES = 4096
"""Direct I/O and pinned copies need addresses, offsets and lengths in whole pages."""


def round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


class Tier(IntEnum):
    """Where a block can be, fastest first. Lower tiers reach the device only through HOST."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3

    @property
    def label(self) -> str:
        return self.name.lower()


class State(IntEnum):
    """The state of one slot in a ledger."""

    UNKNOWN = 0  # not yet read after a restart; neither offered nor reused
    FREE = 1
    FILLING = 2  # claimed; its bytes have not arrived yet
    READY = 3
    DOOMED = 4  # dropped while leased: no longer offered, free once the last lease ends
    CLOSED = 5  # its memory belongs to another ledger now


class Verdict(IntEnum):
    """How the transfer of one block ended."""

    OK = 0
    MISSING = 1
    CORRUPT = 2
    FAILED = 3  # the tier returned an error
    EXPIRED = 4  # the deadline passed
    CANCELLED = 5
    DROPPED = 6  # refused: a queue or a tier was full
    UNFIT = 7  # the block does not fit its codec

    @property
    def label(self) -> str:
        return self.name.lower()


class Direction(StrEnum):
    """LOAD moves blocks towards the device, SAVE away from it."""

    LOAD = "load"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class Origin:
    """How the caller identifies a request. Passed on to stories and traces, otherwise unused."""

    request_id: str = ""
    operation: str = ""  # OpenTelemetry's name of the operation: chat, text_completion
    traceparent: str = ""  # W3C trace context, unchanged
    tracestate: str = ""


NO_ORIGIN = Origin()


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """What all blocks of a store have in common."""

    namespace: bytes  # 32 bytes: digest of the physical namespace (see keys.Namespace.physical)
    block_bytes: int
    block_tokens: int
    # The fields of the namespace as names and values, for people to read.
    description: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def stride_bytes(self) -> int:
        """Distance between neighbouring slots: the block size, rounded up to whole pages."""
        return round_up(self.block_bytes, PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Transfer:
    """An order from the books to the transfers: move these blocks between two tiers.

    The books hold a lease or a claim on each of its slots until the `Outcome` is settled.
    """

    id: TransferId
    source: Tier
    target: Tier
    keys: tuple[BlockKey, ...]
    source_slots: tuple[Slot, ...]
    target_slots: tuple[Slot, ...]
    deadline: float | None = None  # on the Clock that books and transfers share
    tenants: tuple[str, ...] = ()  # each block's owner; empty if unknown
    parents: tuple[BlockKey | None, ...] = ()  # the block before each in its prompt, if known
    ticket: TicketId | None = None  # the load or save it belongs to; None between lower tiers

    @property
    def direction(self) -> Direction:
        return Direction.LOAD if self.target < self.source else Direction.SAVE

    @property
    def link(self) -> Tier:
        """The link is named after its lower end: HOST is the link between DEVICE and HOST."""
        return max(self.source, self.target)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a `Transfer`: one verdict per block, in the order of its keys."""

    transfer_id: TransferId
    verdicts: tuple[Verdict, ...]
    seconds: float = 0.0
    error: str = ""  # the first error's message, for the log
    ended: float | None = None  # on a clock that all transfers of a link share


@dataclass(frozen=True, slots=True)
class Question:
    """Which of these blocks does a tier hold that other instances also write to?"""

    id: LookupId
    tier: Tier
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A tier's answer to a `Question`. `present` may cover only its leading keys."""

    lookup_id: LookupId
    present: tuple[bool, ...]
    seconds: float = 0.0
    error: str = ""  # why there is no answer


class Run(NamedTuple):
    """Consecutive blocks of a match that come from the same tier."""

    tier: Tier
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Match:
    """How many leading blocks of a prompt can be loaded, and from which tiers."""

    num_asked: int
    runs: tuple[Run, ...] = ()
    num_pending: int = 0  # matched blocks that are still on their way into HOST
    load_seconds: float = 0.0  # estimated from measured rates; 0 while none is known

    @property
    def num_blocks(self) -> int:
        return sum(run.num_blocks for run in self.runs)

    def num_from(self, tier: Tier) -> int:
        return sum(run.num_blocks for run in self.runs if run.tier is tier)


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a load or save that has ended. No copy touches its device slots now."""

    ticket: TicketId
    direction: Direction
    keys: tuple[BlockKey, ...]
    verdicts: tuple[Verdict, ...]
    sources: tuple[Tier | None, ...]  # per block: the tier it was loaded from
    seconds: float
    pins: tuple[Slot | None, ...] = ()  # per block: the HOST slot where it is pinned

    @property
    def num_leading_ok(self) -> int:
        """How many leading blocks arrived. A prefix cache can use only these."""
        if self.verdicts.count(Verdict.OK) == len(self.verdicts):
            return len(self.verdicts)
        for index, verdict in enumerate(self.verdicts):
            if verdict is not Verdict.OK:
                return index
        return len(self.verdicts)

    @property
    def ok(self) -> bool:
        return self.num_leading_ok == len(self.verdicts)
