"""How soon blocks of a kind come back, learnt from those that did: what one is worth at each age.

A block that has been kept for some time is worth keeping on if, over some time ahead, it is likely
to be used, seen per block and time that this takes. The best such ratio over all times ahead is its
index (Gittins, "Bandit Processes and Dynamic Allocation Indices", JRSS B 1979; Aalto et al., "On
the Gittins index in the M/G/1 queue", Queueing Systems 2009: for a system of jobs it is optimal to
serve the one with the largest). Of all blocks the one with the least index goes first.

Kinds are how often a block has been used: a conversation that went on three times goes on a fourth
time more likely than a new one a second time. Time is counted in blocks that came, so that neither
a clock nor the traffic's rate matters. Nothing here is fitted to a trace: all counts start from
almost nothing, and old ones fade.
"""

from __future__ import annotations

import math

NUM_KINDS = 8

_STEPS_PER_OCTAVE = 4  # ages are told apart on a scale of powers of two
_HORIZON = 32  # in capacities: what comes back later than that is as good as new
_FADING = 0.98  # of all counts, each time the indices are computed
_DOUBT_BLOCKS = 100.0  # so many blocks of a kind weigh as much as what all kinds have in common


class ReuseRates:
    def __init__(self, capacity: int) -> None:
        self._unit = max(1.0, capacity / 64)
        self.num_ages = int(_STEPS_PER_OCTAVE * math.log2(1 + _HORIZON * capacity / self._unit)) + 2
        # Where each age begins, in blocks that came since the last use.
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
        """Of keeping a block of this kind that was last used so many blocks ago."""
        return self.indices[kind][self.age_of(num_blocks)]

    def begin(self, uses: int, count: int = 1) -> int:
        """So many have been used so often now; they may come back, or not. Returns their kind."""
        kind = self.kind_of(uses)
        self._num_begun[kind] += count
        return kind

    def reused(self, uses: int, num_blocks_since: int, count: int = 1) -> None:
        """So many that had been used so often came back, so many blocks later."""
        self._num_reused[self.kind_of(uses)][self.age_of(num_blocks_since)] += count

    def compute(self) -> None:
        """Make the indices, by kind and age, from what has been seen."""
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
        """Of all kinds together. At first one block in two comes back, at any age as likely.

        On the scale of ages this is a rate that falls as 1 / age: with nothing known, what was
        used last is kept.
        """
        total = sum(self._num_begun) + 2.0
        at_ages = [sum(counts) for counts in zip(*self._num_reused, strict=True)]
        return [(count + 1 / self.num_ages) / total for count in at_ages]

    def _indices_of(self, shares: list[float]) -> list[float]:
        """`shares` of the blocks come back at each age."""
        costs = []  # what one block takes up within each age, in blocks x time
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
