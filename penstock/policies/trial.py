"""Which order keeps more of what comes back: by worth or by recency? Tried out on a sample.

What a policy has learnt can be wrong: traffic changes, and some traffic has nothing to learn from.
So beside the tier two small caches, without bytes, are given the same sample of its blocks. One
evicts what is worth least, the other what was used least recently, and the tier follows the one
that has more hits. Of a sample by hash, a cache smaller by as much has about the same share of
hits (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015).

In the sample each block counts alone. Both caches evict a prompt from its end, as the tier does,
so a block that is held has those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.types import BlockKey

_SAMPLE_BLOCKS = 1024  # the capacity of each of the two, unless the tier is smaller
_SAMPLED_BYTE = 7  # of a key, which is a hash: any would do
_MAX_MEMORY = 0.98  # of earlier leads, each time one is added

_Group = tuple[int, int]
"""Blocks of one kind that were last used at about the same time: kind and time."""


class Trial:
    """What follows does not depend on whether blocks are told of one by one or many at once."""

    def __init__(self, capacity: int, worth: Callable[[int, int], float]) -> None:
        """`worth` tells by kind and age what keeping a block is worth."""
        # In 256ths of all blocks.
        self._threshold = max(1, min(256, -(-256 * _SAMPLE_BLOCKS // capacity)))
        num_blocks = max(1, round(capacity * self._threshold / 256))
        self._step = max(1, capacity // 64)  # uses nearer to each other than that are as one
        self._by_worth = _Shadow(num_blocks)
        self._by_recency = _Shadow(num_blocks)
        self._worth = worth
        self._last: BlockKey | None = None
        self._time = 0  # when the prompt began that `_last` belongs to, in steps
        self._lead = 0  # of hits by worth over those by recency, since the last judgement
        self._sum = self._squares = 0.0  # of leads; old ones fade
        self._num_judged = 0
        self.prefers_worth = False  # until it has proved better

    def use(self, keys: Sequence[BlockKey], parent: BlockKey | None, kind: int, now: int) -> None:
        """Blocks that follow each other, and `parent`, came or were used; they are of this kind."""
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
                by_recency.evict(list(by_recency.groups))  # they began in this order
            if by_worth.is_full:
                by_worth.evict(sorted(by_worth.groups, key=self._worth_of))

    def judge(self) -> None:
        """Follow the better one, if the difference is more than chance would make."""
        lead, self._lead = self._lead, 0
        self._num_judged += 1
        # The later half of the past counts: at first little had been learnt.
        memory = min(_MAX_MEMORY, max(0.0, 1 - 2 / self._num_judged))
        self._sum = memory * self._sum + lead
        self._squares = memory * self._squares + lead * lead
        # Leads that come and go by chance add up to about the root of their squares.
        if self._sum * self._sum > self._squares:
            self.prefers_worth = self._sum > 0

    def _worth_of(self, group: _Group) -> float:
        kind, time = group
        return self._worth(kind, (self._time - time) * self._step)


class _Shadow:
    """A cache of names alone. Room is made for several at once; on average it holds `capacity`."""

    __slots__ = ("_capacity", "_group_of", "_num_listed", "_slack", "groups")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slack = capacity // 16
        self._group_of: dict[BlockKey, _Group] = {}
        # In the order of their use; some have been used again since, and are in another one too.
        self.groups: dict[_Group, list[BlockKey]] = {}
        self._num_listed = 0

    @property
    def is_full(self) -> bool:
        return len(self._group_of) > self._capacity + self._slack

    def use(self, key: BlockKey, group: _Group) -> bool:
        """Returns whether the block was held."""
        was_held = key in self._group_of
        self._group_of[key] = group
        self.groups.setdefault(group, []).append(key)
        self._num_listed += 1
        if self._num_listed > 4 * (self._capacity + self._slack) + 64:
            self._list_anew()
        return was_held

    def evict(self, order: Iterable[_Group]) -> None:
        """Make room, of the first groups first, and in each of what was used last: its tail."""
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

    def _list_anew(self) -> None:
        """Without what was used again. The groups keep their order."""
        groups: dict[_Group, list[BlockKey]] = {}
        for group, keys in self.groups.items():
            kept = dict.fromkeys(key for key in keys if self._group_of.get(key) == group)
            if kept:
                groups[group] = list(kept)
        self.groups = groups
        self._num_listed = len(self._group_of)
