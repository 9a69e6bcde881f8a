"""What a step's decode kernels read: tensors that stay where they are, filled anew each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
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
    """For up to `max_sequences` with `max_blocks` blocks among them.

    All of it lies in one buffer:

        num_items | lengths | starts | first_items | item_sequences | item_parts | table
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
        self.max_sequences = max_sequences
        # A sequence's last part may be short, and may end in the middle of a block.
        self.max_items = max_blocks * block_tokens // part_tokens + 2 * max_sequences
        sizes = [1, max_sequences, max_sequences, max_sequences]
        sizes += [self.max_items, self.max_items, max_blocks]
        self._ends = np.cumsum(sizes).tolist()
        self._begins = [0, *self._ends[:-1]]
        on_gpu = device.type == "cuda"
        self._staged = torch.zeros(self._ends[-1], dtype=torch.int64, pin_memory=on_gpu)
        self._sent = torch.zeros(self._ends[-1], dtype=torch.int64, device=device)
        self._host = self._staged.numpy()
        parts = [self._sent[begin:end] for begin, end in zip(self._begins, self._ends, strict=True)]
        self.num_items, self.lengths, self.starts, self.first_items = parts[:4]
        self.item_sequences, self.item_parts, self.table = parts[4:]

    def fill(self, tables: Sequence[Places], lengths: Sequence[int]) -> None:
        """Addresses and number of tokens of each sequence; on the current stream."""
        count = len(tables)
        num_parts = -(-np.array(lengths, np.int64) // self._part_tokens)
        first_items = np.concatenate([[0], np.cumsum(num_parts)])
        sizes = np.array([len(table) for table in tables], np.int64)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        num_items = int(first_items[-1])
        begins = self._begins
        host = self._host
        host[0] = num_items
        host[begins[1] : begins[1] + count] = lengths
        host[begins[2] : begins[2] + count] = starts[:-1]
        host[begins[3] : begins[3] + count] = first_items[:-1]
        sequences = np.repeat(np.arange(count), num_parts)
        host[begins[4] : begins[4] + num_items] = sequences
        host[begins[5] : begins[5] + num_items] = np.arange(num_items) - first_items[sequences]
        np.concatenate(tables, out=host[begins[6] : begins[6] + int(starts[-1])])
        self._send(begins[0], begins[4])
        self._send(begins[4], begins[4] + num_items)
        self._send(begins[5], begins[5] + num_items)
        self._send(begins[6], begins[6] + int(starts[-1]))

    def _send(self, begin: int, end: int) -> None:
        self._sent[begin:end].copy_(self._staged[begin:end], non_blocking=True)
