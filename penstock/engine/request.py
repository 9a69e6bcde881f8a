"""One sequence on its way through the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from penstock.engine.anywhere.segments import Segment, extend_chain
from penstock.engine.fairness import QueuePlace
from penstock.engine.params import SamplingParams
from penstock.engine.table import BlockTable, Places
from penstock.events import Stage
from penstock.keys import KeyChain
from penstock.types import NO_ORIGIN, BlockKey, LookupId, Origin, Slot, TicketId, Tier, Verdict


class RequestPhase(Enum):
    WAITING = "waiting"  # for room on the device
    LOADING = "loading"  # part of its KV is being loaded
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
    max_total_tokens: int = 0  # prompt and longest answer
    arrival: float = 0.0
    # Its place among requests of the same priority, and the one that its work is charged to.
    place: QueuePlace = field(default_factory=QueuePlace)
    charged_place: QueuePlace = field(default_factory=QueuePlace)
    sequence: int = 0  # order of arrival: the older request wins ties
    segments: tuple[Segment, ...] = ()  # whose KV may come from elsewhere (see `anywhere`)
    is_fill: bool = False  # computes one segment for others, and generates nothing
    is_ready: Callable[[], bool] = lambda: True  # if not, it sits out (see `mask_threads`)

    phase: RequestPhase = RequestPhase.WAITING
    # Prompt and output. The last ones may be below zero: see `expect`.
    tokens: list[int] = field(init=False)
    num_expected: int = 0  # of its tokens that are chosen on the device and not read yet
    table: BlockTable = field(default_factory=BlockTable)
    into: list[Slot | None] = field(default_factory=list)  # where its load writes blocks
    is_brought: bool = False  # its load ends in a step (see `bringing`)
    num_computed: int = 0  # leading tokens that need not be computed again
    num_present: int = 0  # leading tokens that have KV: num_computed, or one more (see Chunk)
    num_named: int = 0  # leading blocks that the pool knows by their key
    ticket: TicketId | None = None
    # Blocks that would have been loaded, but are computed for an audit. None: not decided yet.
    num_audited: int | None = None
    has_stopped_waiting: bool = False  # for KV that another server computes
    two_ended_end: int = 0  # where its two-ended load ends, in blocks (see `two_ended_loads`)
    lookups: list[LookupId] = field(default_factory=list)  # in the remote tier
    fills: set[BlockKey] = field(default_factory=set)  # segments that are computed before it starts
    has_filled: bool = False  # whether its missing segments have been computed
    # Of its segments, by their last keys: how many blocks were nowhere before.
    num_new_blocks: dict[BlockKey, int] = field(default_factory=dict)
    mended: Places | None = None  # positions that "blend" computes, once they are chosen ...
    seen: list[range] = field(default_factory=list)  # ... from these
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0  # of the prompt: found or loaded when it first started
    num_loaded_tokens: int = 0
    num_reused_tokens: int = 0  # of its segments, whose KV was placed
    num_mended_tokens: int = 0  # of the same segments, computed where they stand
    num_lossy_tokens: int = 0  # whose KV a lossy codec may have changed (see `lossy`)
    # Numbers of blocks, until it is first preempted: matched in a tier, received from it, and lost.
    matched: Counter[Tier] = field(default_factory=Counter)
    found: Counter[Tier] = field(default_factory=Counter)
    found_elsewhere: Counter[Tier] = field(default_factory=Counter)  # of these, of segments
    lost: Counter[Verdict] = field(default_factory=Counter)
    estimate: tuple[float | None, float | None] = (None, None)  # seconds to load and to compute
    stages: list[Stage] = field(default_factory=list)
    num_recomputed_tokens: int = 0  # computed more than once
    max_computed: int = 0  # the highest num_computed so far
    num_preemptions: int = 0
    turn_began: float = 0.0  # when its current turn began (see `rotation`) ...
    turn_start: int = 0  # ... and how many tokens it had then
    resting: list[Slot] = field(default_factory=list)  # HOST slots pinned until its next turn
    num_stalls: int = 0  # consecutive steps in which it waited for saves to end
    first_token_time: float | None = None
    finished_time: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        extend_chain(self.chain, self.prompt_ids, self.segments)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_expected - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) : len(self.tokens) - self.num_expected]

    @property
    def needs_last_token(self) -> bool:
        """Whether its next token can be chosen only once the CPU knows the last one."""
        return self.params.penalised or self.params.structured_outputs is not None

    @property
    def is_ending(self) -> bool:
        """Whether it ends with a token that is not read yet."""
        num_chosen = len(self.tokens) - len(self.prompt_ids)
        return self.num_expected > 0 and num_chosen == self.params.max_tokens

    @property
    def is_blended(self) -> bool:
        return self.params.mending.is_blend

    @property
    def is_waiting(self) -> bool:
        return self.phase is RequestPhase.WAITING

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def order(self) -> tuple[int, float, int]:
        return (self.priority, self.place.stamp, self.sequence)

    def restart(self) -> None:
        """Reset the request after the engine has lost its books: it holds nothing and waits."""
        if self.phase is not RequestPhase.WAITING:
            self.num_preemptions += 1
        self.phase = RequestPhase.WAITING
        self.forget_expected()
        self.table.take_all()
        self.into, self.resting = [], []
        self.num_computed = self.num_present = self.num_named = 0
        self.ticket, self.lookups = None, []
        self.fills, self.has_filled = set(), False
        self.two_ended_end = self.num_stalls = 0

    def expect(self, row: int) -> None:
        """Append a token that is on the device, in this row, and not read yet (see `ahead`).

        It has no key before it is read, so no block that contains it can be found or saved.
        """
        self.tokens.append(~row)
        self.num_expected += 1

    def append(self, token_id: int) -> None:
        """Append a token, or enter the first one that was expected."""
        if self.num_expected:
            self.tokens[-self.num_expected] = token_id
            self.num_expected -= 1
        else:
            self.tokens.append(token_id)
        self.chain.append(token_id)

    def forget_expected(self) -> None:
        """Drop tokens that were not read: the request has ended, or they were lost."""
        del self.tokens[len(self.tokens) - self.num_expected :]
        self.num_expected = 0
