"""The CPU's part in steps with cold KV, as a runner uses it.

`split` says which spans the CPU attends to (see `cold_split`), `fill` hands a step's tasks to the
threads (see `cold_threads`), and in each layer the GPU asks and collects (see `cold_triton`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.config.options import COLD_AUTO
from penstock.engine.attention import cold_triton as kernels
from penstock.engine.cold_split import ColdRates, ColdSplit
from penstock.engine.cold_threads import (
    WORD_BYTES,
    ColdAttentionFailed,
    ColdShape,
    ColdTasks,
    ColdThreads,
)
from penstock.engine.decode_plan import PartRoom
from penstock.engine.fetch_choice import CpuShare
from penstock.engine.table import Places

TASK_TOKENS = 512  # small enough to keep all threads busy until the end
MAX_TASKS = 1024  # of one step
_MAX_LOOKS = 5_000_000  # over the link, 1 to 2 microseconds each
_COLLECTING = 64  # programs per head
_HEADER = 3  # numbers (see `cold_triton`)
_NO_TASK = -1
_NEW_SHARE = 0.3  # of a new measurement in a rate
_OTHER_RATE = 0.2  # a rate that differs by more is a reason to split again


class ColdAttention:
    """Also the `CpuPart` of the runner's `FetchChoice`."""

    def __init__(
        self,
        shape: ColdShape,
        split: ColdSplit,
        threads: ColdThreads,
        max_rows: int,
        span_blocks: int,
        part_tokens: int,
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._split = split
        self._threads = threads
        self._max_rows = max_rows
        self._span_blocks = span_blocks
        self._span_tokens = span_blocks * shape.block_tokens
        self._part_tokens = part_tokens
        self._on_gpu = device.type == "cuda"
        num_pairs = split.max_spans * (self._span_tokens // part_tokens)
        size = _HEADER + max_rows + 2 * num_pairs
        self._staged = torch.zeros(size, dtype=torch.int64, pin_memory=self._on_gpu)
        self._sent = torch.zeros(size, dtype=torch.int64, device=device)
        self._has_share = False  # since the last choice
        self.is_open = False  # a step of the threads that has not been checked
        self.max_looks = _MAX_LOOKS
        self.rates: ColdRates | None = None  # None: nothing was measured
        self._used_rates: ColdRates | None = None  # in the last choice
        self.num_spans = 0  # that the CPU has attended to

    @property
    def is_stale(self) -> bool:
        if self._has_share and not self._threads.is_ready():
            return True
        now, used = self.rates, self._used_rates
        if self._split.mode != COLD_AUTO or now is None or used is None:
            return False
        return abs(now.cpu / used.cpu - 1) > _OTHER_RATE

    def choose(self, available: Sequence[Places], num_cold: int) -> Sequence[Places]:
        self._used_rates, self._has_share = self.rates, False
        if not any(map(len, available)) or not self._threads.is_ready():
            return [each[:0] for each in available]
        cold_bytes = num_cold * self._shape.layer_bytes * self._shape.num_layers
        chosen = self._split.choose(available, cold_bytes, self.rates)
        self._has_share = any(map(len, chosen))
        return chosen

    def fill(self, share: CpuShare, lengths: Sequence[int]) -> bool:
        """Hand the next step to the threads; True if they have work. `lengths`: of all sequences.

        The step before must have ended.
        """
        staged = self._staged.numpy()
        staged[:_HEADER] = 0
        if not len(share.blocks):
            return False
        if not self._threads.is_ready():  # the plan has left out what they were to do
            raise ColdAttentionFailed("the threads that attend to cold KV do not end their step")
        num_parts = -(-np.array(lengths, np.int64) // self._part_tokens)
        first_places = np.cumsum(num_parts) - num_parts
        tasks: list[tuple[int, int, int]] = []
        pairs: list[Places] = []
        rows: list[int] = []
        begin = 0
        for row, spans in enumerate(share.spans):
            if len(spans):
                rows.append(row)
            for first in range(0, len(spans), self._spans_per_task):
                mine = spans[first : first + self._spans_per_task]
                end = begin + len(mine) * self._span_blocks
                places = first_places[row] + self._parts_of(mine)
                with_result = np.full(len(places), _NO_TASK)
                with_result[0] = len(tasks)
                pairs.append(np.stack([places, with_result], axis=1))
                tasks.append((row, begin, end))
                begin = end
        self.num_spans += sum(map(len, share.spans))
        both = np.concatenate(pairs).ravel()
        self._threads.open(ColdTasks(share.blocks, np.array(tasks, np.int64)))
        staged[:_HEADER] = self._threads.step, len(both) // 2, len(rows)
        staged[_HEADER : _HEADER + len(rows)] = rows
        at = _HEADER + self._max_rows
        staged[at : at + len(both)] = both
        self.is_open = True
        return True

    def send(self) -> None:
        """Queue the transfer of the step's numbers to the device. A graph may capture this."""
        if self._on_gpu:
            kernels.pull_numbers(self._staged.data_ptr(), self._sent, self._max_rows)
        else:
            self._sent.copy_(self._staged)

    def ask(self, query: Tensor, layer: int, scale: float) -> None:
        threads = self._threads
        asked = threads.asked_address + layer * WORD_BYTES
        kernels.ask(query, self._sent, threads.queries.data_ptr(), asked, scale)

    def collect(self, room: PartRoom, layer: int) -> None:
        """Wait for the threads, and put their results where the parts of the device are."""
        threads = self._threads
        done = threads.done_address + layer * WORD_BYTES
        kernels.await_answer(self._sent, done, threads.gave_up_address, self.max_looks)
        there = (
            threads.largest.data_ptr(),
            threads.totals.data_ptr(),
            threads.sums.data_ptr(),
        )
        num_programs = _COLLECTING if self._on_gpu else 1
        kernels.collect(self._sent, there, room, self._max_rows, num_programs)

    def check(self) -> None:
        """Call it when a step has ended. Raises ColdAttentionFailed if its results are wrong."""
        if not self.is_open:
            return
        self.is_open = False
        self._threads.check()
        rate = self._threads.bytes_per_second()
        if rate is not None and self.rates is not None:
            cpu = self.rates.cpu + _NEW_SHARE * (rate - self.rates.cpu)
            self.rates = replace(self.rates, cpu=cpu)

    def cut_short(self) -> None:
        """A step has failed halfway: whatever of it is queued must not wait for the threads."""
        if self.is_open:
            self.is_open = False
            self._threads.cancel()

    def close(self) -> None:
        self._threads.close()

    @property
    def threads(self) -> ColdThreads:
        return self._threads

    @property
    def _spans_per_task(self) -> int:
        return max(1, TASK_TOKENS // self._span_tokens)

    def _parts_of(self, spans: Places) -> Places:
        each = self._span_tokens // self._part_tokens
        return (spans[:, None] * each + np.arange(each)).ravel()
