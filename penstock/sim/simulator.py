"""Plays a trace through one simulated instance: the real books with a simulated clock.

    report = simulate(trace, InstanceConfig(...))

Requests arrive as in the trace, wait for room in the device pool, find their blocks there or in the
tiers, load over shared links, compute the rest in chunks, and decode. Steps follow each other as in
the engine. While there is only decoding, many steps are simulated at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from penstock.costs.choose import LoadChoice, LoadOrCompute
from penstock.engine.admission import Admission
from penstock.errors import ConfigError, PenstockError
from penstock.events import Observer
from penstock.sim.instance import Instance, InstanceConfig, build_instance
from penstock.sim.scheduler import SimulatedChunk, SimulatedScheduler
from penstock.sim.sequences import Sequence as Sim
from penstock.sim.tally import Simulated, tally
from penstock.sim.trace import Trace
from penstock.types import Done, Match

# As in the engine: how often transfers that follow others are started during a step.
_HOP_SECONDS = 0.005
_IDLE_HOP_SECONDS = 0.25
# How often loads are checked for a missed deadline.
_CHECK_SECONDS = 0.25
# Rates do not change in a simulation, so they are learned from the first steps.
_NUM_LEARNED_STEPS = 64
_TICK_REQUESTS = 64

Tick = Callable[[int], None]


def simulate(
    trace: Trace,
    config: InstanceConfig,
    *,
    speed: float = 1.0,
    observers: Iterable[Observer] = (),
    tick: Tick = lambda num_requests: None,
) -> Simulated:
    """Play a trace, `speed` times as fast as it was recorded.

    Events of the tiers go to `observers`. `tick` is called from time to time with the number of
    requests that have arrived.
    """
    if trace.block_tokens != config.block_tokens:
        raise ConfigError(
            f"the trace has blocks of {trace.block_tokens} tokens and the instance of "
            f"{config.block_tokens}: expected the same size; set the instance's block_tokens to "
            f"{trace.block_tokens}"
        )
    if not 0 < speed < math.inf:
        raise ConfigError(f"speed is {speed}: expected a number above 0")
    simulator = _Simulator(trace, build_instance(config, observers), speed, tick)
    simulator.run()
    return simulator.report()


class _Simulator:
    def __init__(self, trace: Trace, instance: Instance, speed: float, tick: Tick) -> None:
        config = instance.config
        self._trace = trace
        self._instance = instance
        self._clock = instance.clock
        self._links = instance.links
        self._offloader = instance.offloader
        self._rates = config.rates
        self._tick = tick
        self._sequences = [
            Sim(number, request, config.block_tokens, request.arrival_seconds / speed)
            for number, request in enumerate(trace.requests)
        ]
        self._num_arrived = 0
        self._arrived: list[Done] = []  # while a step was computed
        self._costs = LoadOrCompute(config.block_bytes, config.block_tokens)
        self._num_learned = 0
        self._busy_seconds = 0.0
        self._next_check = 0.0
        admission = Admission(
            config.block_tokens,
            config.num_device_blocks,
            None if self._offloader is None else self._offloader.num_blocks,
            config.max_waiting,
        )
        self._scheduler = SimulatedScheduler(
            instance.pool,
            config.block_tokens,
            admission,
            self._offloader,
            self._choose,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        )

    def run(self) -> None:
        while True:
            self._settle()
            self._take_arrivals()
            chunks = self._scheduler.schedule()
            if chunks:
                self._step(chunks)
            elif len(self._scheduler.decoders):
                self._decode()
            elif not self._wait():
                break
        if self._scheduler.has_work:
            raise PenstockError(
                "the simulation stopped with unfinished requests; this is a bug, please report it"
            )
        self._scheduler.check()
        self._instance.check()

    def report(self) -> Simulated:
        return tally(
            self._sequences,
            self._instance,
            seconds=self._clock.now(),
            busy_seconds=self._busy_seconds,
            num_preemptions=self._scheduler.num_preemptions,
        )

    # Events at one point in time.

    def _settle(self) -> None:
        if self._offloader is None or self._links is None:
            return
        arrived, self._arrived = self._arrived, []
        now = self._clock.now()
        if self._links.has_ended or (self._scheduler.is_loading and now >= self._next_check):
            self._next_check = now + _CHECK_SECONDS
            arrived += self._offloader.step()
        for done in arrived:
            self._scheduler.settle(done)

    def _take_arrivals(self) -> None:
        now = self._clock.now()
        while self._num_arrived < len(self._sequences):
            sequence = self._sequences[self._num_arrived]
            if sequence.arrival > now:
                break
            self._scheduler.add(sequence)
            self._num_arrived += 1
            if not self._num_arrived % _TICK_REQUESTS:
                self._tick(self._num_arrived)

    @property
    def _next_arrival(self) -> float:
        if self._num_arrived == len(self._sequences):
            return math.inf
        return self._sequences[self._num_arrived].arrival

    # Steps, which take time.

    def _step(self, chunks: Sequence[SimulatedChunk]) -> None:
        """Compute chunks of prompts and one token of each sequence that decodes."""
        decoders = self._scheduler.decoders
        read = [(chunk.num_tokens, chunk.start) for chunk in chunks]
        seconds = self._rates.step_seconds(read, len(decoders), decoders.num_context_tokens)
        if not len(decoders) and self._num_learned < _NUM_LEARNED_STEPS:
            self._costs.observe(read, seconds)
            self._num_learned += 1
        self._busy_seconds += seconds
        self._end_step(chunks, 1, self._clock.now() + seconds)

    def _decode(self) -> None:
        """Decode until a sequence needs attention or something else may happen."""
        decoders = self._scheduler.decoders
        num_sequences, num_context = len(decoders), decoders.num_context_tokens
        num_steps = decoders.num_steps_until_check
        until = self._next_arrival
        if self._links is not None and self._scheduler.is_any_waiting:
            until = min(until, self._next_end(), self._clock.now() + _CHECK_SECONDS)
        seconds = self._rates.decode.seconds(num_steps, num_sequences, num_context)
        if self._clock.now() + seconds > until:
            left = until - self._clock.now()
            num_steps = min(
                num_steps, self._rates.decode.num_steps(left, num_sequences, num_context)
            )
            seconds = self._rates.decode.seconds(num_steps, num_sequences, num_context)
        self._busy_seconds += seconds
        end = self._clock.now() + seconds
        if num_steps > 1:  # saves that end before the last step are settled before it
            before = self._rates.decode.seconds(num_steps - 1, num_sequences, num_context)
            self._advance(self._clock.now() + before)
            self._settle()
        self._end_step((), num_steps, end)

    def _end_step(self, chunks: Sequence[SimulatedChunk], num_steps: int, end: float) -> None:
        """End a step. Its KV is saved while its tokens are sampled."""
        self._advance(max(self._clock.now(), end - self._rates.sample_seconds))
        due = self._scheduler.decoders.advance(num_steps)
        self._scheduler.computed(chunks, due)
        self._advance(end)
        self._scheduler.sampled(chunks, due, self._clock.now())

    def _wait(self) -> bool:
        """With nothing to compute, advance to the next event. False if there is none."""
        until = min(self._next_arrival, self._next_end())
        if until == math.inf:
            return False
        if self._scheduler.is_loading:
            until = min(until, max(self._next_check, self._clock.now() + 1e-6))
        self._advance(until)
        return True

    def _next_end(self) -> float:
        return math.inf if self._links is None else self._links.next_end

    def _advance(self, until: float) -> None:
        """Advance the clock and the links, and start transfers that follow others."""
        links, offloader = self._links, self._offloader
        if links is None or offloader is None:
            self._clock.advance(max(0.0, until - self._clock.now()))
            return
        while True:
            now = self._clock.now()
            # If no sequence waits for a transfer, transfers are polled less often.
            pause = _HOP_SECONDS if self._scheduler.is_any_waiting else _IDLE_HOP_SECONDS
            moment = min(until, max(links.next_end, now + pause))
            self._clock.advance(max(0.0, moment - now))
            links.advance()
            if moment >= until:
                return
            if links.has_ended:
                self._arrived += offloader.step()

    def _choose(self, match: Match, num_past: int) -> LoadChoice:
        assert self._offloader is not None
        return self._costs.choose(match, num_past, self._offloader.rates)
