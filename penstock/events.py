"""Events: what happened, as immutable records. Metrics, logs and dashboards observe them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from penstock.types import BlockKey, Direction, Origin, Tier, Verdict


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A prompt was matched. `hits` counts the leading blocks by the tier that holds them."""

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
    # The part of `seconds` after the link's previous transfer ended. For concurrent transfers these
    # add up to the time the link was busy. None if unknown.
    link_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A tier shared with other instances was asked which blocks it holds."""

    tier: Tier
    num_blocks: int
    num_present: int
    seconds: float
    error: str = ""  # why there is no answer


@dataclass(frozen=True, slots=True)
class Lost:
    """Blocks did not arrive. The client recomputes them."""

    source: Tier
    target: Tier
    direction: Direction
    verdict: Verdict
    num_blocks: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Damaged:
    """A tier found damage outside of a load, for example in records of its index."""

    tier: Tier
    num_blocks: int
    error: str


@dataclass(frozen=True, slots=True)
class TierEmptied:
    """A tier lost all its blocks, for example because its folder was deleted."""

    tier: Tier
    num_blocks: int  # that it had offered
    error: str


@dataclass(frozen=True, slots=True)
class Stored:
    """A tier offers these blocks from now on."""

    tier: Tier
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """A tier no longer offers these blocks, because they were evicted or dropped."""

    tier: Tier
    keys: tuple[BlockKey, ...]
    evicted: bool


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is, and how many transfers are queued. Sent when it changes."""

    tier: Tier
    num_used: int
    num_slots: int
    num_leased: int
    num_queued_loads: int
    num_queued_saves: int


class TierCodec(NamedTuple):
    tier: Tier
    codec: str
    block_bytes: int  # of a packed block


@dataclass(frozen=True, slots=True)
class CodecsChosen:
    """How each tier below the device packs KV. Sent once, before any block moves."""

    codecs: tuple[TierCodec, ...]
    raw_block_bytes: int  # of a block on the device
    block_tokens: int  # 0 if unknown


@dataclass(frozen=True, slots=True)
class Retained:
    """How many blocks of HOST hints protect from eviction. Sent when it changes."""

    num_blocks: int
    max_blocks: int


@dataclass(frozen=True, slots=True)
class Prefetched:
    """A prefetch has loaded blocks into HOST, or failed to."""

    num_blocks: int
    num_lost: int


@dataclass(frozen=True, slots=True)
class TierRested:
    """A tier failed repeatedly and is not used for a while, in one direction."""

    tier: Tier
    direction: Direction
    seconds: float
    error: str


@dataclass(frozen=True, slots=True)
class TierRevived:
    """A tier that had failed repeatedly works again."""

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
    """A load or save of the client has ended."""

    direction: Direction
    num_blocks: int
    num_ok: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Decided:
    """How many of a prompt's matched blocks are loaded. The others are faster to compute.

    The seconds are estimates for the blocks that are loaded or, if there are none, for all matched
    blocks. They are None while the rates are unknown.
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
class Audited:
    """A request was audited. `check`: computed or read_back (see `audits.auditor`)."""

    check: str
    num_blocks: int  # compared


@dataclass(frozen=True, slots=True)
class AuditFailed:
    """An audit found KV that is wrong. `place`: the layer and head with the largest difference."""

    check: str
    place: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Stored KV is not used any more, because of an audit by this process or an earlier one."""

    path: str  # the file to delete, once the cause is removed; empty if there is none


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node is gone. The next one may hold anything, and tells of it."""


@dataclass(frozen=True, slots=True)
class KvEventsDropped:
    """KV events did not fit their queue. Everything that is held will be published again."""

    num_events: int


@dataclass(frozen=True, slots=True)
class Sequences:
    """How many sequences the engine has in each phase. Sent when it changes."""

    num_waiting: int
    num_loading: int
    num_running: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running sequence gave up its blocks for a more urgent one."""

    num_tokens: int  # tokens whose KV left the device


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A sequence that had decoded for a while gave way to a waiting one."""

    num_tokens: int  # tokens whose KV moved from the device to HOST


@dataclass(frozen=True, slots=True)
class Stepped:
    """The engine has finished one step."""

    num_sequences: int
    num_tokens: int
    seconds: float
    num_cold_blocks: int  # read from DRAM, over all sequences
    num_cold_bytes: int
    link_seconds: float | None  # estimated time of that on the link; None if unknown


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step failed because of a bug, and the engine recovered."""

    error: str  # type of the exception
    num_failed: int  # requests that ended with an error
    num_requeued: int  # requests that will be computed again
    reopened_tiers: bool  # because the tiers below the device could not be trusted


@dataclass(frozen=True, slots=True)
class Migrated:
    """Blocks of running sequences moved from the device to DRAM, or back."""

    num_left: int
    num_returned: int


