"""Simulated links with bandwidth, latency and contention, in place of an Offloader's threads.

A transfer waits in its link's queue, loads before saves. When a stream of the link is free, the
transfer starts: first the link's latency passes, then its bytes flow. Transfers that flow at the
same time share the bandwidth equally. On a duplex link such as PCIe, loads and saves do not affect
each other; on others, such as a disk, they do.

Engines that share a node have one link to DRAM each, and share the others. A remote store that
several nodes share is a `SharedStore`: its link reads and writes it, and lookups ask it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from penstock.clock import Clock
from penstock.costs.rates import LinkRate
from penstock.sim.shared_store import SharedStore
from penstock.types import (
    Answer,
    Direction,
    Outcome,
    Question,
    TicketId,
    Tier,
    Transfer,
    TransferId,
    Verdict,
)

_ROUNDING_SECONDS = 1e-9  # a transfer with less time left than this has ended


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The rates of one link, and how many transfers flow on it at once."""

    load: LinkRate
    save: LinkRate
    num_streams: int = 2
    is_duplex: bool = True


@dataclass(slots=True)
class Carried:
    """What has crossed a link in one direction."""

    num_transfers: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    busy_seconds: float = 0.0  # with at least one transfer on the link


def sum_carried(parts: Iterable[Carried]) -> Carried:
    total = Carried()
    for part in parts:
        total.num_transfers += part.num_transfers
        total.num_blocks += part.num_blocks
        total.num_bytes += part.num_bytes
        total.busy_seconds += part.busy_seconds
    return total


class SimulatedLinks:
    """The `Engine` of an Offloader with a simulated clock. Nothing fails here.

    Each of `num_devices` has its own link to DRAM; `device_of` says whose ticket a transfer is.
    """

    def __init__(
        self,
        specs: Mapping[Tier, LinkSpec],
        clock: Clock,
        block_bytes: int,
        *,
        max_queued: int = 256,
        load_block_bytes: int | None = None,
        ratios: Mapping[Tier, float] = MappingProxyType({}),
        store: SharedStore | None = None,
        num_devices: int = 1,
        device_of: Callable[[TicketId | None], int] = lambda ticket: 0,
    ) -> None:
        """`ratios`: bytes that cross a link for each byte of a block, if a codec packs it."""
        self._clock = clock
        self._max_queued = max_queued
        self._store = store
        self._device_of = device_of
        self._ended: list[Outcome] = []
        self._asked: deque[tuple[float, Question]] = deque()  # by the time of the answer
        self._answers: list[Answer] = []
        self._lines: dict[tuple[Tier, Direction], list[_Line]] = {}  # for DRAM, one per device
        raw = {Direction.LOAD: load_block_bytes or block_bytes, Direction.SAVE: block_bytes}
        for tier, spec in specs.items():
            ratio = ratios.get(tier, 1.0)
            sizes = {direction: math.ceil(size * ratio) for direction, size in raw.items()}
            self._lines[tier, Direction.LOAD] = loads = []
            self._lines[tier, Direction.SAVE] = saves = []
            for _ in range(num_devices if tier is Tier.HOST else 1):
                shared = store if tier is Tier.REMOTE else None
                line = _Line(spec, sizes, self._ended, shared)
                loads.append(line)
                saves.append(_Line(spec, sizes, self._ended, shared) if spec.is_duplex else line)
        self._all = list(dict.fromkeys(line for lines in self._lines.values() for line in lines))
        self._lookup_seconds = specs[Tier.REMOTE].load.latency_seconds if store else 0.0

    @property
    def next_end(self) -> float:
        """The earliest time that a transfer may end; infinity while all links are idle."""
        if self._asked:
            return min(self._asked[0][0], *[line.next_end for line in self._all])
        return min([line.next_end for line in self._all])

    @property
    def has_ended(self) -> bool:
        """Whether `poll` or `take_answers` has something to return."""
        return bool(self._ended or self._answers)

    @property
    def is_busy(self) -> bool:
        return any(line.running for line in self._all)

    def carried(self) -> dict[tuple[Tier, Direction], Carried]:
        """What has crossed each link, of all devices together."""
        return {
            lane: lines[0].carried[lane[1]]
            if len(lines) == 1
            else sum_carried(line.carried[lane[1]] for line in lines)
            for lane, lines in self._lines.items()
        }

    def advance(self) -> None:
        """Advance the links to the clock's time."""
        now = self._clock.now()
        for line in self._all:
            if line.next_change <= now:
                line.advance(now)
        while self._asked and self._asked[0][0] <= now:
            _, question = self._asked.popleft()
            assert self._store is not None
            present = tuple(key in self._store for key in question.keys)
            self._answers.append(Answer(question.id, present, self._lookup_seconds))

    # The interface that an Offloader uses.

    def has_room(self, link: Tier, direction: Direction) -> bool:
        return self.depth(link, direction) < self._max_queued

    def depth(self, link: Tier, direction: Direction) -> int:
        """Transfers in the queue; for the links to DRAM, in the longest one."""
        lines = self._lines[link, direction]
        if len(lines) == 1:
            return len(lines[0].queues[direction])
        return max(len(line.queues[direction]) for line in lines)

    def submit(self, transfer: Transfer) -> bool:
        link, direction = transfer.link, transfer.direction
        if not self.has_room(link, direction):
            return False
        lines = self._lines[link, direction]
        line = lines[0] if len(lines) == 1 else lines[self._device_of(transfer.ticket)]
        line.submit(transfer, self._clock.now())
        return True

    def cancel(self, transfer_id: TransferId) -> None:
        for line in self._all:
            line.cancel(transfer_id)

    def poll(self) -> list[Outcome]:
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def ask(self, question: Question) -> None:
        self._asked.append((self._clock.now() + self._lookup_seconds, question))

    def take_answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def wait(self, timeout_seconds: float) -> bool:
        return self.has_ended

    def close(self, timeout_seconds: float = 10.0) -> bool:
        return not self.is_busy


