"""Least recently used, aware of prefixes: a prompt is evicted from its end.

All prefix caches do this in some form. The tree of SGLang's RadixAttention (Zheng et al., "SGLang:
Efficient Execution of Structured Language Model Programs", NeurIPS 2024) evicts the least recently
used leaf. Here runs of blocks take the place of tree nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from penstock.policies.base import Policy
from penstock.policies.runs import PromptRun, Runs
from penstock.types import BlockKey


class PrefixLRU(Policy):
    def __init__(self, capacity: int) -> None:
        self._runs = Runs()
        self._order: OrderedDict[PromptRun, None] = OrderedDict()  # least recent first

    def __len__(self) -> int:
        return len(self._runs)

    def admit(self, key: BlockKey) -> bool:
        return True

    def insert(self, key: BlockKey, parent: BlockKey | None = None) -> None:
        self._join([key], parent)

    def touch(self, key: BlockKey) -> None:
        run, parent, taken = self._runs.take(key)
        if run.is_empty:
            del self._order[run]
        self._join(taken, parent)

    def touch_all(self, keys: Sequence[BlockKey]) -> None:
        for key in self._runs.last_ones(keys):
            self.touch(key)

    def forget(self, key: BlockKey) -> None:
        run = self._runs.remove(key)
        if run.is_empty:
            del self._order[run]

    def demote(self, key: BlockKey) -> None:
        _, tail = self._runs.split(key)
        self._order[tail] = None
        self._order.move_to_end(tail, last=False)

    def pick(self, num_victims: int, is_idle: Callable[[BlockKey], bool]) -> list[BlockKey]:
        victims, emptied = self._runs.evict(lambda: self._order, num_victims, is_idle)
        for run in emptied:
            del self._order[run]
        return victims

    def check(self) -> None:
        self._runs.check(self._order)

    def _join(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        """Add consecutive blocks that were used just now."""
        run = self._runs.ending_with(parent)
        if run is None:
            run = self._runs.start(parent)
        self._runs.add(keys, run)
        self._order[run] = None
        self._order.move_to_end(run)
