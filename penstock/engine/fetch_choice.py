"""Which cold blocks are brought to the device for a step, and which of them lie there already.

Between two steps of the same sequences little changes: what the next one will read of its first
layers is brought before it begins (see `fetching`). That counts only while every sequence of the
step before takes part and has kept all its pins: then nothing else can have come to their slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.engine.table import Addresses, BlockTable, Places

_NONE: Places = np.zeros(0, np.int64)


class FetchPlan(NamedTuple):
    table: Places  # the addresses of all sequences' blocks; `~n` for the n-th that is fetched
    sources: Places  # the addresses to fetch from
    num_there: int  # so many of them, from the first, lie there for the first layers


class _Seen(NamedTuple):
    """A sequence of the last step."""

    table: BlockTable
    num_moves: int
    num_releases: int


class FetchChoice:
    def __init__(self, max_fetched: int) -> None:
        self.max_fetched = max_fetched
        self.is_steady = False  # the next step will likely read what this one reads
        self._seen: list[_Seen] = []
        self._tables: list[Places] = []  # what was told of each
        self._chosen = self._sources = self._brought = _NONE

    def choose(
        self, tables: Sequence[BlockTable], places: Sequence[Places], addresses: Addresses
    ) -> FetchPlan:
        """`places`: what is read of each of `tables`. What most sequences read is fetched first;
        but what lies there already keeps its number."""
        seen = [_Seen(table, table.num_moves, table.num_releases) for table in tables]
        self.is_steady = self._all_hold(seen)
        num_there = len(self._brought) if self.is_steady else 0
        if seen == self._seen and all(map(_is_longer, places, self._tables)):
            for index, (mine, told) in enumerate(zip(places, self._tables, strict=True)):
                if len(mine) > len(told):  # it has grown: on the device
                    more = addresses.of(mine[len(told) :])
                    self._tables[index] = np.concatenate([told, more])
        else:
            num_there = self._choose_anew(places, num_there, addresses)
        self._seen, self._brought = seen, _NONE
        return FetchPlan(np.concatenate(self._tables), self._sources, num_there)

    def bring_ahead(self) -> None:
        """What was chosen last is brought for the next step."""
        self._brought = self._chosen
        self.is_steady = False

    def forget(self) -> None:
        """A step is told that nothing is fetched: what was brought may not be whole."""
        self._seen, self._brought = [], _NONE
        self.is_steady = False

    def _choose_anew(self, places: Sequence[Places], num_there: int, addresses: Addresses) -> int:
        """Returns how many lie there."""
        there = self._brought[:num_there]
        everything = np.concatenate(places)
        at = np.flatnonzero(everything < 0)
        cold, which, counts = np.unique(everything[at], return_inverse=True, return_counts=True)
        is_there = np.isin(cold, there)
        if int(is_there.sum()) != len(there):  # not all of a sequence is read
            there, is_there = _NONE, np.zeros(len(cold), np.bool_)
        by_readers = np.argsort(-counts, kind="stable")
        new = by_readers[~is_there[by_readers]][: self.max_fetched - len(there)]
        self._chosen = np.concatenate([there, cold[np.sort(new)]])
        self._sources = addresses.of(self._chosen)
        numbers = np.full(len(cold), -1)
        numbers[np.searchsorted(cold, self._chosen)] = np.arange(len(self._chosen))
        numbers = numbers[which]
        is_fetched = numbers >= 0
        told = addresses.of(everything)
        told[at[is_fetched]] = ~numbers[is_fetched]
        self._tables = np.split(told, np.cumsum([len(mine) for mine in places])[:-1])
        return len(there)

    def _all_hold(self, seen: Sequence[_Seen]) -> bool:
        """Whether all sequences of the last step are among these, and have let no pin go."""
        here = {id(each.table) for each in seen}
        return bool(self._seen) and all(
            id(table) in here and table.num_releases == num for table, _, num in self._seen
        )


def _is_longer(one: Places, other: Places) -> bool:
    return len(one) >= len(other)
