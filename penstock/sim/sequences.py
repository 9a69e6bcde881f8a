"""One request of a trace in the simulated instance, and its results."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING

from penstock.sim.trace import TraceRequest
from penstock.types import KEY_BYTES, BlockKey, LookupId, Slot, Tier, Verdict

if TYPE_CHECKING:
    from penstock.engine.table import Places


class SequencePhase(Enum):
    WAITING = "waiting"  # for room on the device
    LOADING = "loading"  # part of its KV is being loaded
    PREFILLING = "prefilling"
    DECODING = "decoding"
    STALLED = "stalled"  # decodes, but waits for a device block
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SimulatedSegment:
    """A segment, and which positions of the prompt are reused."""

    start: int
    keys: tuple[BlockKey, ...]
    reused: range
    blend_share: float
    num_tokens: int  # of its blocks

    @property
    def saved_share(self) -> float:
        return (1 - self.blend_share) * len(self.reused) / self.num_tokens


class _Table:
    """The blocks of a sequence, as `SegmentLoads` sees them."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def places(self) -> Places:
        from penstock.sim.places import places_of

        return places_of(self._slots)


@dataclass(slots=True, eq=False)
class Sequence:
    """Like the engine's `Request`, but tokens are only counted."""

    number: int
    request: TraceRequest
    block_tokens: int
    arrival: float
    fill: int = 0  # above 0: it computes a segment for the request of the same number

    phase: SequencePhase = SequencePhase.WAITING
    slots: list[Slot] = field(default_factory=list)
    into: list[Slot] = field(default_factory=list)  # where its load writes blocks
    num_tokens: int = 0  # of the prompt and the answer so far
    num_computed: int = 0  # leading tokens that need not be computed again
    num_named: int = 0  # leading blocks that the pool knows by their key
    decodes_since: int = 0  # the step at which it joined the decoders
    decodes_until: int = -1  # the step at which it completes a block or ends
    num_preemptions: int = 0
    num_stalls: int = 0
    # Blocks of the prompt found on the device and loaded from each tier when it first started.
    num_device_blocks: int = 0
    loaded_blocks: dict[Tier, int] = field(default_factory=dict)
    num_recomputed_tokens: int = 0
    max_computed: int = 0
    first_token: float | None = None
    finished: float | None = None
    refusal: str = ""  # why it was refused
    lookups: list[LookupId] = field(default_factory=list)  # in the remote tier: it waits for them
    # As in the engine's `Request`, for what is reused anywhere.
    segments: tuple[SimulatedSegment, ...] = field(init=False)
    num_present: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_reused_tokens: int = 0
    num_mended_tokens: int = 0
    num_lossy_tokens: int = 0
    has_filled: bool = False
    num_new_blocks: dict[BlockKey, int] = field(default_factory=dict)
    mended: Places | None = None
    seen: list[range] = field(default_factory=list)
    fills: set[BlockKey] = field(default_factory=set)
    found: Counter[Tier] = field(default_factory=Counter)
    found_elsewhere: Counter[Tier] = field(default_factory=Counter)
    lost: Counter[Verdict] = field(default_factory=Counter)
    priority: int = 0
    tenant: str = ""
    _keys: list[BlockKey] = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.num_tokens = request.num_input_tokens
        # Some traces also name a prompt's last block if it is incomplete.
        self._keys = [*request.prompt_blocks[: self.num_prompt_blocks], *request.output_blocks]
        self.segments = tuple(
            SimulatedSegment(
                each.start,
                each.blocks,
                range(
                    each.start + each.num_first_tokens,
                    each.start + len(each.blocks) * self.block_tokens,
                ),
                each.blend_share,
                len(each.blocks) * self.block_tokens,
            )
            for each in request.segments
        )

    @property
    def order(self) -> tuple[int, int]:
        return (self.number, self.fill)

    @property
    def name(self) -> str:
        return f"{self.number} {self.fill}" if self.fill else str(self.number)

    @property
    def tokens(self) -> range:
        return range(self.num_tokens)

    @property
    def table(self) -> _Table:
        return _Table(self.slots)

    @property
    def is_blended(self) -> bool:
        return any(segment.blend_share for segment in self.segments)

    @property
    def is_waiting(self) -> bool:
        return self.phase is SequencePhase.WAITING

    def blend(self, parts: list[range]) -> None:
        """Choose the tokens to mend. Which they are is not known: they are spread evenly."""
        from penstock.sim.places import spread

        chosen = spread(parts, max(segment.blend_share for segment in self.segments))
        if self.mended is None:
            self.num_mended_tokens = len(chosen)
            self.num_reused_tokens = sum(map(len, parts)) - len(chosen)
        self.mended, self.seen = chosen, parts

    @property
    def num_prompt_blocks(self) -> int:
        """The number of complete blocks."""
        return self.request.num_input_tokens // self.block_tokens

    @property
    def num_loaded_blocks(self) -> int:
        return sum(self.loaded_blocks.values())

    @property
    def num_computed_blocks(self) -> int:
        """Blocks of the prompt that were neither found on the device nor loaded."""
        return self.num_prompt_blocks - self.num_device_blocks - self.num_loaded_blocks

    @property
    def max_total_tokens(self) -> int:
        num_new = 0 if self.fill else self.num_output_tokens
        return self.request.num_input_tokens + num_new

    @property
    def num_output_tokens(self) -> int:
        return max(1, self.request.num_output_tokens)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    def key_before(self, index: int) -> BlockKey | None:
        return self.keys(index - 1, index)[0] if index else None

    def keys(self, start: int, end: int) -> list[BlockKey]:
        """The keys of its blocks from `start` to `end`."""
        while len(self._keys) < end:
            # The trace does not name this block of the answer, so no request reuses it. It is
            # saved all the same and takes room.
            name = b"%d %d" % (self.number, len(self._keys))
            self._keys.append(BlockKey(blake2b(name, digest_size=KEY_BYTES).digest()))
        return self._keys[start:end]
