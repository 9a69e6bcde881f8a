"""One sequence on its way through the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from penstock.engine.fairness import QueuePlace
from penstock.engine.params import SamplingParams
from penstock.engine.table import BlockTable
from penstock.events import Stage
from penstock.keys import KeyChain
from penstock.types import NO_ORIGIN, LookupId, Origin, Slot, TicketId, Tier, Verdict


class RequestPhase(Enum):
    WAITING = "waiting"  # for room on the device
    LOADING = "loading"  # part of its KV is on its way to the device
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    chain: KeyChain
    priority: int = 0  # lower is served first
    tenant: str = ""
    origin: Origin = NO_ORIGIN
    max_total_tokens: int = 0  # prompt and all it may still say
    arrival: float = 0.0
    turn: QueuePlace = field(
        default_factory=QueuePlace
    )  # its place among those of its priority ...
    charged: QueuePlace = field(
        default_factory=QueuePlace
    )  # ... and the one that its work is counted in
    sequence: int = 0  # of arrival: ties go to the older one

    phase: RequestPhase = RequestPhase.WAITING
    tokens: list[int] = field(init=False)  # prompt and output
    table: BlockTable = field(default_factory=BlockTable)
    into: list[Slot | None] = field(default_factory=list)  # of a load: where its blocks go
    num_computed: int = 0  # leading tokens that need not be computed (again)
    num_present: int = 0  # leading tokens whose KV is there: that, or one more (see Chunk)
    num_named: int = 0  # leading blocks known to the pool by their key
    ticket: TicketId | None = None
    two_ended_end: int = 0  # up to this block it is to be loaded from the back (see meetings)
    lookup: LookupId | None = None  # what it asked of the tier that instances share
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0  # of the prompt: found on the device or loaded, at first admission
    num_loaded_tokens: int = 0
    # Blocks, until it is first preempted: in which tiers they lay, which of them it got.
    matched: Counter[Tier] = field(default_factory=Counter)
    found: Counter[Tier] = field(default_factory=Counter)
    lost: Counter[Verdict] = field(default_factory=Counter)  # did not arrive
    estimate: tuple[float | None, float | None] = (None, None)  # seconds to load, to compute
    stages: list[Stage] = field(default_factory=list)
    num_recomputed_tokens: int = 0  # computed more than once
    max_computed: int = 0  # the most leading tokens that were ever computed or loaded
    num_preemptions: int = 0
    turn_began: float = 0.0  # when it came to run this time (see rotation) ...
    turn_start: int = 0  # ... and how many tokens it had then
    resting: list[Slot] = field(default_factory=list)  # HOST's slots, kept until it comes back
    num_stalls: int = 0  # steps in a row in which it waited for others' blocks to be saved
    first_token_time: float | None = None
    finished_time: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self.chain.extend(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) :]

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def order(self) -> tuple[int, float, int]:
        return (self.priority, self.turn.stamp, self.sequence)

    def restart(self) -> None:
        """The engine lost its books: nothing of the request is anywhere, and it waits again."""
        if self.phase is not RequestPhase.WAITING:
            self.num_preemptions += 1
        self.phase = RequestPhase.WAITING
        self.table.take_all()
        self.into, self.resting = [], []
        self.num_computed = self.num_present = self.num_named = 0
        self.ticket = self.lookup = None
        self.two_ended_end = self.num_stalls = 0

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.chain.append(token_id)
