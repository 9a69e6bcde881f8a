"""Plays a trace through many instances behind a router.

    found = simulate_fleet(trace, FleetConfig(instance, num_instances=16, router="sticky"))

Instances on one node share its DRAM and disk, in one set of books. Each has its own device, its own
link to DRAM and its own compute. All nodes may share a remote store. The router chooses an instance
when a request arrives; it knows how many requests each has not yet answered.

Prefill apart from decode: a request goes to a prefiller, which computes its prompt and one token,
and then to a decoder, which loads the prompt's blocks from the node or from the store. The decoder
gets the request as soon as it could find all of them, or when it could have computed the prompt
itself in the meantime.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from penstock.errors import ConfigError
from penstock.sim.engine import SimulatedEngine
from penstock.sim.fleet_tally import FleetSimulated, Journey, tally_fleet
from penstock.sim.instance import InstanceConfig
from penstock.sim.node import SimulatedNode
from penstock.sim.routers import (
    CacheAwareRules,
    LeastLoaded,
    Router,
    check_router,
    new_router,
    routed_prompts,
)
from penstock.sim.sequences import Sequence as Sim
from penstock.sim.shared_store import SharedStore
from penstock.sim.simulator import check_played
from penstock.sim.trace import Trace
from penstock.types import BlockKey
from penstock.units import counted

_TICK_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Roles:
    """How many instances only compute prompts, and how many only answers."""

    num_prefill: int
    num_decode: int

    def __str__(self) -> str:
        return f"prefill={self.num_prefill},decode={self.num_decode}"


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Equal instances. Sizes of DRAM and disk in `instance` are those of a node."""

    instance: InstanceConfig
    num_instances: int
    router: str = "round-robin"
    num_per_node: int = 1
    roles: Roles | None = None  # None: every instance does both
    rules: CacheAwareRules = field(default_factory=CacheAwareRules)
    # None: requests arrive as in the trace. Otherwise as many clients send them in this order, each
    # as soon as it has its last answer.
    num_clients: int | None = None

    def __post_init__(self) -> None:
        check_router(self.router)
        for name, value in (
            ("instances", self.num_instances),
            ("instances per node", self.num_per_node),
            ("clients", 1 if self.num_clients is None else self.num_clients),
        ):
            if value < 1:
                raise ConfigError(f"the number of {name} is {value}: expected 1 or more")
        if self.num_instances % self.num_per_node:
            raise ConfigError(
                f"{self.num_instances} instances do not fill nodes of {self.num_per_node}: "
                "expected a multiple; change one of the two"
            )
        if self.roles is not None:
            self._check_roles(self.roles)

    def _check_roles(self, roles: Roles) -> None:
        if min(roles.num_prefill, roles.num_decode) < 1:
            raise ConfigError(f"the roles are {roles}: expected at least 1 of each")
        if roles.num_prefill + roles.num_decode != self.num_instances:
            raise ConfigError(
                f"the roles {roles} add up to {roles.num_prefill + roles.num_decode}, but the "
                f"fleet has {counted(self.num_instances, 'instance')}: expected the same number"
            )
        if not self.instance.num_host_blocks:
            raise ConfigError(
                f"the roles are {roles}, but there is no host tier, through which KV passes from "
                "prefillers to decoders: give it a size"
            )
        if self.num_nodes > 1 and not self.instance.num_remote_blocks:
            raise ConfigError(
                f"the roles are {roles} on {self.num_nodes} nodes, but there is no shared store, "
                "through which KV passes between nodes: add one, or put all instances on one node"
            )

    @property
    def num_nodes(self) -> int:
        return self.num_instances // self.num_per_node

    def is_prefiller(self, number: int) -> bool:
        """Whether an instance computes prompts. Roles are spread evenly over the nodes."""
        if self.roles is None:
            return True
        share, total = self.roles.num_prefill, self.num_instances
        return (number + 1) * share // total > number * share // total


