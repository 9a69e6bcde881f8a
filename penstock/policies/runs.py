"""Runs: consecutive blocks of a prompt that were last used together. Evicted from their ends.

A block is useless without those before it. So policies choose among runs and evict them from their
ends; if another run follows, its end is evicted first. This also makes the choice cheap: a tier of
a million blocks holds about ten thousand runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.errors import BookError
from penstock.types import BlockKey


@dataclass(slots=True, eq=False)
class PromptRun:
    parent: BlockKey | None  # of its first block, if known
    keys: list[BlockKey] = field(default_factory=list)
    num_moved: int = 0  # leading `keys` that have moved to another run
    num_evicted: int = 0
    uses: int = 1  # of each of its blocks
    tick: int = 0  # when it was last used, on its policy's clock

    @property
    def is_empty(self) -> bool:
        return self.num_moved == len(self.keys)


class Runs:
    """Knows each block's run, and which runs follow which block. Policies order the runs."""

    def __init__(self) -> None:
        self._run_of: dict[BlockKey, PromptRun] = {}
        self._following: dict[BlockKey, dict[PromptRun, None]] = {}

    def __len__(self) -> int:
        return len(self._run_of)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._run_of

    def of(self, key: BlockKey) -> PromptRun:
        return self._run_of[key]

    def ending_with(self, key: BlockKey | None) -> PromptRun | None:
        """The run that ends with this block, to which the next blocks can be added."""
        run = None if key is None else self._run_of.get(key)
        return run if run is not None and run.keys[-1] == key else None

    def start(self, parent: BlockKey | None) -> PromptRun:
        """Start an empty run after `parent`."""
        run = PromptRun(parent)
        self._follow(run)
        return run

    def add(self, keys: Sequence[BlockKey], run: PromptRun) -> None:
        """Append consecutive blocks to a run."""
        run.keys += keys
        for key in keys:
            self._run_of[key] = run

    def take(self, key: BlockKey) -> tuple[PromptRun, BlockKey | None, list[BlockKey]]:
        """Remove a block and those before it from its run, because they were used together.

        Returns the run, which may be empty now, the parent of the first block, and the blocks.
        """
        run = self._run_of[key]
        start = run.num_moved
        end = start + 1 if run.keys[start] == key else run.keys.index(key, start) + 1
        taken, parent = run.keys[start:end], run.parent
        self._leave(run)
        run.num_moved, run.parent = end, key
        if not run.is_empty:
            self._follow(run)
        for each in taken:
            del self._run_of[each]
        return run, parent, taken

    def last_ones(self, keys: Sequence[BlockKey]) -> Iterator[BlockKey]:
        """The blocks to `take` so that all of `keys`, used in this order, are taken."""
        run_of = self._run_of
        start = 0
        while start < len(keys):
            run = run_of[keys[start]]
            first = run.num_moved
            end = start + 1
            while end < len(keys) and run_of[keys[end]] is run:
                end += 1
            stretch = list(keys[start:end])
            if run.keys[first : first + len(stretch)] == stretch:
                yield stretch[-1]
            else:
                yield from stretch
            start = end

    def split(self, key: BlockKey) -> tuple[PromptRun, PromptRun]:
        """Move a block and those after it into a new run; returns the old and the new run."""
        run = self._run_of[key]
        place = run.keys.index(key, run.num_moved)
        if place == run.num_moved:
            return run, run
        tail = self.start(run.keys[place - 1])
        tail.uses, tail.tick, tail.num_evicted = run.uses, run.tick, run.num_evicted
        self.add(run.keys[place:], tail)
        del run.keys[place:]
        run.num_evicted = 0
        return run, tail

    def remove(self, key: BlockKey) -> PromptRun:
        """Remove one block from its run."""
        run = self._run_of.pop(key)
        del run.keys[run.keys.index(key, run.num_moved)]
        if run.is_empty:
            self._leave(run)
        return run

    def evict(
        self,
        order: Callable[[], Iterable[PromptRun]],
        num_victims: int,
        is_idle: Callable[[BlockKey], bool],
    ) -> tuple[list[BlockKey], dict[PromptRun, BlockKey]]:
        """Remove `num_victims` idle blocks, from runs in `order`; none if there are not enough.

        Returns them, and the runs that are empty now, each with its first block.
        """
        taken: list[tuple[PromptRun, list[BlockKey]]] = []
        num_left = num_victims
        for run in order():
            while num_left and not run.is_empty:
                last = self._last_after(run)
                keys = self._pop_idle(last, num_left, is_idle)
                if not keys:
                    break
                taken.append((last, keys))
                num_left -= len(keys)
            if not num_left:
                break
        if num_left:
            # Only idle blocks before blocks in use are left. Evict those too.
            held_up = _idle_ones(order(), is_idle)
            if len(held_up) < num_left:
                for run, keys in reversed(taken):
                    run.keys += reversed(keys)
                return [], {}
            for key in held_up[:num_left]:
                run = self._run_of[key]
                del run.keys[run.keys.index(key, run.num_moved)]
                taken.append((run, [key]))
        victims: list[BlockKey] = []
        emptied: dict[PromptRun, BlockKey] = {}
        for run, keys in taken:
            victims += keys
            run.num_evicted += len(keys)
            if run.is_empty:
                emptied[run] = keys[-1]  # evicted from the end, so the last is its first block
        for key in victims:
            del self._run_of[key]
        for run in emptied:
            self._leave(run)
        return victims, emptied

    def check(self, order: Iterable[PromptRun]) -> None:
        """Raise BookError if the runs in `order` do not match the index."""
        runs = list(order)
        keys = [key for run in runs for key in run.keys[run.num_moved :]]
        if len(keys) != len(self._run_of) or set(keys) != self._run_of.keys():
            raise BookError("a block is in no run, or in two runs")
        if any(run.is_empty for run in runs):
            raise BookError("there is an empty run")

    def _pop_idle(
        self, run: PromptRun, max_keys: int, is_idle: Callable[[BlockKey], bool]
    ) -> list[BlockKey]:
        """Remove idle blocks from the end of a run, up to a block that another run follows."""
        keys, following = run.keys, self._following
        popped: list[BlockKey] = []
        for _ in range(min(max_keys, len(keys) - run.num_moved)):
            key = keys[-1]
            if not is_idle(key) or (popped and key in following):
                break
            popped.append(keys.pop())
        return popped

    def _last_after(self, run: PromptRun) -> PromptRun:
        """Follow the runs after this one to a last one.

        Parents may have been guessed after a restart, so there can be cycles.
        """
        passed: set[PromptRun] = set()
        while run not in passed and (followers := self._following.get(run.keys[-1])):
            follower = next((each for each in followers if not each.is_empty), None)
            if follower is None:
                break
            passed.add(run)
            run = follower
        return run

    def _follow(self, run: PromptRun) -> None:
        if run.parent is not None:
            self._following.setdefault(run.parent, {})[run] = None

    def _leave(self, run: PromptRun) -> None:
        if run.parent is not None and (followers := self._following.get(run.parent)) is not None:
            followers.pop(run, None)
            if not followers:
                del self._following[run.parent]


def _idle_ones(runs: Iterable[PromptRun], is_idle: Callable[[BlockKey], bool]) -> list[BlockKey]:
    return [key for run in runs for key in reversed(run.keys[run.num_moved :]) if is_idle(key)]