@dataclass(slots=True, eq=False)
class _Running:
    transfer: Transfer
    direction: Direction
    begun: float
    flows_at: float
    bytes_left: float
    bytes_per_second: float  # if it is alone on the link

    @property
    def is_over(self) -> bool:
        return self.bytes_left <= self.bytes_per_second * _ROUNDING_SECONDS


@dataclass(slots=True, eq=False)
class _Line:
    """A link, or one direction of a duplex link."""

    spec: LinkSpec
    block_bytes: Mapping[Direction, int]
    ended: list[Outcome]
    store: SharedStore | None = None  # the far end, if several nodes share it
    next_change: float = math.inf  # when a latency is over or a transfer ends
    next_end: float = math.inf  # when a transfer ends, or later if others slow it down
    running: list[_Running] = field(default_factory=list)
    queues: dict[Direction, deque[Transfer]] = field(
        default_factory=lambda: {Direction.LOAD: deque(), Direction.SAVE: deque()}
    )
    carried: dict[Direction, Carried] = field(
        default_factory=lambda: {direction: Carried() for direction in Direction}
    )
    _since: float = 0.0  # the time up to which flowing bytes have been counted

    def advance(self, now: float) -> None:
        """Process everything that happens until `now`."""
        while self.next_change <= now:
            self._flow(self.next_change)
            for one in [one for one in self.running if one.is_over]:
                self.running.remove(one)
                self._end(one)
            self._start()

    def submit(self, transfer: Transfer, now: float) -> None:
        self.advance(now)
        self.queues[transfer.direction].append(transfer)
        if len(self.running) < self.spec.num_streams:
            self._flow(now)
            self._start()

    def _start(self) -> None:
        """Start queued transfers on free streams, and compute the next event."""
        now = self._since
        while len(self.running) < self.spec.num_streams:
            queue = self.queues[Direction.LOAD] or self.queues[Direction.SAVE]  # loads first
            if not queue:
                break
            transfer = queue.popleft()
            if transfer.deadline is not None and now >= transfer.deadline:
                self._report(transfer, Verdict.EXPIRED)
                continue
            direction = transfer.direction
            rate = self.spec.load if direction is Direction.LOAD else self.spec.save
            num_bytes = len(transfer.keys) * self.block_bytes[direction]
            flows_at = now + rate.latency_seconds
            self.running.append(
                _Running(transfer, direction, now, flows_at, num_bytes, rate.bytes_per_second)
            )
        if len(self.running) == 1:
            (one,) = self.running
            self.next_end = max(now, one.flows_at) + one.bytes_left / one.bytes_per_second
            self.next_change = self.next_end
            return
        self.next_change = self.next_end = math.inf
        num_flowing = sum([one.flows_at <= now for one in self.running])
        for one in self.running:
            seconds = one.bytes_left / one.bytes_per_second
            if one.flows_at <= now:
                change = end = now + seconds * num_flowing
            else:
                change, end = one.flows_at, one.flows_at + seconds
            self.next_change = min(self.next_change, change)
            self.next_end = min(self.next_end, end)

    def cancel(self, transfer_id: TransferId) -> None:
        """Drop a queued transfer. A running one continues."""
        for queue in self.queues.values():
            for transfer in queue:
                if transfer.id == transfer_id:
                    queue.remove(transfer)
                    self._report(transfer, Verdict.CANCELLED)
                    return

    def _flow(self, until: float) -> None:
        """Count the bytes that flow until `until`. No transfer begins or ends before it."""
        seconds, since, self._since = until - self._since, self._since, until
        if not self.running:
            return
        if len(self.running) == 1:  # alone, so the end of its latency is not an event
            (one,) = self.running
            flowing_seconds = until - max(since, one.flows_at)
            one.bytes_left -= max(0.0, flowing_seconds) * one.bytes_per_second
            self.carried[one.direction].busy_seconds += seconds
            return
        flowing = [one for one in self.running if one.flows_at <= since]
        for one in flowing:
            one.bytes_left -= seconds * one.bytes_per_second / len(flowing)
        for direction in {one.direction for one in self.running}:
            self.carried[direction].busy_seconds += seconds

    def _end(self, one: _Running) -> None:
        transfer = one.transfer
        carried = self.carried[one.direction]
        carried.num_transfers += 1
        carried.num_blocks += len(transfer.keys)
        carried.num_bytes += len(transfer.keys) * self.block_bytes[one.direction]
        seconds = self._since - one.begun
        if self.store is None:
            self._report(transfer, Verdict.OK, seconds)
        elif one.direction is Direction.SAVE:
            self.store.put(transfer.keys)
            self._report(transfer, Verdict.OK, seconds)
        else:  # the store may have evicted some since they were looked up
            found = tuple(
                Verdict.OK if self.store.use(key) else Verdict.MISSING for key in transfer.keys
            )
            self.ended.append(Outcome(transfer.id, found, seconds, ended=self._since))

    def _report(self, transfer: Transfer, verdict: Verdict, seconds: float = 0.0) -> None:
        verdicts = (verdict,) * len(transfer.keys)
        self.ended.append(Outcome(transfer.id, verdicts, seconds, ended=self._since))
