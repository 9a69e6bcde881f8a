"""Reuse: keeps the blocks that are most likely to be used soon, as learned from earlier reuse.

All blocks have the same size and take about as long to recompute, so a slot is worth the expected
hits per block and time. `reuse_rates` learns these, and `runs` gives the order within a prompt.
Evicted blocks are remembered for a while as ghosts (Zhou et al., "The Multi-Queue Replacement
Algorithm for Second Level Buffer Caches", USENIX ATC 2001), so that their reuse is learned too and
their uses continue to be counted.

If this does not help, recency decides: see `trial`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from penstock.policies.base import Policy
from penstock.policies.reuse_rates import NUM_KINDS, ReuseRates
from penstock.policies.runs import PromptRun, Runs
from penstock.policies.trial import Trial
from penstock.types import BlockKey

_MIN_LEARNING_BLOCKS = 1024
_MAX_GHOSTS = 1 << 17  # about 30 MB


class _Shelf(OrderedDict[PromptRun, None]):
    """Runs of one kind and age, least recently used first."""

    __slots__ = ("due", "max_age")

    def __init__(self, max_age: float = math.inf) -> None:
        super().__init__()
        self.max_age = max_age  # age at which a run moves to the next shelf
        self.due = math.inf  # no run moves before this time


class _Ghost(NamedTuple):
    """An evicted run, known by its first block."""

    uses: int
    tick: int
    num_blocks: int


class _Returning(NamedTuple):
    """The ghost that is being inserted again: the blocks after its first one belong to it too."""

    last: BlockKey | None
    uses: int
    num_blocks: int


class Reuse(Policy):
    def __init__(self, capacity: int) -> None:
        self._runs = Runs()
        self._rates = ReuseRates(capacity)
        self._now = 0  # blocks inserted so far
        self._ages_next = 0  # no run changes its shelf before this time
        self._learning_blocks = max(_MIN_LEARNING_BLOCKS, capacity // 4)
        # By kind and age. Runs of the last age stay there.
        max_ages = [*self._rates.starts[1:-1], math.inf]
        self._shelves = [[_Shelf(age) for age in max_ages] for _ in range(NUM_KINDS)]
        self._oldest_first = [
            (shelves[age], age, shelves)
            for shelves in self._shelves
            for age in reversed(range(len(max_ages) - 1))
        ]
        self._shelf_of: OrderedDict[PromptRun, _Shelf] = OrderedDict()  # least recently used first
        self._trial = Trial(capacity, self._rates.worth)
        self._demoted = _Shelf()
        self._worst_first: list[_Shelf] = []
        self._ghosts: OrderedDict[BlockKey, _Ghost] = OrderedDict()
        self._max_ghosts = max(1024, min(2 * capacity, _MAX_GHOSTS))
        self._returning = _Returning(None, 0, 0)
        self._learn()

    def __len__(self) -> int:
        return len(self._runs)

    def admit(self, key: BlockKey) -> bool:
        return True

    def insert(self, key: BlockKey, parent: BlockKey | None = None) -> None:
        self._now += 1
        self._join([key], parent, self._uses_of(key, parent), self._now)
        if self._now % self._learning_blocks == 0:
            self._learn()

    def insert_all(self, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None]) -> None:
        last, _, num_returning = self._returning
        is_new = self._ghosts.keys().isdisjoint(keys) and not (num_returning and last in parents)
        is_chain = list(parents[1:]) == list(keys[:-1])
        num_until_learning = self._learning_blocks - self._now % self._learning_blocks
        if not is_new or not is_chain or len(keys) >= num_until_learning:
            super().insert_all(keys, parents)
        elif keys:
            first = self._now + 1
            self._now += len(keys)
            self._join(keys, parents[0], 1, first)

    def touch(self, key: BlockKey) -> None:
        run, parent, taken = self._runs.take(key)
        count = len(taken)
        if run.is_empty:
            count += run.num_evicted  # its evicted tail would have been used too
            self._unshelve(run)
        self._rates.reused(run.uses, self._now - run.tick, count)
        self._join(taken, parent, run.uses + 1, self._now)

    def touch_all(self, keys: Sequence[BlockKey]) -> None:
        for key in self._runs.last_ones(keys):
            self.touch(key)

    def forget(self, key: BlockKey) -> None:
        run = self._runs.remove(key)
        if run.is_empty:
            self._unshelve(run)

    def demote(self, key: BlockKey) -> None:
        _, tail = self._runs.split(key)
        self._shelve(tail, self._demoted)
        self._shelf_of.move_to_end(tail, last=False)

    def pick(self, num_victims: int, is_idle: Callable[[BlockKey], bool]) -> list[BlockKey]:
        self._age()
        victims, emptied = self._runs.evict(self._in_order, num_victims, is_idle)
        for run, first in emptied.items():
            self._unshelve(run)
            self._ghosts[first] = _Ghost(run.uses, run.tick, run.num_evicted)
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
        return victims

    def check(self) -> None:
        self._runs.check(self._in_order())

    def _uses_of(self, key: BlockKey, parent: BlockKey | None) -> int:
        """The uses of an inserted block: 1 if it is new, one more than before for a ghost."""
        ghost = self._ghosts.pop(key, None)
        if ghost is not None:
            self._rates.reused(ghost.uses, self._now - ghost.tick, ghost.num_blocks)
            self._returning = _Returning(key, ghost.uses + 1, ghost.num_blocks - 1)
            return ghost.uses + 1
        last, uses, num_blocks = self._returning
        if num_blocks and last == parent:
            self._returning = _Returning(key, uses, num_blocks - 1)
            return uses
        return 1

    def _join(
        self, keys: Sequence[BlockKey], parent: BlockKey | None, uses: int, since: int
    ) -> None:
        """Add consecutive blocks, each used `uses` times by now, the first at time `since`."""
        kind = self._rates.begin(uses, len(keys))
        self._trial.use(keys, parent, kind, since)
        youngest = self._shelves[kind][0]
        run = self._runs.ending_with(parent)
        if run is not None and self._shelf_of.get(run) is youngest:
            run.tick = self._now
            youngest.move_to_end(run)
            self._shelf_of.move_to_end(run)
        else:
            run = self._runs.start(parent)
            run.uses, run.tick = uses, self._now
            self._shelve(run, youngest)
        self._runs.add(keys, run)

    def _shelve(self, run: PromptRun, shelf: _Shelf) -> None:
        if self._shelf_of.get(run) is shelf:
            shelf.move_to_end(run)
            return
        if (old := self._shelf_of.get(run)) is not None:
            del old[run]  # its place in the order of recency stays
        if not shelf:
            shelf.due = run.tick + shelf.max_age
        shelf[run] = None
        self._shelf_of[run] = shelf

    def _unshelve(self, run: PromptRun) -> None:
        shelf = self._shelf_of.pop(run, None)
        if shelf is not None:
            del shelf[run]

    def _in_order(self) -> Iterator[PromptRun]:
        """Runs by worth, lowest first; or by recency, while that gives more hits."""
        if not self._trial.prefers_worth:
            yield from self._shelf_of
            return
        yield from self._demoted
        for shelf in self._worst_first:
            if shelf:
                yield from shelf

    def _age(self) -> None:
        """Move every run to the shelf of its current age. A shelf's first run is its oldest."""
        now = self._now
        if now < self._ages_next:
            return
        starts = self._rates.starts
        self._ages_next = now + max(1, int(starts[1]))
        for shelf, age, shelves in self._oldest_first:
            if shelf.due > now:
                continue
            while shelf and (run := next(iter(shelf))).tick + shelf.max_age <= now:
                by_now = age + 1
                if now - run.tick >= starts[by_now + 1]:
                    by_now = max(by_now, self._rates.age_of(now - run.tick))
                self._shelve(run, shelves[by_now])
            shelf.due = next(iter(shelf)).tick + shelf.max_age if shelf else math.inf

    def _learn(self) -> None:
        self._rates.compute()
        self._trial.judge()
        ranked = [
            (index, kind, age)
            for kind, indices in enumerate(self._rates.indices)
            for age, index in enumerate(indices)
        ]
        self._worst_first = [self._shelves[kind][age] for _, kind, age in sorted(ranked)]
