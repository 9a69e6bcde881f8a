"""What happened, as frozen facts. Metrics, logs and dashboards are observers of these."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.types import BlockKey, Direction, Origin, Tier, Verdict


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
    # Of these, those in which no other transfer of the link had ended: side by side they add up to
    # the time for which the link was busy. None where that is not known.
    link_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A tier that others write to was asked which blocks it holds."""

    tier: Tier
    num_blocks: int
    num_present: int
    seconds: float
    error: str = ""  # why it gave no answer


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
class Damaged:
    """A tier was found damaged by itself, not by loading: records of its index, say."""

    tier: Tier
    num_blocks: int
    error: str


@dataclass(frozen=True, slots=True)
class TierEmptied:
    """A tier lost everything it held: its folder was deleted or replaced under us, say."""

    tier: Tier
    num_blocks: int  # those that had been offered
    error: str


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
class TierUsage:
    """How full a tier is and how much waits for it. Sent when it changes."""

    tier: Tier
    num_used: int
    num_slots: int
    num_leased: int
    num_queued_loads: int
    num_queued_saves: int


@dataclass(frozen=True, slots=True)
class Retained:
    """How much of HOST hints keep from being evicted. Sent when it changes."""

    num_blocks: int
    max_blocks: int


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Blocks were brought up to HOST before anybody asked for them, or did not come."""

    num_blocks: int
    num_lost: int


@dataclass(frozen=True, slots=True)
class TierRested:
    """A tier failed so often that it is left alone for a while, in one direction."""

    tier: Tier
    direction: Direction
    seconds: float
    error: str


@dataclass(frozen=True, slots=True)
class TierRevived:
    """A tier that had been left alone answers again."""

    tier: Tier
    direction: Direction


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


@dataclass(frozen=True, slots=True)
class Decided:
    """Of a prompt's matched blocks, so many are loaded; the rest is cheaper to compute.

    The seconds are estimates for the blocks that are loaded, or, where none is, for all that
    matched; None while the rates are not known.
    """

    num_matched: int
    num_loaded: int
    load_seconds: float | None
    compute_seconds: float | None

    @property
    def choice(self) -> str:
        if self.num_loaded == 0:
            return "compute"
        return "load" if self.num_loaded == self.num_matched else "part"


@dataclass(frozen=True, slots=True)
class Sequences:
    """How many sequences the engine has in each phase. Sent when it changes."""

    num_waiting: int
    num_loading: int
    num_running: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running sequence gave its blocks to a more urgent one."""

    num_tokens: int  # whose KV left the device


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A sequence that had decoded for a while made room for one that waited."""

    num_tokens: int  # whose KV left the device, and is kept in HOST


@dataclass(frozen=True, slots=True)
class Stepped:
    """The engine has computed one step."""

    num_sequences: int
    num_tokens: int
    seconds: float
    num_cold_blocks: int  # read from DRAM, of all its sequences together
    num_cold_bytes: int
    link_seconds: float | None  # what that takes on the link, as far as its rate is known


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step of the engine failed by a defect, and the engine recovered."""

    error: str  # its type
    num_failed: int  # requests that ended with it
    num_requeued: int  # requests that are computed again
    reopened_tiers: bool  # the tiers below the device could not be trusted


@dataclass(frozen=True, slots=True)
class Migrated:
    """Blocks of running sequences have left the device for DRAM, or have come back."""

    num_left: int
    num_returned: int


@dataclass(frozen=True, slots=True)
class ResidentShare:
    """Which share of the running sequences' KV is on the device. Sent when it changes."""

    lowest: float  # of the one that has the least
    of_all: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was not accepted: `too_long` for the model, `no_room` in the tiers, or `busy`."""

    reason: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request's first token is there. `recompute_seconds` is what the prompt alone would take."""

    seconds: float  # since it came
    num_prompt: int
    num_on_device: int  # of the prompt: found in the device pool
    num_loaded: int  # of the prompt: brought from a lower tier
    recompute_seconds: float | None


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended: stop, length or abort."""

    reason: str
    num_prompt: int
    num_output: int
    num_recomputed: int  # tokens whose KV was computed more than once
    num_preemptions: int
    seconds: float
    first_token_seconds: float | None

    @property
    def token_seconds(self) -> float | None:
        """Mean time between its tokens."""
        if self.first_token_seconds is None or self.num_output < 2:
            return None
        return (self.seconds - self.first_token_seconds) / (self.num_output - 1)


@dataclass(frozen=True, slots=True)
class Served:
    """A request has ended, told as a trace keeps it: its blocks by name, and where they were."""

    arrival: float  # on the engine's clock
    num_prompt: int
    num_output: int
    prompt_keys: tuple[BlockKey, ...] = field(repr=False)  # of full blocks
    output_keys: tuple[BlockKey, ...] = field(repr=False)  # of those that the answer completed
    found: tuple[tuple[Tier, int], ...]  # leading blocks of the prompt that were not computed
    tenant: str = field(repr=False)
    reason: str
    seconds: float
    first_token_seconds: float | None


@dataclass(frozen=True, slots=True)
class Stage:
    """A request entered a phase: waiting, loading or running."""

    phase: str
    start: float  # seconds since it came


@dataclass(frozen=True, slots=True)
class RequestStory:
    """A request has ended, told as a story: what it did when, and where its KV came from.

    Blocks are counted until it was first preempted, by tier; the estimates are those by which it
    was decided how much to load.
    """

    request_id: str
    origin: Origin
    tenant: str = field(repr=False)
    arrival: float  # on the engine's clock
    stages: tuple[Stage, ...]
    first_token_seconds: float | None
    seconds: float
    reason: str
    num_prompt: int
    num_output: int
    num_cached: int  # of the prompt: not computed
    num_recomputed: int
    num_preemptions: int
    matched: tuple[tuple[Tier, int], ...]
    found: tuple[tuple[Tier, int], ...]
    lost: tuple[tuple[Verdict, int], ...]  # were to be loaded, and did not arrive
    load_seconds: float | None
    compute_seconds: float | None
    block_tokens: int
    block_bytes: int


Event = (
    LookedUp
    | Moved
    | Asked
    | Lost
    | Damaged
    | TierEmptied
    | Stored
    | Removed
    | TierUsage
    | Retained
    | Prefetched
    | TierRested
    | TierRevived
    | Recovered
    | TicketDone
    | Decided
    | Sequences
    | Preempted
    | TurnEnded
    | Stepped
    | StepFailed
    | Migrated
    | ResidentShare
    | Refused
    | FirstToken
    | Finished
    | Served
    | RequestStory
)
Observer = Callable[[Event], None]

log = logging.getLogger(__name__)


def tell(observers: Iterable[Observer], events: Iterable[Event]) -> None:
    """Hand every event to every observer. Who watches must not stop what is watched."""
    for event in events:
        for observer in observers:
            try:
                observer(event)
            except Exception:
                log.exception("an observer failed on %r", event)
