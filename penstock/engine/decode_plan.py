"""The input of a step's decode kernels: tensors at fixed addresses, refilled for each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.attention.triton import pull_plan
from penstock.engine.table import Places, are_packed

_NONE: Places = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class PartRoom:
    """Scratch memory for the parts of all sequences of a step."""

    sums: Tensor
    largest: Tensor
    totals: Tensor
    unpacked: Tensor | None = None  # see `packed_triton.make_room`; None if no block is packed

    @classmethod
    def make(
        cls,
        num_items: int,
        num_heads: int,
        head_dim: int,
        device: torch.device,
        unpacked: Tensor | None = None,
    ) -> PartRoom:
        shape = (num_items, num_heads)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            unpacked,
        )


class DecodePlan:
    """For up to `max_sequences` with `max_blocks` blocks in total. It is one buffer:

        num_items | num_blocks | num_fetched | first fetched | token ids | positions | addresses
        | lengths | starts | first items | sequences of items | parts of items | table | fetched

    It also has the rows of a replayed step: their token ids, positions, and the addresses of their
    keys in the first layer. A step that was sent must end before the next one is filled in.
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
        """`max_fetched`: how many cold blocks may be fetched to the device during a step."""
        self.max_fetched = max_fetched
        self._part_tokens = part_tokens
        self._block_tokens = block_tokens
        # A sequence's last part may be short and may end in the middle of a block.
        self.max_items = max_blocks * block_tokens // part_tokens + 2 * max_sequences
        sizes = [1, 1, 1, 1, *([max_sequences] * 6), self.max_items, self.max_items, max_blocks]
        sizes.append(max_fetched)
        ends = np.cumsum(sizes).tolist()
        begins = [0, *ends[:-1]]
        on_gpu = device.type == "cuda"
        self._staged = torch.zeros(ends[-1], dtype=torch.int64, pin_memory=on_gpu)
        self._sent = torch.zeros(ends[-1], dtype=torch.int64, device=device)
        self._on_gpu = on_gpu
        self._small_end = begins[10]
        self._large_begins = begins[10:]
        host = self._staged.numpy()
        parts = [host[begin:end] for begin, end in zip(begins, ends, strict=True)]
        self._num_items, self._num_blocks, self._num_fetched, self._first_fetched = parts[:4]
        self._rows = parts[4:7]
        self._lengths, self._starts, self._first_items = parts[7:10]
        self._item_sequences, self._item_parts, self._table, self._fetched = parts[10:]
        sent = [self._sent[begin:end] for begin, end in zip(begins, ends, strict=True)]
        self.num_items, _, self.num_fetched, self.first_fetched = sent[:4]
        self.ids, self.positions, self.addresses = sent[4:7]
        self.lengths, self.starts, self.first_items = sent[7:10]
        self.item_sequences, self.item_parts, self.table, self.fetched = sent[10:]

    def fill(
        self,
        table: Places,
        num_blocks: Sequence[int],
        lengths: Sequence[int],
        rows: Sequence[NDArray[np.int64]] | None = None,
        fetched: Places = _NONE,
        first_fetched: int = 0,
    ) -> None:
        """Fill in the next step.

        `table` has the addresses of all sequences' blocks; `num_blocks` and `lengths` say how many
        blocks and tokens each sequence has. `fetched` has the addresses of blocks to fetch; the
        first layers of those before `first_fetched` are already on the device. A part with packed
        blocks gets the number `~part`.
        """
        count = len(lengths)
        num_parts = -(-np.array(lengths, np.int64) // self._part_tokens)
        first_items = np.concatenate([[0], np.cumsum(num_parts)])
        num_items = int(first_items[-1])
        self._num_items[0] = num_items
        self._num_blocks[0] = len(table)
        self._num_fetched[0] = len(fetched)
        self._first_fetched[0] = first_fetched
        self._fetched[: len(fetched)] = fetched
        for target, source in zip(self._rows, rows or (), strict=False):
            target[: len(source)] = source
            target[len(source) : count] = 0
        self._lengths[:count] = lengths
        starts = np.cumsum(num_blocks) - num_blocks
        self._starts[:count] = starts
        self._first_items[:count] = first_items[:-1]
        sequences = np.repeat(np.arange(count), num_parts)
        self._item_sequences[:num_items] = sequences
        parts = np.arange(num_items) - first_items[sequences]
        self._item_parts[:num_items] = parts
        self._table[: len(table)] = table
        is_packed = are_packed(table)
        if is_packed.any():
            num_before = np.concatenate([[0], np.cumsum(is_packed)])
            begins = parts * self._part_tokens
            ends = np.minimum(begins + self._part_tokens, self._lengths[sequences])
            first = num_before[starts[sequences] + begins // self._block_tokens]
            last = num_before[starts[sequences] - (-ends // self._block_tokens)]
            self._item_parts[:num_items] = np.where(last > first, ~parts, parts)

    def send(self) -> None:
        """Queue the transfer to the device on the current stream. A graph may capture this."""
        if self._on_gpu:
            pull_plan(self._staged.data_ptr(), self._sent, self._small_end, self._large_begins)
        else:
            self._sent.copy_(self._staged)
