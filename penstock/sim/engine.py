"""A simulated engine: it takes requests, computes in steps, and waits for moments in time.

The body is a generator. It yields the moment until which time has to pass before it continues; the
node advances the clock (see `SimulatedNode`). While there is only decoding, many steps are taken at
once. An arrival in the middle cuts such a burst to the step during which it arrives.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.costs.choose import LoadChoice, LoadOrCompute
from penstock.engine.admission import Admission
from penstock.engine.blocks import BlockPool
from penstock.engine.tiers import EngineTiers
from penstock.errors import PenstockError
from penstock.sim.compute import DecodeRate
from penstock.sim.scheduler import SimulatedChunk, SimulatedScheduler
from penstock.sim.sequences import Sequence as Sim
from penstock.types import Done, Match

if TYPE_CHECKING:
    from penstock.sim.node import SimulatedNode

# How often loads are checked for a missed deadline.
_CHECK_SECONDS = 0.25
# Rates do not change in a simulation, so they are learned from the first steps.
_NUM_LEARNED_STEPS = 64


@dataclass(slots=True)
class _Burst:
    """Decode steps of the same sequences, the last of which has not begun."""

    rate: DecodeRate
    begun: float
    num_sequences: int
    num_context: int
    num_steps: int

    @property
    def seconds(self) -> float:
        return self.rate.seconds(self.num_steps, self.num_sequences, self.num_context)

    @property
    def last_begins(self) -> float:
        if self.num_steps == 1:
            return self.begun
        return self.begun + self.rate.seconds(
            self.num_steps - 1, self.num_sequences, self.num_context
        )

    def cut(self, until: float) -> None:
        """Take no more steps than it takes to reach `until`."""
        if self.begun + self.seconds > until:
            left = until - self.begun
            fewest = self.rate.num_steps(left, self.num_sequences, self.num_context)
            self.num_steps = min(self.num_steps, fewest)


class SimulatedEngine:
    """`until` is the moment at which `proceed` should be called; infinity: not before it gets a
    request."""

    def __init__(self, node: SimulatedNode, tiers: EngineTiers | None) -> None:
        config = node.config
        self.until = 0.0
        self.arrived: list[Done] = []  # loads and saves that have ended
        self.busy_seconds = 0.0
        # For every sequence that decodes: the time of its steps, and the part of it that steps
        # took longer because they also computed prompts.
        self.decode_seconds = 0.0
        self.lost_decode_seconds = 0.0
        self._node = node
        self._clock = node.clock
        self._links = node.links
        self._rates = config.rates
        self._inbox: deque[Sim] = deque()
        self._costs = LoadOrCompute(config.block_bytes, config.block_tokens)
        self._num_learned = 0
        self._next_check = 0.0
        self._burst: _Burst | None = None
        self._is_idle = False
        self._pool = BlockPool(config.num_device_blocks)
        admission = Admission(
            config.block_tokens,
            config.num_device_blocks,
            None if node.offloader is None else node.offloader.num_blocks,
            config.max_waiting,
        )
        self._scheduler = SimulatedScheduler(
            self._pool,
            config.block_tokens,
            admission,
            tiers,
            self._choose,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        )
        self._run = self._body()

    @property
    def is_any_waiting(self) -> bool:
        """Whether the end of a transfer may let a sequence continue."""
        return self._scheduler.is_any_waiting

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    def deliver(self, sequence: Sim) -> None:
        """Give it a request that arrives now or later, after all it was given before."""
        self._inbox.append(sequence)
        if self._burst is not None:
            self._burst.cut(sequence.arrival)
            self.until = self._burst.last_begins
        elif self._is_idle:
            self.until = min(self.until, sequence.arrival)

    def take_ended(self) -> list[Sim]:
        """The requests that were finished or refused since the last call."""
        ended, self._scheduler.ended = self._scheduler.ended, []
        return ended

    def proceed(self) -> None:
        """Continue, because `until` is reached."""
        self.until = next(self._run)

    def check(self) -> None:
        """Raise PenstockError unless everything is finished and accounted for."""
        if self._scheduler.has_work or self._inbox:
            raise PenstockError(
                "the simulation stopped with unfinished requests; this is a bug, please report it"
            )
        self._scheduler.check()
        self._pool.check()

    def _body(self) -> Iterator[float]:
        while True:
            self._settle()
            self._take_arrivals()
            chunks = self._scheduler.schedule()
            while not chunks and self._scheduler.has_begun:
                chunks = self._scheduler.schedule()
            if chunks:
                yield from self._step(chunks)
            elif len(self._scheduler.decoders):
                yield from self._decode()
            else:
                yield from self._wait()

    # Events at one point in time.

    def _settle(self) -> None:
        if self._links is None:
            return
        now = self._clock.now()
        if self._links.has_ended or (self._scheduler.is_loading and now >= self._next_check):
            self._next_check = now + _CHECK_SECONDS
            self._node.step()
        arrived, self.arrived = self.arrived, []
        for done in arrived:
            self._scheduler.settle(done)

    def _take_arrivals(self) -> None:
        now = self._clock.now()
        while self._inbox and self._inbox[0].arrival <= now:
            self._scheduler.add(self._inbox.popleft())

    @property
    def _next_arrival(self) -> float:
        return self._inbox[0].arrival if self._inbox else math.inf

    # Steps, which take time.

    def _step(self, chunks: Sequence[SimulatedChunk]) -> Iterator[float]:
        """Compute chunks of prompts and one token of each sequence that decodes."""
        decoders = self._scheduler.decoders
        num_decoding, num_context = len(decoders), decoders.num_context_tokens
        read = [(chunk.num_tokens, chunk.start) for chunk in chunks]
        seconds = self._rates.step_seconds(read, num_decoding, num_context)
        if not num_decoding and self._num_learned < _NUM_LEARNED_STEPS:
            self._costs.observe(read, seconds)
            self._num_learned += 1
        if num_decoding:
            alone = self._rates.decode.seconds(1, num_decoding, num_context)
            self.decode_seconds += num_decoding * seconds
            self.lost_decode_seconds += num_decoding * max(0.0, seconds - alone)
        self.busy_seconds += seconds
        yield from self._end_step(chunks, 1, self._clock.now() + seconds)

    def _decode(self) -> Iterator[float]:
        """Decode until a sequence needs attention or something else may happen."""
        decoders, now = self._scheduler.decoders, self._clock.now()
        burst = _Burst(
            self._rates.decode,
            now,
            len(decoders),
            decoders.num_context_tokens,
            decoders.num_steps_until_check,
        )
        until = self._next_arrival
        if self._links is not None and self._scheduler.is_any_waiting:
            until = min(until, self._links.next_end, now + _CHECK_SECONDS)
        burst.cut(until)
        if burst.num_steps > 1:  # saves that end before the last step are settled before it
            self._burst = burst
            yield burst.last_begins
            self._burst = None
            if burst.num_steps > 1:
                self._settle()
        self.busy_seconds += burst.seconds
        self.decode_seconds += burst.num_sequences * burst.seconds
        yield from self._end_step((), burst.num_steps, burst.begun + burst.seconds)

    def _end_step(
        self, chunks: Sequence[SimulatedChunk], num_steps: int, end: float
    ) -> Iterator[float]:
        """End a step. Its KV is saved while its tokens are sampled."""
        yield max(self._clock.now(), end - self._rates.sample_seconds)
        due = self._scheduler.decoders.advance(num_steps)
        self._scheduler.computed(chunks, due)
        yield end
        self._scheduler.sampled(chunks, due, self._clock.now())

    def _wait(self) -> Iterator[float]:
        """With nothing to compute, wait for the next event."""
        until = self._next_arrival
        # If the node takes small steps, it settles transfers that no sequence waits for.
        if self._links is not None and (self._scheduler.has_work or not self._node.steps_small):
            until = min(until, self._links.next_end)
        if self._scheduler.is_loading:
            until = min(until, max(self._next_check, self._clock.now() + 1e-6))
        self._is_idle = True
        yield until
        self._is_idle = False

    def _choose(self, match: Match, num_past: int) -> LoadChoice:
        assert self._node.offloader is not None
        return self._costs.choose(match, num_past, self._node.offloader.rates)
