"""Trial: tests on a sample whether evicting by worth or by recency gives more hits.

What a policy has learned can be wrong: traffic changes, and some has no pattern. So two small
caches without data receive the same sample of the tier's blocks. One evicts the blocks with the
lowest worth, the other the least recently used, and the tier follows the one with more hits. A
cache that is scaled down together with its sample has about the same hit rate (Waldspurger et al.,
"Efficient MRC Construction with SHARDS", FAST 2015).

In the sample each block counts by itself. Both caches evict a prompt from its end, as the tier
does, so if they hold a block, they hold those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.types import BlockKey

_SAMPLE_BLOCKS = 1024  # capacity of each small cache, unless the tier is smaller
_SAMPLED_BYTE = 7  # of the key; any would do, because the key is a hash
_MAX_MEMORY = 0.98  # factor for earlier leads each time one is added

_Group = tuple[int, int]
"""Kind and time of blocks of one kind that were last used at about the same time."""


class Trial:
    """The result does not depend on how blocks are batched into calls of `use`."""

    def __init__(self, capacity: int, worth: Callable[[int, int], float]) -> None:
        """`worth` returns the worth of a block from its kind and age."""
        # Sampled share of all blocks, in 256ths.
        self._threshold = max(1, min(256, -(-256 * _SAMPLE_BLOCKS // capacity)))
        num_blocks = max(1, round(capacity * self._threshold / 256))
        self._step = max(1, capacity // 64)  # resolution of times, in blocks
        self._by_worth = _Shadow(num_blocks)
        self._by_recency = _Shadow(num_blocks)
        self._worth = worth
        self._last: BlockKey | None = None
        self._time = 0  # start of the prompt that `_last` belongs to, in steps
        self._lead = 0  # hits by worth minus hits by recency since the last `judge`
        self._sum = self._squares = 0.0  # of the leads; old ones fade
        self._num_judged = 0
        self.prefers_worth = False  # until it has proved better than recency

    def use(self, keys: Sequence[BlockKey], parent: BlockKey | None, kind: int, now: int) -> None:
        """Record that consecutive blocks after `parent`, of one kind, were inserted or used."""
        if parent is None or parent != self._last:
            self._time = now // self._step
        self._last = keys[-1]
        threshold = self._threshold
        sample = [key for key in keys if key[_SAMPLED_BYTE] < threshold]
        if not sample:
            return
        by_worth, by_recency = self._by_worth, self._by_recency
        for key in sample:
            self._lead += by_worth.use(key, (kind, self._time))
            self._lead -= by_recency.use(key, (0, self._time))
            if by_recency.is_full:
                by_recency.evict(list(by_recency.groups))  # oldest first
            if by_worth.is_full:
                by_worth.evict(sorted(by_worth.groups, key=self._worth_of))

    def judge(self) -> None:
        """Prefer the better order, if the difference is larger than chance explains."""
        lead, self._lead = self._lead, 0
        self._num_judged += 1
        # Only the later half of the past counts, because little was learned at first.
        memory = min(_MAX_MEMORY, max(0.0, 1 - 2 / self._num_judged))
        self._sum = memory * self._sum + lead
        self._squares = memory * self._squares + lead * lead
        # Random leads add up to about the square root of the sum of their squares.
        if self._sum * self._sum > self._squares:
            self.prefers_worth = self._sum > 0

    def _worth_of(self, group: _Group) -> float:
        kind, time = group
        return self._worth(kind, (self._time - time) * self._step)


class _Shadow:
    """A cache without data. It evicts several blocks at once, and holds `capacity` on average."""

    __slots__ = ("_capacity", "_group_of", "_num_listed", "_slack", "groups")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slack = capacity // 16
        self._group_of: dict[BlockKey, _Group] = {}
        # In order of use. A block used again since is also in a later group.
        self.groups: dict[_Group, list[BlockKey]] = {}
        self._num_listed = 0

    @property
    def is_full(self) -> bool:
        return len(self._group_of) > self._capacity + self._slack

    def use(self, key: BlockKey, group: _Group) -> bool:
        """Use a block; returns whether it was held."""
        was_held = key in self._group_of
        self._group_of[key] = group
        self.groups.setdefault(group, []).append(key)
        self._num_listed += 1
        if self._num_listed > 4 * (self._capacity + self._slack) + 64:
            self._compact()
        return was_held

    def evict(self, order: Iterable[_Group]) -> None:
        """Make room. Evicts groups in `order`, and each from its end, the tail of its prompt."""
        held = self._group_of
        num_left = len(held) - self._capacity + self._slack
        for group in order:
            keys = self.groups[group]
            while keys and num_left:
                key = keys.pop()
                self._num_listed -= 1
                if held.get(key) == group:
                    del held[key]
                    num_left -= 1
            if keys:
                return
            del self.groups[group]

    def _compact(self) -> None:
        """Remove blocks from the groups before their latest one."""
        groups: dict[_Group, list[BlockKey]] = {}
        for group, keys in self.groups.items():
            kept = dict.fromkeys(key for key in keys if self._group_of.get(key) == group)
            if kept:
                groups[group] = list(kept)
        self.groups = groups
        self._num_listed = len(self._group_of)
