"""One request of a trace on its way through the simulated instance, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b

from penstock.sim.trace import TraceRequest
from penstock.types import KEY_BYTES, BlockKey, Slot, Tier


class SequencePhase(Enum):
    WAITING = "waiting"  # for room on the device
    LOADING = "loading"  # part of its KV is on its way to the device
    PREFILLING = "prefilling"
    DECODING = "decoding"
    STALLED = "stalled"  # it decodes, and waits for a device block to go on
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """As the engine's `Request`, without tokens: only how many there are."""

    number: int
    request: TraceRequest
    block_tokens: int
    arrival: float

    phase: SequencePhase = SequencePhase.WAITING
    slots: list[Slot] = field(default_factory=list)
    into: list[Slot] = field(default_factory=list)  # of a load: where its blocks go
    num_tokens: int = 0  # of the prompt, and what has been answered so far
    num_computed: int = 0  # leading tokens that need not be computed (again)
    num_named: int = 0  # leading blocks known to the pool by their key
    decodes_since: int = 0  # the decoders' step at which it joined them
    decodes_until: int = -1  # ... and at which it needs a look
    num_preemptions: int = 0
    num_stalls: int = 0
    num_device_blocks: int = 0  # of the prompt: found on the device at first admission
    loaded_blocks: dict[Tier, int] = field(default_factory=dict)  # of the prompt, by tier, then
    num_recomputed_tokens: int = 0
    max_computed: int = 0
    first_token: float | None = None
    finished: float | None = None
    refusal: str = ""  # why it was not accepted
    _keys: list[BlockKey] = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.num_tokens = request.num_input_tokens
        # Some traces also name the last block of a prompt that is not full.
        self._keys = [*request.prompt_blocks[: self.num_prompt_blocks], *request.output_blocks]

    @property
    def num_prompt_blocks(self) -> int:
        """Full ones."""
        return self.request.num_input_tokens // self.block_tokens

    @property
    def num_loaded_blocks(self) -> int:
        return sum(self.loaded_blocks.values())

    @property
    def num_computed_blocks(self) -> int:
        """Of the prompt: those that were neither found on the device nor loaded."""
        return self.num_prompt_blocks - self.num_device_blocks - self.num_loaded_blocks

    @property
    def max_total_tokens(self) -> int:
        return self.request.num_input_tokens + self.num_output_tokens

    @property
    def num_output_tokens(self) -> int:
        return max(1, self.request.num_output_tokens)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    def key_before(self, index: int) -> BlockKey | None:
        return self.keys(index - 1, index)[0] if index else None

    def keys(self, start: int, end: int) -> list[BlockKey]:
        """The names of some of its blocks."""
        while len(self._keys) < end:
            # Not in the trace: nobody asks for what an answer has made, but it is saved all the
            # same, and takes others' room.
            name = b"%d %d" % (self.number, len(self._keys))
            self._keys.append(BlockKey(blake2b(name, digest_size=KEY_BYTES).digest()))
        return self._keys[start:end]
