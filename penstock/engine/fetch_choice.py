"""Decides in which waves the cold blocks of a step are fetched, and knows which are already there.

The device's buffers hold the blocks of one wave. A wave's blocks are those that some spans of the
sequences read, so attention over these spans can run when the wave has arrived. Most steps need one
wave.

Two steps of the same sequences read almost the same blocks, so the first layers of the next step
are fetched before it begins (see `fetching`). They are valid only if every sequence of the last
step takes part again and has kept all its pins: then their HOST slots cannot have changed.

Layers with a window fetch the first blocks of a wave: those that it reaches (see `reach`). A block
that no layer reads is in no wave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.engine.cold_split import whole_spans
from penstock.engine.reach import FAR_REACH, Reach
from penstock.engine.table import Addresses, BlockTable, Places

ON_CPU = -1  # instead of a span's wave
_NONE: Places = np.zeros(0, np.int64)


class CpuShare(NamedTuple):
    """What the CPU attends to."""

    spans: Sequence[Places]  # of each sequence
    blocks: Places  # the addresses of these spans' blocks, in the same order


NO_SHARE = CpuShare((), _NONE)


class CpuPart(Protocol):
    """Chooses what the CPU attends to."""

    @property
    def is_stale(self) -> bool:
        """Whether it would choose otherwise now."""
        ...

    def choose(self, available: Sequence[Places], num_cold: int) -> Sequence[Places]:
        """Of each sequence's available spans, those for the CPU. `num_cold`: all cold blocks."""
        ...


class Fetches(NamedTuple):
    """The cold blocks that a step fetches, in waves."""

    sources: Places  # their addresses, wave after wave
    num_sources: Sequence[int]  # of each wave
    num_there: Sequence[int]  # of each wave, from the first: their first layers are there already
    num_near: Sequence[int]  # of each wave, from the first: what layers with a window fetch
    span_waves: Sequence[Places]  # for each sequence, the waves of its spans
    on_cpu: CpuShare = NO_SHARE


class FetchPlan(NamedTuple):
    table: Places  # the addresses of all sequences' blocks; `~n` for the n-th block of its wave
    fetches: Fetches


class _Seen(NamedTuple):
    """A sequence of the last step."""

    table: BlockTable
    num_moves: int
    num_releases: int


class _Wave(NamedTuple):
    places: Places  # that it fetches
    after: Places  # how many tokens the nearest reader has after each block
    num_near: int  # see `Fetches`


_NO_WAVE = _Wave(_NONE, _NONE, 0)


@dataclass(slots=True)
class _Chosen:
    waves: list[_Wave]
    sources: Places
    tables: list[Places]
    lengths: Places
    span_waves: list[Places]
    on_cpu: CpuShare = NO_SHARE


