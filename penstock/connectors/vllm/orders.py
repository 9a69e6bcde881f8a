"""What crosses between the scheduler's process and its workers. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.stores.host import ArenaHandle
from penstock.transfer.delegate import Report
from penstock.types import Slot, Transfer, TransferId


class Load(NamedTuple):
    request_id: str
    transfer: Transfer


@dataclass(slots=True)
class Orders:
    """One step's orders to every worker, in the order in which they are to be done."""

    step: int
    arena: ArenaHandle | None = None
    # Blocks whose KV was there before this step: saved before it computes.
    saves_before: list[Transfer] = field(default_factory=list)
    # Saves whose blocks this step overwrites: it must not begin before they have ended.
    fence: list[TransferId] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    # Requests for which no load will follow, with the blocks that could not be brought.
    complete: dict[str, tuple[Slot, ...]] = field(default_factory=dict)
    # Requests whose load vLLM has seen end since the last step.
    heard: list[str] = field(default_factory=list)
    # Blocks that this step completes.
    saves_after: list[Transfer] = field(default_factory=list)
    is_idle: bool = False  # it computes nothing: whoever waits for a load is all there is
    is_timed: bool = False  # the step only reads prompts: its time says how fast that is
    is_last_resort: bool = False  # the books are gone: `complete` names all that may still wait


@dataclass(slots=True)
class Reports:
    """What workers have to say at the end of a step."""

    transfers: dict[TransferId, Report] = field(default_factory=dict)
    step_seconds: dict[int, float] = field(default_factory=dict)

    def join(self, other: Reports) -> Reports:
        for transfer_id, report in other.transfers.items():
            mine = self.transfers.get(transfer_id)
            self.transfers[transfer_id] = report if mine is None else mine.merged(report)
        for step, seconds in other.step_seconds.items():
            self.step_seconds[step] = max(seconds, self.step_seconds.get(step, 0.0))
        return self

    def __bool__(self) -> bool:
        return bool(self.transfers or self.step_seconds)


@dataclass(frozen=True, slots=True)
class Shard:
    """How one worker's device keeps KV, as it found it when it registered the caches."""

    rank: int
    block_bytes: int
    num_blocks: int
    layout: str
    process: int  # its id: a worker may live in the scheduler's own process
