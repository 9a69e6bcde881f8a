"""The input of a step's decode kernels: tensors at fixed addresses, refilled for each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.attention.packed_triton import WAVE_NUMBERS
from penstock.engine.attention.triton import pull_plan
from penstock.engine.fetch_choice import ON_CPU, Fetches
from penstock.engine.table import Places

_cuda: Any = torch.cuda  # mostly untyped

NO_FETCHES = Fetches(np.zeros(0, np.int64), (), (), (), ())


class StepKind(NamedTuple):
    """What a step does with blocks in DRAM, besides what its plan says."""

    fetches: bool = False
    on_cpu: bool = False  # the CPU attends to some of them
    brings: bool = False  # blocks arrive from DRAM (see `bringing`)


def span_blocks(part_tokens: int, block_tokens: int) -> int:
    """The fewest blocks that begin and end with a part: a wave has all of them, or none."""
    return math.lcm(part_tokens, block_tokens) // block_tokens


@dataclass(frozen=True, slots=True)
class PartRoom:
    """Scratch memory for the parts of all sequences of a step."""

    sums: Tensor
    largest: Tensor
    totals: Tensor

    @classmethod
    def make(cls, num_items: int, num_heads: int, head_dim: int, device: torch.device) -> PartRoom:
        shape = (num_items, num_heads)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )


class DecodePlan:
    """For up to `max_sequences` with `max_blocks` blocks in total. It is one buffer:

        num_items | num_blocks | num_fetched | num_waves | token ids | positions | addresses
        | lengths | starts | first items | sequences of items | parts of items | table | fetched
        | waves

    A wave is six numbers: its first block in `fetched`, how many it fetches, how many of them have
    their first layers on the device already, its first item, its number of items, and how many
    blocks it fetches for layers with a window. A step that fetches nothing has one wave.

    The plan also has the rows of a replayed step: their token ids, positions, and the addresses of
    their keys in the first layer. `fill` waits until the plan before has been read from pinned
    memory, which is when its step begins on the device. A step ends before the next one is read.
    """

    def __init__(
        self,
        max_sequences: int,
        max_blocks: int,
        block_tokens: int,
        part_tokens: int,
        device: torch.device,
        max_fetched: int = 0,
    ) -> None:
        """`max_fetched`: how many cold blocks one wave may fetch to the device."""
        self.max_fetched = max_fetched
        self._part_tokens = part_tokens
        self.block_tokens = block_tokens
        self.span_blocks = span_blocks(part_tokens, block_tokens)
        # A sequence's last part may be short and may end in the middle of a block.
        self.max_items = max_blocks * block_tokens // part_tokens + 2 * max_sequences
        sizes = [1, 1, 1, 1, *([max_sequences] * 6), self.max_items, self.max_items, max_blocks]
        sizes += [max_blocks if max_fetched else 0, WAVE_NUMBERS.value * self.max_items]
        ends = np.cumsum(sizes).tolist()
        begins = [0, *ends[:-1]]
        on_gpu = device.type == "cuda"
        self._staged = torch.zeros(ends[-1], dtype=torch.int64, pin_memory=on_gpu)
        self._sent = torch.zeros(ends[-1], dtype=torch.int64, device=device)
        self._on_gpu = on_gpu
        self._read: Any = _cuda.Event() if on_gpu else None  # the plan that was sent last
        self._small_end = begins[10]
        self._large_begins = begins[10:]
        host = self._staged.numpy()
        parts = [host[begin:end] for begin, end in zip(begins, ends, strict=True)]
        self._num_items, self._num_blocks, self._num_fetched, self._num_waves = parts[:4]
        self._rows = parts[4:7]
        self._lengths, self._starts, self._first_items = parts[7:10]
        self._item_sequences, self._item_parts, self._table, self._fetched = parts[10:14]
        self._waves = parts[14].reshape(-1, WAVE_NUMBERS.value)
        sent = [self._sent[begin:end] for begin, end in zip(begins, ends, strict=True)]
        self.ids, self.positions, self.addresses = sent[4:7]
        self.lengths, self.starts, self.first_items = sent[7:10]
        self.item_sequences, self.item_parts, self.table, self.fetched = sent[10:14]
        self.waves = sent[14]

    @property
    def num_waves(self) -> int:
        """Of the step that was filled in last."""
        return int(self._num_waves[0])

    def fill(
        self,
        table: Places,
        num_blocks: Sequence[int],
        lengths: Sequence[int],
        rows: Sequence[NDArray[np.int64]] | None = None,
        fetches: Fetches = NO_FETCHES,
    ) -> None:
        """Fill in the next step.

        `table` has the addresses of all sequences' blocks; `num_blocks` and `lengths` say how many
        blocks and tokens each sequence has.
        """
        if self._read is not None:
            self._read.synchronize()
        count = len(lengths)
        num_parts = -(-np.array(lengths, np.int64) // self._part_tokens)
        first_items = np.concatenate([[0], np.cumsum(num_parts)])
        num_items = int(first_items[-1])
        self._num_blocks[0] = len(table)
        self._num_fetched[0] = len(fetches.sources)
        self._fetched[: len(fetches.sources)] = fetches.sources
        for target, source in zip(self._rows, rows or (), strict=False):
            target[: len(source)] = source
            target[len(source) : count] = 0
        self._lengths[:count] = lengths
        self._starts[:count] = np.cumsum(num_blocks) - num_blocks
        self._first_items[:count] = first_items[:-1]
        sequences = np.repeat(np.arange(count), num_parts)
        parts = np.arange(num_items) - first_items[sequences]
        num_waves = max(1, len(fetches.num_sources))
        self._num_waves[0] = num_waves
        num_in_wave = np.array([num_items])
        has_cpu_part = len(fetches.on_cpu.blocks) > 0
        if num_waves > 1 or has_cpu_part:
            waves = self._waves_of(sequences, parts, fetches.span_waves)
            order = np.argsort(waves, kind="stable")
            order = order[waves[order] != ON_CPU]
            sequences, parts = sequences[order], parts[order]
            num_in_wave = np.bincount(waves[order], minlength=num_waves)
            num_items = len(order)
        self._num_items[0] = num_items
        self._item_sequences[:num_items] = sequences
        self._item_parts[:num_items] = parts
        self._table[: len(table)] = table
        written = self._waves[:num_waves]
        written[:] = 0
        if fetches.num_sources:
            written[:, 0] = np.cumsum(fetches.num_sources) - fetches.num_sources
            written[:, 1] = fetches.num_sources
            written[:, 2] = fetches.num_there
            written[:, 5] = fetches.num_near
        written[:, 3] = np.cumsum(num_in_wave) - num_in_wave
        written[:, 4] = num_in_wave

    def _waves_of(self, sequences: Places, parts: Places, span_waves: Sequence[Places]) -> Places:
        """The wave of each part. Sequences without cold blocks may be missing in `span_waves`."""
        begins = np.cumsum([0, *map(len, span_waves)])
        spans = parts * self._part_tokens // (self.span_blocks * self.block_tokens)
        is_known = sequences < len(span_waves)
        flat = np.concatenate(span_waves)
        waves = np.zeros(len(parts), np.int64)
        waves[is_known] = flat[(begins[sequences[is_known]] + spans[is_known])]
        return waves

    def send(self) -> None:
        """Queue the transfer to the device on the current stream."""
        if self._on_gpu:
            pull_plan(self._staged.data_ptr(), self._sent, self._small_end, self._large_begins)
            self._read.record()
        else:
            self._sent.copy_(self._staged)
