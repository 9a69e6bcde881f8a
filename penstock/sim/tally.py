"""The results of a simulation: hits by tier, times, refused requests, transferred bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.books.write_gate import DAY_SECONDS
from penstock.sim.links import Carried
from penstock.sim.sequences import Sequence as Sim
from penstock.types import Direction, Tier


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """The result of one request. Blocks are the full blocks of its prompt."""

    num_device_blocks: int
    num_loaded_blocks: int
    num_computed_blocks: int  # neither found nor loaded as a prefix
    first_token_seconds: float | None
    seconds: float | None
    refusal: str = ""
    num_reused_tokens: int = 0  # of segments, whose KV was used where they stand
    num_mended_tokens: int = 0  # of the same segments, computed


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulation. Rates are those of served requests; blocks are full blocks of
    their prompts."""

    num_requests: int
    num_served: int
    refusals: dict[str, int]  # by reason: too_long, busy
    num_blocks: int
    hits: dict[Tier, int]
    num_preemptions: int
    num_recomputed_tokens: int
    num_input_tokens: int
    num_output_tokens: int
    seconds: float  # from the first arrival to the end of the last answer
    busy_seconds: float  # while the device computed
    first_token_seconds: tuple[float, ...] = field(repr=False)  # sorted
    carried: dict[tuple[Tier, Direction], Carried] = field(repr=False)
    requests: tuple[SimulatedRequest, ...] = field(repr=False)
    num_reused_tokens: int = 0
    num_mended_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return sum(self.hits.values()) / self.num_blocks if self.num_blocks else 0.0

    def hit_rate_of(self, tier: Tier) -> float:
        return self.hits.get(tier, 0) / self.num_blocks if self.num_blocks else 0.0

    @property
    def num_refused(self) -> int:
        return sum(self.refusals.values())

    def first_token_percentile(self, share: float) -> float | None:
        """The time to first token that `share` of the served requests did not exceed."""
        times = self.first_token_seconds
        if not times:
            return None
        return times[min(len(times) - 1, int(share * len(times)))]

    @property
    def input_tokens_per_second(self) -> float:
        return self.num_input_tokens / self.seconds if self.seconds else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def flash_bytes_per_day(self) -> float:
        """Bytes written to the disk per day at this rate."""
        written = self.carried.get((Tier.DISK, Direction.SAVE), Carried()).num_bytes
        return written * DAY_SECONDS / self.seconds if self.seconds else 0.0


def tally(
    sequences: Sequence[Sim],
    carried: dict[tuple[Tier, Direction], Carried],
    *,
    busy_seconds: float,
    num_preemptions: int,
) -> Simulated:
    served = [sequence for sequence in sequences if sequence.finished is not None]
    hits: Counter[Tier] = Counter()
    for sequence in served:
        hits[Tier.DEVICE] += sequence.num_device_blocks
        hits.update(sequence.loaded_blocks)
    ends = [sequence.finished for sequence in served if sequence.finished is not None]
    span = max(ends, default=0.0) - min((s.arrival for s in sequences), default=0.0)
    return Simulated(
        num_requests=len(sequences),
        num_served=len(served),
        refusals=dict(Counter(s.refusal for s in sequences if s.refusal)),
        num_blocks=sum(sequence.num_prompt_blocks for sequence in served),
        hits=dict(hits),
        num_preemptions=num_preemptions,
        num_recomputed_tokens=sum(sequence.num_recomputed_tokens for sequence in served),
        num_input_tokens=sum(sequence.request.num_input_tokens for sequence in served),
        num_output_tokens=sum(sequence.num_output_tokens for sequence in served),
        seconds=span,
        busy_seconds=busy_seconds,
        first_token_seconds=tuple(
            sorted(s.first_token - s.arrival for s in served if s.first_token is not None)
        ),
        carried=carried,
        requests=tuple(map(_result, sequences)),
        num_reused_tokens=sum(sequence.num_reused_tokens for sequence in served),
        num_mended_tokens=sum(sequence.num_mended_tokens for sequence in served),
    )


def _result(sequence: Sim) -> SimulatedRequest:
    first, end = sequence.first_token, sequence.finished
    return SimulatedRequest(
        sequence.num_device_blocks,
        sequence.num_loaded_blocks,
        sequence.num_computed_blocks if end is not None else 0,
        None if first is None else first - sequence.arrival,
        None if end is None else end - sequence.arrival,
        sequence.refusal,
        sequence.num_reused_tokens,
        sequence.num_mended_tokens,
    )
