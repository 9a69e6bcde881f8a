"""What a step's decode kernels read: tensors that stay where they are, filled anew each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.table import Places


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
    """For up to `max_sequences` with `max_blocks` blocks among them. All of it is one buffer:

        num_items | token ids | positions | addresses | lengths | starts | first items
        | sequences of items | parts of items | table

    The rows of a step that is replayed are in it too: their ids, positions, and where their keys
    go in the first layer.
    """

    def __init__(
        self,
        max_sequences: int,
        max_blocks: int,
        block_tokens: int,
        part_tokens: int,
        device: torch.device,
    ) -> None:
        self._part_tokens = part_tokens
        # A sequence's last part may be short, and may end in the middle of a block.
        self.max_items = max_blocks * block_tokens // part_tokens + 2 * max_sequences
        sizes = [1, *([max_sequences] * 6), self.max_items, self.max_items, max_blocks]
        ends = np.cumsum(sizes).tolist()
        begins = [0, *ends[:-1]]
        on_gpu = device.type == "cuda"
        self._staged = torch.zeros(ends[-1], dtype=torch.int64, pin_memory=on_gpu)
        self._sent = torch.zeros(ends[-1], dtype=torch.int64, device=device)
        self._small_end = begins[7]
        self._large_begins = begins[7:]
        host = self._staged.numpy()
        parts = [host[begin:end] for begin, end in zip(begins, ends, strict=True)]
        self._num_items, *self._rows = parts[:4]
        self._lengths, self._starts, self._first_items = parts[4:7]
        self._item_sequences, self._item_parts, self._table = parts[7:]
        sent = [self._sent[begin:end] for begin, end in zip(begins, ends, strict=True)]
        self.num_items, self.ids, self.positions, self.addresses = sent[:4]
        self.lengths, self.starts, self.first_items = sent[4:7]
        self.item_sequences, self.item_parts, self.table = sent[7:]

    def fill(
        self,
        tables: Sequence[Places],
        lengths: Sequence[int],
        rows: Sequence[NDArray[np.int64]] | None = None,
    ) -> None:
        """Addresses and number of tokens of each sequence, and the rows; on the current stream."""
        count = len(tables)
        num_parts = -(-np.array(lengths, np.int64) // self._part_tokens)
        first_items = np.concatenate([[0], np.cumsum(num_parts)])
        starts = np.concatenate([[0], np.cumsum([len(table) for table in tables])])
        num_items, num_blocks = int(first_items[-1]), int(starts[-1])
        self._num_items[0] = num_items
        for target, source in zip(self._rows, rows or (), strict=False):
            target[: len(source)] = source
            target[len(source) : count] = 0
        self._lengths[:count] = lengths
        self._starts[:count] = starts[:-1]
        self._first_items[:count] = first_items[:-1]
        sequences = np.repeat(np.arange(count), num_parts)
        self._item_sequences[:num_items] = sequences
        self._item_parts[:num_items] = np.arange(num_items) - first_items[sequences]
        np.concatenate(tables, out=self._table[:num_blocks])
        self._send(0, self._small_end)
        for begin, size in zip(self._large_begins, (num_items, num_items, num_blocks), strict=True):
            self._send(begin, begin + size)

    def _send(self, begin: int, end: int) -> None:
        self._sent[begin:end].copy_(self._staged[begin:end], non_blocking=True)
