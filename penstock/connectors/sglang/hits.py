"""How many leading pages of a prompt can be used, if its KV lies in several pools.

SGLang asks for a prefix. Its main pool and some others need every page of it. Pools of windows and
states need only the last pages, and can therefore be used at some lengths and not at others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class PoolPresence(NamedTuple):
    """Which pages of the prompt a pool has."""

    name: str
    present: Sequence[bool]
    num_trailing: int | None = None  # it needs only so many pages before the end; None: all

    @property
    def lengths(self) -> set[int]:
        """The prefix lengths, in pages, at which this pool has what it needs."""
        if self.num_trailing is None:
            return set(range(1, leading(self.present) + 1))
        found, run = set(), 0
        for length, is_present in enumerate(self.present, 1):
            run = run + 1 if is_present else 0
            if run >= min(self.num_trailing, length):
                found.add(length)
        return found


class Hits(NamedTuple):
    """What SGLang is told."""

    num_pages: int  # the longest prefix that can be used
    by_pool: Mapping[str, int]  # the longest that each pool could serve, without those at 0
    lengths: list[int]  # all prefixes that can be used, ascending


def leading(present: Sequence[bool]) -> int:
    """How many are present before the first that is not."""
    for index, is_present in enumerate(present):
        if not is_present:
            return index
    return len(present)


def usable(main: PoolPresence, others: Sequence[PoolPresence] = ()) -> Hits:
    """Intersect what the pools have. A prefix is limited by `main`, which needs every page."""
    num_main = leading(main.present)
    lengths = set(range(1, num_main + 1))
    by_pool = {main.name: num_main}
    for pool in others:
        found = {length for length in pool.lengths if length <= num_main}
        by_pool[pool.name] = max(found, default=0)
        lengths &= found
    return Hits(
        max(lengths, default=0),
        {name: count for name, count in by_pool.items() if count},
        sorted(lengths),
    )
