"""Prefetches: load blocks from lower tiers into HOST before a request needs them.

Pure. A prefetch loads a few blocks at a time, so that a request's own load never waits long, and
takes at most a quarter of HOST. It is best effort: it ends at the first block that does not
arrive, without an error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.books.stack import TierStack
from penstock.types import NO_PARENTS, BlockKey, Done, LookupId, TicketId, Tier, Verdict

_MAX_UNDER_WAY = 32  # blocks
_MAX_WAITING = 64  # prefetches
_WINDOW_BLOCKS = 256  # matched at a time


def chains_of(
    keys: Sequence[BlockKey], parents: Mapping[int, BlockKey | None]
) -> list[Sequence[BlockKey]]:
    """The chains that follow one another in `keys`: at the positions in `parents` one begins."""
    starts = sorted({0, *(place for place in parents if 0 < place < len(keys))})
    return [keys[start:end] for start, end in pairwise([*starts, len(keys)])]


@dataclass(slots=True)
class _Prefetch:
    keys: tuple[BlockKey, ...]
    parents: Mapping[int, BlockKey | None]  # of the first block of each chain
    ends: list[int]  # of the chains
    num_left: int  # blocks it may still load
    deadline_seconds: float  # for each of its loads
    tenant: str
    lookups: Sequence[LookupId]  # wait for their answers before starting
    retain: tuple[str, float] | None  # group name, and until when
    position: int = 0  # all blocks before it are in HOST or on their way


class Prefetches:
    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        self._waiting: deque[_Prefetch] = deque()
        self._loading: dict[TicketId, _Prefetch] = {}
        self._num_under_way = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._loading)

    @property
    def _max_blocks(self) -> int:
        """Per prefetch."""
        return max(1, self._stack.host.capacity // 4)

    def ask(
        self,
        keys: Sequence[BlockKey],
        deadline_seconds: float,
        *,
        tenant: str = "",
        lookups: Sequence[LookupId] = (),
        retain: tuple[str, float] | None = None,
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> int:
        """Queue a prefetch of leading blocks; returns how many are known to be in lower tiers.

        At the positions in `parents` another chain begins, with a leading part of its own.
        `retain` is the group in which to retain the blocks that arrive, and until when.
        """
        if len(self) >= _MAX_WAITING:
            return 0
        num_below, ends = 0, [0]
        for chain in chains_of(keys, parents):
            match = self._stack.match(chain)
            num_below += match.num_blocks - match.num_from(Tier.HOST)
            ends.append(ends[-1] + len(chain))
        if num_below or lookups:
            self._waiting.append(
                _Prefetch(
                    tuple(keys),
                    parents,
                    ends,
                    self._max_blocks,
                    deadline_seconds,
                    tenant,
                    lookups,
                    retain,
                )
            )
        return min(num_below, self._max_blocks)

    def advance(self, now: float) -> bool:
        """Start as many prefetches as there is room for. Returns whether any load was started."""
        started = False
        for _ in range(len(self._waiting)):
            if self._num_under_way >= _MAX_UNDER_WAY:
                break
            prefetch = self._waiting.popleft()
            if any(map(self._stack.lookups.is_open, prefetch.lookups)):
                self._waiting.append(prefetch)
            elif self._start(prefetch, now):
                started = True
        return started

    def settle(self, done: Done, now: float) -> tuple[int, int] | None:
        """Returns how many blocks arrived and how many did not; None if not a prefetch's load."""
        prefetch = self._loading.pop(done.ticket, None)
        if prefetch is None:
            return None
        self._num_under_way -= len(done.keys)
        pairs = zip(done.keys, done.verdicts, strict=True)
        came = [key for key, verdict in pairs if verdict is Verdict.OK]
        if prefetch.retain is not None and prefetch.retain[1] > now:
            self._stack.retention.retain(came, *prefetch.retain)
        self._stack.pins.unpin([slot for slot in done.pins if slot is not None])
        if len(came) == len(done.keys) and prefetch.num_left:
            self._waiting.append(prefetch)
        return len(came), len(done.keys) - len(came)

    def clear(self) -> None:
        """Drop all prefetches. Loads under way still finish."""
        self._waiting.clear()
        for prefetch in self._loading.values():
            prefetch.num_left = 0

    def _start(self, prefetch: _Prefetch, now: float) -> bool:
        """Load its next blocks that are not in HOST. Returns False if there are none."""
        room = min(_MAX_UNDER_WAY - self._num_under_way, prefetch.num_left)
        positions: list[int] = []
        while len(positions) < room and prefetch.position < len(prefetch.keys):
            positions += self._next_below(prefetch, room - len(positions))
        if not positions:
            return False
        keys = [prefetch.keys[position] for position in positions]
        parents = {
            index: prefetch.parents[position]
            if position in prefetch.parents
            else prefetch.keys[position - 1]
            if position
            else None
            for index, position in enumerate(positions)
        }
        ticket = self._stack.load(
            keys, [None] * len(keys), now, now + prefetch.deadline_seconds, prefetch.tenant, parents
        )
        prefetch.num_left -= len(keys)
        self._loading[ticket] = prefetch
        self._num_under_way += len(keys)
        return True

    def _next_below(self, prefetch: _Prefetch, room: int) -> list[int]:
        """Positions of its next blocks in lower tiers; moves `prefetch.position` past them."""
        start = prefetch.position
        end_of_chain = prefetch.ends[bisect_right(prefetch.ends, start)]
        window = prefetch.keys[start : min(start + _WINDOW_BLOCKS, end_of_chain)]
        match = self._stack.match(window)
        positions: list[int] = []
        end = start
        for run in match.runs:
            if run.tier is not Tier.HOST:
                positions += range(end, end + run.num_blocks)
            end += run.num_blocks
            if len(positions) >= room:
                positions = positions[:room]
                prefetch.position = positions[-1] + 1
                return positions
        # Blocks of the same chain after a gap are of no use.
        prefetch.position = end if match.num_blocks == len(window) else end_of_chain
        return positions
