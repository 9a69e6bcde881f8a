"""What the scheduler's process and its workers send each other. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.codecs.blocks import PartValues
from penstock.codecs.names import RAW
from penstock.errors import ConfigError
from penstock.stores.host import ArenaHandle
from penstock.transfer.paged import PartPlace
from penstock.types import Outcome, Slot, Transfer, TransferId


class Load(NamedTuple):
    request_id: str
    transfer: Transfer


@dataclass(slots=True)
class Orders:
    """One step's orders to all workers, in the order in which they are executed."""

    step: int
    arena: ArenaHandle | None = None
    parts: tuple[PartPlace, ...] = ()  # of each worker, by its place among all of them
    codec: str = RAW  # how DRAM holds blocks
    # Saves of blocks computed by earlier steps: they start before this step computes.
    saves_before: list[Transfer] = field(default_factory=list)
    # Saves whose blocks this step overwrites: it starts after they have ended.
    fence: list[TransferId] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    # Requests whose loads have all been ordered, with the blocks that could not be loaded.
    complete: dict[str, tuple[Slot, ...]] = field(default_factory=dict)
    # Requests whose load vLLM has seen end since the last step.
    confirmed: list[str] = field(default_factory=list)
    # Saves of blocks that this step completes.
    saves_after: list[Transfer] = field(default_factory=list)
    # vLLM writes to reused blocks before it calls us: this step's saves end before the next starts.
    ends_saves: bool = False
    is_idle: bool = False  # the step computes nothing
    is_timed: bool = False  # the step has no decodes: its duration shows the prefill rate
    is_last_resort: bool = False  # offloading has ended: `complete` has all requests that may wait


@dataclass(slots=True)
class Reports:
    """The workers' reports at the end of a step."""

    outcomes: list[Outcome] = field(default_factory=list)  # one per worker and transfer
    step_seconds: dict[int, float] = field(default_factory=dict)

    def join(self, other: Reports) -> Reports:
        self.outcomes += other.outcomes
        for step, seconds in other.step_seconds.items():
            self.step_seconds[step] = max(seconds, self.step_seconds.get(step, 0.0))
        return self

    def __bool__(self) -> bool:
        return bool(self.outcomes or self.step_seconds)


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """One layer's numbers in a worker's part of a block. Strides are in numbers; empty: dense."""

    group: int
    name: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Shard:
    """How one worker's device stores KV, as found when vLLM registered its caches."""

    rank: int  # among the tensor-parallel workers of its stage
    block_bytes: int
    num_blocks: int
    layout: str
    process: int  # process id: a worker may run in the scheduler's process
    stage: int = 0  # of the pipeline
    device: str = ""  # cpu, cuda, ...
    replicas: int = 1  # this many consecutive ranks hold the same bytes
    layers: tuple[LayerBytes, ...] = ()  # for audits
    values: PartValues | None = None  # for codecs; None if nothing is known


def place_parts(
    shards: Sequence[Shard], packed_bytes: Sequence[int] | None = None
) -> tuple[PartPlace, ...]:
    """Where each worker's part lies in a block. `shards` are in the order of stages and ranks.

    Of workers that hold the same bytes the first one writes them, for all. `packed_bytes` are the
    sizes of the parts that are written, if they differ from those on the device.
    """
    places: list[PartPlace] = []
    sizes = None if packed_bytes is None else list(packed_bytes)
    end = raw = 0
    for shard in shards:
        if shard.rank % shard.replicas:
            shared = places[-1]
            if raw != shard.block_bytes:
                raise ConfigError(
                    f"worker {shard.rank} should hold the same KV as the one before it, but has "
                    f"{shard.block_bytes} bytes per block instead of {raw}."
                )
            places.append(PartPlace(shared.offset, shared.num_bytes, writes=False))
            continue
        raw = shard.block_bytes
        size = raw if sizes is None else sizes.pop(0)
        places.append(PartPlace(end, size))
        end += size
    return tuple(places)


def parts_bytes(places: Sequence[PartPlace]) -> int:
    """The size of a block with all its parts."""
    return sum(place.num_bytes for place in places if place.writes)
