"""The results of a fleet: those of all requests together, and what each instance did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.sim.links import Carried, sum_carried
from penstock.sim.node import SimulatedNode
from penstock.sim.sequences import Sequence as Sim
from penstock.sim.tally import Simulated, tally
from penstock.types import Direction, Tier


@dataclass(slots=True)
class Journey:
    """One request on its way through the fleet."""

    sequence: Sim  # where its prompt is computed
    instance: int
    num_prompt_tokens: int
    decoder: int | None = None
    second: Sim | None = None  # where its answer is decoded, if elsewhere


@dataclass(frozen=True, slots=True)
class FleetInstance:
    """What one instance did. Requests and hits are those of prompts that it computed."""

    is_prefiller: bool
    is_decoder: bool
    num_requests: int
    num_blocks: int
    num_hits: int
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class FleetSimulated:
    """The result of a fleet. Links and busy times in `total` are sums over all instances."""

    total: Simulated
    instances: tuple[FleetInstance, ...]
    block_tokens: int
    num_evicted: int  # blocks that DRAM and disks evicted
    num_store_evicted: int  # blocks that the shared store evicted
    decode_seconds: float = field(repr=False)  # of all steps, for every sequence that decodes
    lost_decode_seconds: float = field(repr=False)  # of these, because steps also prefilled
    num_handed_blocks: int = 0  # blocks of prompts that decoders found
    num_unhanded_blocks: int = 0  # blocks of prompts that decoders computed again

    @property
    def token_hit_rate(self) -> float:
        """Tokens of prompts that were not computed, of all."""
        asked = self.total.num_input_tokens
        return sum(self.total.hits.values()) * self.block_tokens / asked if asked else 0.0

    @property
    def lost_decode_share(self) -> float:
        """The share of decoders' time that was lost to prompts in the same steps."""
        return self.lost_decode_seconds / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def balance(self) -> float:
        """The busiest instance's computing time divided by the mean of its role; 1 is even."""
        ratios = [1.0]
        for role in ("is_prefiller", "is_decoder"):
            busy = [each.busy_seconds for each in self.instances if getattr(each, role)]
            if sum(busy):
                ratios.append(max(busy) * len(busy) / sum(busy))
        return max(ratios)

    def network_bytes(self, direction: Direction) -> int:
        """Bytes that nodes read from the shared store (LOAD) or wrote to it (SAVE)."""
        return self.total.carried.get((Tier.REMOTE, direction), Carried()).num_bytes


def tally_fleet(
    journeys: Sequence[Journey],
    nodes: Sequence[SimulatedNode],
    *,
    is_prefiller: Sequence[bool],
    num_store_evicted: int,
) -> FleetSimulated:
    engines = [engine for node in nodes for engine in node.engines]
    has_roles = not all(is_prefiller)
    num_handed = num_unhanded = 0
    for journey in journeys:
        if journey.second is not None:
            num_unhanded += journey.second.num_computed_blocks
            num_handed += journey.second.num_prompt_blocks - journey.second.num_computed_blocks
    sequences = list(map(_whole, journeys))
    num_requests, num_blocks, num_hits = ([0] * len(engines) for _ in range(3))
    for journey, sequence in zip(journeys, sequences, strict=True):
        num_requests[journey.instance] += 1
        if sequence.finished is not None:
            blocks = sequence.num_prompt_blocks
            num_blocks[journey.instance] += blocks
            num_hits[journey.instance] += blocks - sequence.num_computed_blocks
    carried = [node.carried() for node in nodes]
    total = tally(
        sequences,
        {lane: sum_carried(each[lane] for each in carried) for lane in carried[0]},
        busy_seconds=sum(engine.busy_seconds for engine in engines),
        num_preemptions=sum(engine.num_preemptions for engine in engines),
    )
    return FleetSimulated(
        total,
        tuple(
            FleetInstance(
                is_prefiller[number],
                not (has_roles and is_prefiller[number]),
                num_requests[number],
                num_blocks[number],
                num_hits[number],
                engine.busy_seconds,
            )
            for number, engine in enumerate(engines)
        ),
        nodes[0].config.block_tokens,
        sum(node.num_evicted for node in nodes),
        num_store_evicted,
        sum(engine.decode_seconds for engine in engines),
        sum(engine.lost_decode_seconds for engine in engines),
        num_handed,
        num_unhanded,
    )


def _whole(journey: Journey) -> Sim:
    """One sequence with the hits of the prefiller, and the times and tokens of the decoder."""
    first, second = journey.sequence, journey.second
    if second is None:
        return first
    second.arrival = first.arrival
    second.num_device_blocks = first.num_device_blocks
    second.loaded_blocks = first.loaded_blocks
    second.num_reused_tokens = first.num_reused_tokens
    second.num_mended_tokens = first.num_mended_tokens
    second.num_recomputed_tokens += first.num_recomputed_tokens
    return second
