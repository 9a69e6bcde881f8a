"""Chooses the cold blocks to fetch to the device for a step, and knows which are already there.

Two steps of the same sequences read almost the same blocks, so the first layers of the next step
are fetched before it begins (see `fetching`). They are valid only if every sequence of the last
step takes part again and has kept all its pins: then their HOST slots cannot have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.engine.table import Addresses, BlockTable, Places

_NONE: Places = np.zeros(0, np.int64)


class FetchPlan(NamedTuple):
    table: Places  # the addresses of all sequences' blocks; `~n` for the n-th fetched block
    sources: Places  # the addresses to fetch from
    num_there: int  # how many of them, from the first, need no fetch for the first layers


class _Seen(NamedTuple):
    """A sequence of the last step."""

    table: BlockTable
    num_moves: int
    num_releases: int


class FetchChoice:
    def __init__(self, max_fetched: int) -> None:
        self.max_fetched = max_fetched
        self.is_steady = False  # the next step will likely read the same blocks
        self._seen: list[_Seen] = []
        self._tables: list[Places] = []  # each sequence's part of the last plan's table
        self._chosen = self._sources = self._ahead = _NONE

    def choose(
        self, tables: Sequence[BlockTable], places: Sequence[Places], addresses: Addresses
    ) -> FetchPlan:
        """Choose what to fetch. `places`: the blocks that are read from each of `tables`.

        Blocks with the most readers are fetched first. Blocks that are already there keep their
        number.
        """
        seen = [_Seen(table, table.num_moves, table.num_releases) for table in tables]
        self.is_steady = self._all_hold(seen)
        num_there = len(self._ahead) if self.is_steady else 0
        if seen == self._seen and all(map(_is_longer, places, self._tables)):
            for index, (mine, mapped) in enumerate(zip(places, self._tables, strict=True)):
                if len(mine) > len(mapped):  # new blocks are always on the device
                    more = addresses.of(mine[len(mapped) :])
                    self._tables[index] = np.concatenate([mapped, more])
        else:
            num_there = self._choose_again(places, num_there, addresses)
        self._seen, self._ahead = seen, _NONE
        return FetchPlan(np.concatenate(self._tables), self._sources, num_there)

    def fetch_ahead(self) -> None:
        """The last choice is being fetched for the next step."""
        self._ahead = self._chosen
        self.is_steady = False

    def forget(self) -> None:
        """A step fetches nothing: blocks that were fetched ahead may be incomplete."""
        self._seen, self._ahead = [], _NONE
        self.is_steady = False

    def _choose_again(self, places: Sequence[Places], num_there: int, addresses: Addresses) -> int:
        """Returns how many of the chosen blocks are already there."""
        there = self._ahead[:num_there]
        everything = np.concatenate(places)
        at = np.flatnonzero(everything < 0)
        cold, which, counts = np.unique(everything[at], return_inverse=True, return_counts=True)
        is_there = np.isin(cold, there)
        if int(is_there.sum()) != len(there):  # a sequence is read only in part
            there, is_there = _NONE, np.zeros(len(cold), np.bool_)
        by_readers = np.argsort(-counts, kind="stable")
        new = by_readers[~is_there[by_readers]][: self.max_fetched - len(there)]
        self._chosen = np.concatenate([there, cold[np.sort(new)]])
        self._sources = addresses.of(self._chosen)
        numbers = np.full(len(cold), -1)
        numbers[np.searchsorted(cold, self._chosen)] = np.arange(len(self._chosen))
        numbers = numbers[which]
        is_fetched = numbers >= 0
        mapped = addresses.of(everything)
        mapped[at[is_fetched]] = ~numbers[is_fetched]
        self._tables = np.split(mapped, np.cumsum([len(mine) for mine in places])[:-1])
        return len(there)

    def _all_hold(self, seen: Sequence[_Seen]) -> bool:
        """Whether all sequences of the last step take part and have released no pins."""
        here = {id(each.table) for each in seen}
        return bool(self._seen) and all(
            id(table) in here and table.num_releases == num for table, _, num in self._seen
        )


def _is_longer(one: Places, other: Places) -> bool:
    return len(one) >= len(other)
