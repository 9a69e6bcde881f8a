"""ReuseRates: learns how soon blocks are reused, and from that the worth of a block at each age.

Keeping a block for some time ahead gives a number of expected hits, and costs that time. The best
ratio of hits to cost over all times ahead is the block's index (Gittins, "Bandit Processes and
Dynamic Allocation Indices", JRSS B 1979; Aalto et al., "On the Gittins index in the M/G/1 queue",
Queueing Systems 2009: serving the job with the largest index is optimal). The block with the
lowest index is evicted first.

A block's kind is its number of uses: a conversation with three turns is more likely to continue
than a new one. Time is counted in inserted blocks, so that neither a clock nor the request rate
matters. Nothing is fitted to a trace: all counts start near zero, and old ones fade.
"""

from __future__ import annotations

import math

NUM_KINDS = 8

_STEPS_PER_OCTAVE = 4  # ages are on a logarithmic scale
_HORIZON = 32  # in capacities: a block reused later counts as new
_FADING = 0.98  # factor for all counts each time the indices are computed
_DOUBT_BLOCKS = 100.0  # weight of the average over all kinds, in blocks


class ReuseRates:
    def __init__(self, capacity: int) -> None:
        self._unit = max(1.0, capacity / 64)
        self.num_ages = int(_STEPS_PER_OCTAVE * math.log2(1 + _HORIZON * capacity / self._unit)) + 2
        # Where each age begins, in blocks inserted since the last use.
        self.starts = [
            self._unit * (2 ** (age / _STEPS_PER_OCTAVE) - 1) for age in range(self.num_ages + 1)
        ]
        self._num_begun = [0.0] * NUM_KINDS
        self._num_reused = [[0.0] * self.num_ages for _ in range(NUM_KINDS)]
        self.indices: list[list[float]] = []
        self.compute()

    @staticmethod
    def kind_of(uses: int) -> int:
        return min(uses, NUM_KINDS) - 1

    def age_of(self, num_blocks: int) -> int:
        age = int(_STEPS_PER_OCTAVE * math.log2(1 + num_blocks / self._unit))
        return min(age, self.num_ages - 1)

    def worth(self, kind: int, num_blocks: int) -> float:
        """The worth of a block of this kind, last used `num_blocks` insertions ago."""
        return self.indices[kind][self.age_of(num_blocks)]

    def begin(self, uses: int, count: int = 1) -> int:
        """Record that `count` blocks have now been used `uses` times; returns their kind."""
        kind = self.kind_of(uses)
        self._num_begun[kind] += count
        return kind

    def reused(self, uses: int, num_blocks_since: int, count: int = 1) -> None:
        """Record that `count` blocks, each used `uses` times, were reused.

        `num_blocks_since` other blocks were inserted since their last use.
        """
        self._num_reused[self.kind_of(uses)][self.age_of(num_blocks_since)] += count

    def compute(self) -> None:
        """Compute the indices, by kind and age, from the counts."""
        common = self._common()
        self.indices = []
        for begun, reused in zip(self._num_begun, self._num_reused, strict=True):
            total = begun + _DOUBT_BLOCKS
            shares = [
                (count + _DOUBT_BLOCKS * share) / total
                for count, share in zip(reused, common, strict=True)
            ]
            self.indices.append(self._indices_of(shares))
        self._num_begun = [_FADING * count for count in self._num_begun]
        self._num_reused = [[_FADING * count for count in row] for row in self._num_reused]

    def _common(self) -> list[float]:
        """Shares of reuse at each age over all kinds. Initially half of all blocks are reused.

        All ages are equally likely then. Ages are logarithmic, so the rate of reuse falls as
        1 / age, and until something is learned the most recently used blocks are kept.
        """
        total = sum(self._num_begun) + 2.0
        at_ages = [sum(counts) for counts in zip(*self._num_reused, strict=True)]
        return [(count + 1 / self.num_ages) / total for count in at_ages]

    def _indices_of(self, shares: list[float]) -> list[float]:
        """The index at each age, if `shares` of the blocks are reused at each age."""
        costs = []  # expected room a block takes within each age, in blocks x time
        left = 1.0
        for age, share in enumerate(shares):
            after = max(left - share, 1e-6)
            costs.append((left + after) / 2 * (self.starts[age + 1] - self.starts[age]))
            left = after
        indices = []
        for first in range(self.num_ages):
            best = hits = cost = 0.0
            for age in range(first, self.num_ages):
                hits += shares[age]
                cost += costs[age]
                if hits > best * cost:
                    best = hits / cost
            indices.append(best)
        return indices
