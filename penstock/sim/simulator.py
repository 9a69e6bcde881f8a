"""Plays a trace through one simulated instance: the real books with a simulated clock.

    report = simulate(trace, InstanceConfig(...))

Requests arrive as in the trace, wait for room in the device pool, find their blocks there or in the
tiers, load over shared links, compute the rest in chunks, and decode. Steps follow each other as in
the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from penstock.errors import ConfigError
from penstock.events import Observer
from penstock.sim.instance import InstanceConfig
from penstock.sim.node import SimulatedNode
from penstock.sim.sequences import Sequence as Sim
from penstock.sim.tally import Simulated, tally
from penstock.sim.trace import Trace

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
    requests that have ended.
    """
    check_played(trace, config, speed)
    node = SimulatedNode(config, observers)
    (engine,) = node.engines
    sequences = [
        Sim(number, request, config.block_tokens, request.arrival_seconds / speed)
        for number, request in enumerate(trace.requests)
    ]
    for sequence in sequences:
        engine.deliver(sequence)
    node.start()
    num_ended = num_ticked = 0
    while engine.until < math.inf:
        node.advance()
        num_ended += len(engine.take_ended())
        if num_ended - num_ticked >= _TICK_REQUESTS:
            num_ticked = num_ended
            tick(num_ended)
    node.check()
    return tally(
        sequences,
        node.carried(),
        busy_seconds=engine.busy_seconds,
        num_preemptions=engine.num_preemptions,
    )


def check_played(trace: Trace, config: InstanceConfig, speed: float) -> None:
    """Raise ConfigError if an instance cannot play this trace."""
    if trace.block_tokens != config.block_tokens:
        raise ConfigError(
            f"the trace has blocks of {trace.block_tokens} tokens and the instance of "
            f"{config.block_tokens}: expected the same size; set the instance's block_tokens to "
            f"{trace.block_tokens}"
        )
    if not 0 < speed < math.inf:
        raise ConfigError(f"speed is {speed}: expected a number above 0")
