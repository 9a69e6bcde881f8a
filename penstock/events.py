"""What happened, as frozen facts. Metrics, logs and dashboards are observers of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.types import BlockKey, Direction, Tier, Verdict


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A prompt was matched. `hits` says how many leading blocks each tier would give."""

    num_asked: int
    hits: tuple[tuple[Tier, int], ...]

    @property
    def num_hits(self) -> int:
        return sum(count for _, count in self.hits)


@dataclass(frozen=True, slots=True)
class Moved:
    """One transfer ended: blocks crossed the link between two tiers."""

    source: Tier
    target: Tier
    direction: Direction
    num_blocks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Lost:
    """Blocks did not arrive, and why. Whoever asked recomputes."""

    source: Tier
    target: Tier
    direction: Direction
    verdict: Verdict
    num_blocks: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tier offers these blocks from now on."""

    tier: Tier
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """A tier no longer offers these blocks: evicted to make room, or dropped."""

    tier: Tier
    keys: tuple[BlockKey, ...]
    evicted: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is and how much waits for it. Sent when it changes."""

    tier: Tier
    num_used: int
    num_slots: int
    num_leased: int
    num_queued_loads: int
    num_queued_saves: int


@dataclass(frozen=True, slots=True)
class TierRested:
    """A tier failed so often that it is left alone for a while."""

    tier: Tier
    seconds: float
    error: str


@dataclass(frozen=True, slots=True)
class TierRevived:
    """A tier that had been left alone answers again."""

    tier: Tier


@dataclass(frozen=True, slots=True)
class Recovered:
    """Progress of reading a disk store's index after a restart."""

    tier: Tier
    num_scanned: int
    num_slots: int
    num_blocks: int

    @property
    def complete(self) -> bool:
        return self.num_scanned >= self.num_slots


@dataclass(frozen=True, slots=True)
class TicketDone:
    """A load or save that a host asked for has ended."""

    direction: Direction
    num_blocks: int
    num_ok: int
    seconds: float


Event = (
    LookedUp
    | Moved
    | Lost
    | Stored
    | Removed
    | Usage
    | TierRested
    | TierRevived
    | Recovered
    | TicketDone
)
Observer = Callable[[Event], None]