class FetchChoice:
    def __init__(
        self,
        max_fetched: int,
        span_blocks: int,
        cpu_part: CpuPart | None = None,
        reach: Reach = FAR_REACH,
    ) -> None:
        """`max_fetched`: in one wave; a span of a sequence has `span_blocks` blocks, all in one."""
        self.max_fetched = max_fetched
        self._cpu_part = cpu_part
        self._reach = reach
        self.is_steady = False  # the next step will likely read the same blocks
        self._span_blocks = span_blocks
        self._seen: list[_Seen] = []
        self._chosen = _Chosen([], _NONE, [], _NONE, [])
        self._ahead: list[_Wave] = []

    def choose(
        self,
        tables: Sequence[BlockTable],
        places: Sequence[Places],
        lengths: Sequence[int],
        addresses: Addresses,
    ) -> FetchPlan:
        """Choose what to fetch when. Blocks that are already there keep their number.

        `places` and `lengths`: the blocks, and how many tokens, are read from each of `tables`.
        """
        seen = [_Seen(table, table.num_moves, table.num_releases) for table in tables]
        self.is_steady = self._all_hold(seen)
        ahead = self._ahead if self.is_steady else []
        is_stale = self._cpu_part is not None and self._cpu_part.is_stale
        now = np.array(lengths, np.int64)
        is_same = seen == self._seen and not is_stale and bool((now >= self._chosen.lengths).all())
        if is_same and all(map(_has_grown_on_device, places, self._chosen.tables)):
            self._grow(places, now, addresses)
            num_there = [len(wave.places) for wave in ahead]
        else:
            self._chosen, num_there = self._choose_again(places, now, ahead, addresses)
        self._seen, self._ahead = seen, []
        chosen = self._chosen
        self.is_steady &= bool(chosen.waves)  # without any, the step does not tell what to fetch
        num_there += [0] * (len(chosen.waves) - len(num_there))
        fetches = Fetches(
            chosen.sources,
            [len(wave.places) for wave in chosen.waves],
            num_there,
            [wave.num_near for wave in chosen.waves],
            chosen.span_waves,
            chosen.on_cpu,
        )
        return FetchPlan(np.concatenate(chosen.tables), fetches)

    def fetch_ahead(self) -> None:
        """The last choice is being fetched for the next step."""
        self._ahead = self._chosen.waves
        self.is_steady = False

    def forget(self) -> None:
        """A step fetches nothing: blocks that were fetched ahead may be incomplete."""
        self._seen, self._ahead = [], []
        self.is_steady = False

    def _grow(self, places: Sequence[Places], lengths: Places, addresses: Addresses) -> None:
        """Add the sequences' new blocks, which are on the device. Windows move on."""
        chosen = self._chosen
        if self._reach.window and chosen.waves:
            num_more = int((lengths - chosen.lengths).min())
            chosen.waves = [self._wave(w.places, w.after + num_more) for w in chosen.waves]
            chosen.lengths = chosen.lengths + num_more
        for index, mine in enumerate(places):
            known = len(chosen.tables[index])
            if len(mine) > known:
                more = addresses.of(mine[known:])
                chosen.tables[index] = np.concatenate([chosen.tables[index], more])
                chosen.span_waves[index] = self._with_new_spans(chosen.span_waves[index], len(mine))

    def _wave(self, places: Places, after: Places) -> _Wave:
        return _Wave(places, after, self._reach.num_near(after))

    def _with_new_spans(self, waves: Places, num_blocks: int) -> Places:
        num_new = self._num_spans(num_blocks) - len(waves)
        return np.concatenate([waves, np.zeros(num_new, np.int64)])

    def _num_spans(self, num_blocks: int) -> int:
        return -(-num_blocks // self._span_blocks)

    def _choose_again(
        self,
        places: Sequence[Places],
        lengths: Places,
        ahead: list[_Wave],
        addresses: Addresses,
    ) -> tuple[_Chosen, list[int]]:
        """Also returns how many of each wave's blocks are already there."""
        sizes = [len(mine) for mine in places]
        begins = np.cumsum([0, *sizes])
        everything = np.concatenate(places)
        at = np.flatnonzero(everything < 0)
        sequences = np.searchsorted(begins, at, side="right") - 1
        after = self._reach.tokens_after(at - begins[sequences], lengths[sequences])
        if self._reach.is_limited:  # no layer reads the others
            is_read = after < self._reach.window
            at, sequences, after = at[is_read], sequences[is_read], after[is_read]
        spans = (at - begins[sequences]) // self._span_blocks
        span_begins = np.cumsum([0, *(self._num_spans(size) for size in sizes)])
        mapped = addresses.of(everything)
        for_cpu = self._choose_for_cpu(everything[at], sequences, spans, sizes)
        is_on_cpu = np.zeros(span_begins[-1], np.bool_)
        pieces = [_NONE]
        for sequence, mine in enumerate(for_cpu):
            is_on_cpu[span_begins[sequence] + mine] = True
            first = begins[sequence] + mine * self._span_blocks
            pieces.append(mapped[first[:, None] + np.arange(self._span_blocks)].ravel())
        on_cpu = CpuShare(for_cpu, np.concatenate(pieces))
        kept = ~is_on_cpu[span_begins[sequences] + spans]
        at, sequences, spans, after = at[kept], sequences[kept], spans[kept], after[kept]
        # Sequences that share a prefix read it in the same wave, so that it crosses the link once.
        order = np.lexsort((sequences, spans))
        cold = everything[at[order]]
        is_first = np.diff(spans[order], prepend=-1) != 0
        is_first |= np.diff(sequences[order], prepend=-1) != 0
        waves = _divide(cold, np.flatnonzero(is_first), self.max_fetched)
        num_waves = int(waves[-1]) + 1 if len(waves) else 0
        if len(ahead) != num_waves:
            ahead = [_NO_WAVE] * num_waves
        members, num_there = [], []
        for wave, there in enumerate(ahead):
            begin, end = np.searchsorted(waves, [wave, wave + 1])
            mine, which = np.unique(cold[begin:end], return_inverse=True)
            nearest = np.full(len(mine), np.iinfo(np.int64).max)
            np.minimum.at(nearest, which, after[order[begin:end]])
            listed, num_kept = self._in_order(mine, nearest, there)
            numbers = np.empty(len(mine), np.int64)
            numbers[listed] = np.arange(len(listed))
            mapped[at[order[begin:end]]] = ~numbers[which]
            members.append(self._wave(mine[listed], nearest[listed]))
            num_there.append(num_kept)
        span_waves = np.where(is_on_cpu, ON_CPU, 0)
        span_waves[(span_begins[sequences] + spans)[order]] = waves
        chosen = _Chosen(
            members,
            addresses.of(np.concatenate([*(wave.places for wave in members), _NONE])),
            np.split(mapped, begins[1:-1]),
            lengths,
            np.split(span_waves, span_begins[1:-1]),
            on_cpu,
        )
        return chosen, num_there

    def _in_order(self, mine: Places, nearest: Places, there: _Wave) -> tuple[Places, int]:
        """Indices of a wave's blocks in the order of their numbers, and how many are there."""
        reach, everything = self._reach, np.arange(len(mine))
        if np.isin(there.places, mine).all():  # otherwise a sequence is read only in part
            kept = np.searchsorted(mine, there.places)
            new = np.setdiff1d(everything, kept, assume_unique=True)
            order = np.concatenate([kept, reach.nearest_first(new, nearest)])
            # A window may reach a block that its layers have left out. And if what it reaches were
            # not in front, its layers would fetch too much.
            num_near = np.count_nonzero(nearest < reach.window) if reach.window else 0
            was_fetched = reach.num_near(nearest[kept]) <= there.num_near
            if was_fetched and reach.num_near(nearest[order]) == num_near:
                return order, len(kept)
        return reach.nearest_first(everything, nearest), 0

    def _choose_for_cpu(
        self, cold: Places, sequences: Places, spans: Places, sizes: Sequence[int]
    ) -> Sequence[Places]:
        if self._cpu_part is None:
            return []
        available = whole_spans(cold, sequences, spans, sizes, self._span_blocks)
        return self._cpu_part.choose(available, len(np.unique(cold)))

    def _all_hold(self, seen: Sequence[_Seen]) -> bool:
        """Whether all sequences of the last step take part and have released no pins."""
        here = {id(each.table) for each in seen}
        return bool(self._seen) and all(
            id(table) in here and table.num_releases == num for table, _, num in self._seen
        )


def _divide(cold: Places, firsts: NDArray[np.intp], limit: int) -> Places:
    """The wave of each of these blocks: as many spans as have at most `limit` different blocks.

    `firsts`: where each span begins. None has more than `limit` blocks.
    """
    waves = np.zeros(len(cold), np.int64)
    order = np.argsort(cold, kind="stable")
    is_same = cold[order[1:]] == cold[order[:-1]]
    before = np.full(len(cold), -1)  # where the same block is, the last time before
    before[order[1:][is_same]] = order[:-1][is_same]
    begin = wave = 0
    while begin < len(cold):
        window = 2 * limit
        while True:
            counts = np.cumsum(before[begin : begin + window] < begin)
            if counts[-1] > limit or begin + window >= len(cold):
                break
            window *= 2
        end = begin + int(np.searchsorted(counts, limit, side="right"))
        if end < len(cold):
            end = int(firsts[np.searchsorted(firsts, end, side="right") - 1])
        waves[begin:end] = wave
        begin, wave = end, wave + 1
    return waves


def _has_grown_on_device(places: Places, known: Places) -> bool:
    """Whether a sequence is read as far as before, and what is new is on the device.

    A cold block may be new though nothing has moved: before, the sequence was read only in part.
    """
    return len(places) >= len(known) and bool((places[len(known) :] >= 0).all())
