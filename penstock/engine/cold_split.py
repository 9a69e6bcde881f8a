"""Splits a step's cold blocks between the CPU, which attends to them in DRAM, and the link. Pure.

The link brings blocks to the device during the whole step. The CPU works only while attention waits
for it, so it has less time: not the seconds in which the GPU multiplies matrices. Its share is the
one with which both end together. It gets whole spans (see `fetch_choice`), the first ones of each
sequence, in proportion to what each has. Blocks that several sequences read stay with the link,
which brings them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.config.options import COLD_AUTO, COLD_CPU

_LEAST_GAIN = 0.05  # of the time that the link would need alone


@dataclass(frozen=True, slots=True)
class ColdRates:
    """Measured rates, in bytes of raw KV per second. A block counts with its raw size in both."""

    link: float
    cpu: float
    other_seconds: float = 0.0  # of a step, in which the CPU does not attend


def num_for_cpu(
    num_spans: int, span_bytes: int, cold_bytes: int, rates: ColdRates, limit: int
) -> int:
    """How many of `num_spans` spans the CPU attends to so that the step ends soonest.

    `cold_bytes`: of everything cold, including these spans. 0 if the step would gain little.
    """
    if num_spans < 1 or rates.cpu <= 0 or rates.link <= 0:
        return 0
    alone = cold_bytes / rates.link
    share_bytes = (alone - rates.other_seconds) / (1 / rates.link + 1 / rates.cpu)
    least = max(0, int(share_bytes // span_bytes))

    def seconds(count: int) -> float:
        taken = count * span_bytes
        return max((cold_bytes - taken) / rates.link, taken / rates.cpu + rates.other_seconds)

    chosen = min((min(each, num_spans, limit) for each in (least, least + 1)), key=seconds)
    return chosen if seconds(chosen) <= (1 - _LEAST_GAIN) * alone else 0


def divide(count: int, available: Sequence[int]) -> list[int]:
    """Divide `count` in proportion to what is available, the largest remainders first."""
    total = sum(available)
    count = min(count, total)
    if not count:
        return [0] * len(available)
    shares = [count * each // total for each in available]
    remainders = [count * each % total for each in available]
    order = sorted(range(len(available)), key=lambda i: (-remainders[i], i))
    for index in order[: count - sum(shares)]:
        shares[index] += 1
    return shares


def whole_spans(
    cold: NDArray[np.int64],
    sequences: NDArray[np.int64],
    spans: NDArray[np.int64],
    sizes: Sequence[int],
    span_blocks: int,
) -> list[NDArray[np.int64]]:
    """For each sequence, the spans that the CPU could attend to.

    `cold`: the places of all cold blocks, with the sequence and span of each. `sizes`: how many
    blocks each sequence reads; the last one may be read only in part, so its span is left out.
    """
    found: list[NDArray[np.int64]] = [np.zeros(0, np.int64) for _ in sizes]
    if not len(cold):
        return found
    _, which, counts = np.unique(cold, return_inverse=True, return_counts=True)
    is_own = counts[which] == 1
    for sequence, size in enumerate(sizes):
        mine = spans[(sequences == sequence) & is_own]
        numbers, num_cold = np.unique(mine, return_counts=True)
        is_whole = (num_cold == span_blocks) & ((numbers + 1) * span_blocks < size)
        found[sequence] = numbers[is_whole]
    return found


@dataclass(frozen=True, slots=True)
class ColdSplit:
    """How steps are split. An engine has one; its rates change as they are measured."""

    mode: str
    span_bytes: int
    max_spans: int  # of one step

    def choose(
        self, available: Sequence[NDArray[np.int64]], cold_bytes: int, rates: ColdRates | None
    ) -> list[NDArray[np.int64]]:
        """Of each sequence's available spans, those for the CPU. `rates`: None if unknown."""
        total = sum(map(len, available))
        count = 0
        if self.mode == COLD_CPU:
            count = min(total, self.max_spans)
        elif self.mode == COLD_AUTO and rates is not None:
            count = num_for_cpu(total, self.span_bytes, cold_bytes, rates, self.max_spans)
        shares = divide(count, [len(each) for each in available])
        return [each[:share] for each, share in zip(available, shares, strict=True)]