def simulate_fleet(
    trace: Trace,
    config: FleetConfig,
    *,
    speed: float = 1.0,
    tick: Callable[[int], None] = lambda num_requests: None,
    router: Router | None = None,
) -> FleetSimulated:
    """Play a trace, `speed` times as fast as it was recorded. `tick`: see `simulate`.

    A `router` that is given takes the place of the one that `config` names.
    """
    check_played(trace, config.instance, speed)
    fleet = _Fleet(trace, config, speed, tick, router)
    fleet.run()
    return fleet.report()


@dataclass(slots=True)
class _Handover:
    """A request whose prompt is computed, until its decoder can find the blocks."""

    journey: Journey
    keys: list[BlockKey]
    deadline: float
    num_there: int = 0


class _Fleet:
    def __init__(
        self,
        trace: Trace,
        config: FleetConfig,
        speed: float,
        tick: Callable[[int], None],
        router: Router | None = None,
    ) -> None:
        instance = config.instance
        self._config = config
        self._trace = trace
        self._speed = speed
        self._tick = tick
        self._prompts = routed_prompts(trace)
        self._store: SharedStore | None = None
        if instance.num_remote_blocks:
            self._store = SharedStore(instance.num_remote_blocks)
        self._nodes = [
            SimulatedNode(
                instance,
                num_engines=config.num_per_node,
                store=self._store,
                sees_others=self._store is not None or config.roles is not None,
            )
            for _ in range(config.num_nodes)
        ]
        self._engines: list[SimulatedEngine] = [e for node in self._nodes for e in node.engines]
        numbers = range(config.num_instances)
        self._prefillers = [number for number in numbers if config.is_prefiller(number)]
        self._decoders = [number for number in numbers if not config.is_prefiller(number)]
        self._router = router or new_router(config.router, len(self._prefillers), config.rules)
        self._decode_router = self._new_decode_router()
        self._loads = [0] * config.num_instances
        self._journeys: list[Journey] = []
        self._handovers: list[list[_Handover]] = [[] for _ in self._nodes]  # by the source
        self._moments: list[tuple[float, int]] = []  # a heap; an entry may be outdated
        self._valid = [math.inf] * len(self._nodes)
        self._num_ended = 0
        self._now = 0.0  # of the last event

    def run(self) -> None:
        for number, node in enumerate(self._nodes):
            node.start()
            self._schedule(number)
        while True:
            arrival = self._next_arrival
            moment = self._next_moment()
            if arrival <= moment:
                if arrival == math.inf:
                    break
                self._arrive(arrival)
            else:
                self._advance(heappop(self._moments)[1], moment)
        for node in self._nodes:
            node.check()

    def report(self) -> FleetSimulated:
        return tally_fleet(
            self._journeys,
            self._nodes,
            is_prefiller=[self._config.is_prefiller(n) for n in range(len(self._engines))],
            num_store_evicted=0 if self._store is None else self._store.num_evicted,
        )

    def _new_decode_router(self) -> Router | None:
        if not self._decoders:
            return None
        # As vllm-router chooses a pair: history decides who prefills, load who decodes.
        if self._config.router == "cache-aware":
            return LeastLoaded()
        return new_router(self._config.router, len(self._decoders))

    # Requests.

    @property
    def _next_arrival(self) -> float:
        number = len(self._journeys)
        if number == len(self._trace.requests):
            return math.inf
        if self._config.num_clients is None:
            return self._trace.requests[number].arrival_seconds / self._speed
        is_any_free = number - self._num_ended < self._config.num_clients
        return self._now if is_any_free else math.inf

    def _arrive(self, arrival: float) -> None:
        number = len(self._journeys)
        request, prompt = self._trace.requests[number], self._prompts[number]
        chosen = self._prefillers[self._choose(self._router, self._prefillers, number, arrival)]
        if self._decoders:
            request = replace(request, num_output_tokens=1, output_blocks=())
        journey = Journey(
            Sim(number, request, self._trace.block_tokens, arrival),
            chosen,
            prompt.num_tokens,
        )
        if self._decode_router is not None:  # chosen together, as vllm-router does
            decoder = self._choose(self._decode_router, self._decoders, number, arrival)
            journey.decoder = self._decoders[decoder]
        self._journeys.append(journey)
        self._now = arrival
        self._deliver(chosen, journey.sequence)

    def _choose(self, router: Router, among: list[int], number: int, now: float) -> int:
        loads = self._loads
        if len(among) < len(loads):
            loads = [loads[instance] for instance in among]
        return router.route(self._prompts[number], loads, now)

    def _deliver(self, instance: int, sequence: Sim) -> None:
        self._loads[instance] += 1
        self._engines[instance].deliver(sequence)
        self._schedule(instance // self._config.num_per_node)

    # Nodes.

    def _schedule(self, number: int) -> None:
        """Note when a node has to be advanced next."""
        moment = self._nodes[number].next_moment
        if self._handovers[number]:
            moment = min(moment, *(each.deadline for each in self._handovers[number]))
            moment = max(moment, self._nodes[number].clock.now())
        self._valid[number] = moment
        if moment < math.inf:
            heappush(self._moments, (moment, number))

    def _next_moment(self) -> float:
        while self._moments and self._moments[0][0] != self._valid[self._moments[0][1]]:
            heappop(self._moments)
        return self._moments[0][0] if self._moments else math.inf

    def _advance(self, number: int, moment: float) -> None:
        node = self._nodes[number]
        if node.next_moment <= moment:
            node.advance()
        self._now = max(self._now, moment)
        first = number * self._config.num_per_node
        for instance, engine in enumerate(node.engines, first):
            for sequence in engine.take_ended():
                self._end(instance, sequence, number)
        if self._handovers[number]:
            self._hand_over(number, moment)
        self._schedule(number)

    def _end(self, instance: int, sequence: Sim, node: int) -> None:
        self._loads[instance] -= 1
        journey = self._journeys[sequence.number]
        is_prefilled = journey.decoder is not None and instance == journey.instance
        if is_prefilled and not sequence.refusal:
            keys = sequence.keys(0, sequence.num_prompt_blocks)
            rates = self._config.instance.rates
            assert sequence.finished is not None
            deadline = sequence.finished + rates.prefill.seconds(sequence.request.num_input_tokens)
            self._handovers[node].append(_Handover(journey, keys, deadline))
            return
        self._num_ended += 1
        if not self._num_ended % _TICK_REQUESTS:
            self._tick(self._num_ended)

    # Prefill apart from decode.

    def _hand_over(self, source: int, now: float) -> None:
        """Send requests on whose decoders can find their blocks, or have waited long enough."""
        waiting = self._handovers[source]
        self._handovers[source] = []
        for handover in waiting:
            if now < handover.deadline and not self._is_there(handover, source):
                self._handovers[source].append(handover)
                continue
            journey = handover.journey
            assert journey.decoder is not None
            number = journey.sequence.number
            # It has the blocks of the prompt, whatever they were made of.
            request = replace(self._trace.requests[number], segments=())
            journey.second = Sim(number, request, self._trace.block_tokens, now)
            self._deliver(journey.decoder, journey.second)

    def _is_there(self, handover: _Handover, source: int) -> bool:
        assert handover.journey.decoder is not None
        target = handover.journey.decoder // self._config.num_per_node
        if target == source:  # also those on their way into DRAM, which a load joins
            books = self._nodes[source].offloader
            assert books is not None
            return books.match(handover.keys).num_blocks == len(handover.keys)
        assert self._store is not None
        keys = handover.keys
        while handover.num_there < len(keys) and keys[handover.num_there] in self._store:
            handover.num_there += 1
        return handover.num_there == len(keys)