@dataclass(frozen=True, slots=True)
class ResidentShare:
    """The share of the running sequences' KV on the device. Sent when it changes."""

    lowest: float  # of the sequence with the smallest share
    of_all: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was rejected: `too_long` for the model, `no_room` in the tiers, or `busy`."""

    reason: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request has its first token. `recompute_seconds`: estimate to compute its whole prompt."""

    seconds: float  # since the request arrived
    num_prompt: int
    num_on_device: int  # prompt tokens found on the device
    num_loaded: int  # prompt tokens loaded from a lower tier
    recompute_seconds: float | None
    num_reused: int = 0  # tokens of segments, whose KV was used where they stand
    num_mended: int = 0  # tokens of the same segments, computed where they stand


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended. The reason is stop, length or abort."""

    reason: str
    num_prompt: int
    num_output: int
    num_recomputed: int  # tokens whose KV was computed more than once
    num_preemptions: int
    seconds: float
    first_token_seconds: float | None
    num_lossy: int = 0  # tokens whose KV came from a tier with a lossy codec

    @property
    def token_seconds(self) -> float | None:
        """Mean time between output tokens."""
        if self.first_token_seconds is None or self.num_output < 2:
            return None
        return (self.seconds - self.first_token_seconds) / (self.num_output - 1)


@dataclass(frozen=True, slots=True)
class ServedSegment:
    """A segment of a prompt whose KV may be used wherever it stands. See docs/anywhere.md."""

    start: int  # its place in the prompt, in tokens
    keys: tuple[BlockKey, ...] = field(repr=False)  # of its full blocks
    num_first_tokens: int  # mended at its start
    blend_share: float  # of the reused tokens, mended anywhere in it


@dataclass(frozen=True, slots=True)
class Served:
    """A request has ended, as recorded in a trace: its blocks, and where they were found."""

    arrival: float  # on the engine's clock
    num_prompt: int
    num_output: int
    prompt_keys: tuple[BlockKey, ...] = field(repr=False)  # of full blocks
    output_keys: tuple[BlockKey, ...] = field(
        repr=False
    )  # of full blocks that the output completed
    found: tuple[tuple[Tier, int], ...]  # leading prompt blocks that were not computed
    tenant: str = field(repr=False)
    reason: str
    seconds: float
    first_token_seconds: float | None
    segments: tuple[ServedSegment, ...] = ()
    num_reused: int = 0
    num_mended: int = 0
    # The keys of the prompt's full blocks if nothing were marked. To compute them takes time.
    plain_keys: Callable[[], Sequence[BlockKey]] = field(default=tuple, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Stage:
    """A request entered a phase: waiting, loading or running."""

    phase: str
    start: float  # seconds since the request arrived


@dataclass(frozen=True, slots=True)
class RequestStory:
    """The history of a request that has ended: its phases, and where its KV came from.

    Blocks are counted by tier until the first preemption. The estimated seconds are those that
    decided how much to load.
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
    num_cached: int  # prompt tokens that were not computed
    num_recomputed: int
    num_preemptions: int
    matched: tuple[tuple[Tier, int], ...]
    found: tuple[tuple[Tier, int], ...]
    lost: tuple[tuple[Verdict, int], ...]  # blocks that should have been loaded
    load_seconds: float | None
    compute_seconds: float | None
    block_tokens: int
    block_bytes: int
    num_lossy: int = 0  # tokens whose KV came from a tier with a lossy codec
    num_reused: int = 0  # prompt tokens of segments, whose KV was used where they stand
    num_mended: int = 0  # prompt tokens of the same segments, computed where they stand


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
    | CodecsChosen
    | Retained
    | Prefetched
    | TierRested
    | TierRevived
    | Recovered
    | TicketDone
    | Decided
    | Audited
    | AuditFailed
    | Quarantined
    | NodeLost
    | KvEventsDropped
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


class ModelId(NamedTuple):
    """A model on a node. Models with one name may differ in weights, dtype or layout."""

    name: str
    namespace: str  # the first digits


@dataclass(frozen=True, slots=True)
class OfModel:
    """An event in the tiers of one model on a node."""

    model: ModelId
    event: Event


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """A node holds a model's blocks in DRAM no longer: it was not used, or its books broke."""

    model: ModelId
    is_broken: bool


@dataclass(frozen=True, slots=True)
class ClientRefused:
    """A node refused a client: a bounded word for the reason, and the sentence it was told.

    `full`: too many are connected; `attach`: it could not attach; `request`: it sent a wrong one;
    `broken`: the books of its model broke.
    """

    reason: str
    sentence: str


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """A client of a node has ended; `is_lost`: without saying goodbye."""

    model: ModelId
    is_lost: bool


class ModelUsage(NamedTuple):
    model: ModelId
    dram_bytes: int
    num_clients: int
    num_pinned: int


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """Who has how much of a node's DRAM. Sent when it changes."""

    dram_bytes: int
    free_bytes: int  # that no model has
    prepared_bytes: int  # that the kernel has allocated
    models: tuple[ModelUsage, ...]


NodeEvent = OfModel | ModelRemoved | ClientRefused | ClientLeft | NodeUsage
NodeObserver = Callable[[NodeEvent], None]

_AnyEvent = TypeVar("_AnyEvent")

log = logging.getLogger(__name__)


def tell(observers: Iterable[Callable[[_AnyEvent], None]], events: Iterable[_AnyEvent]) -> None:
    """Pass every event to every observer. An observer that fails must not stop the caller."""
    for event in events:
        for observer in observers:
            try:
                observer(event)
            except Exception:
                log.exception("an observer failed to handle %r", event)
