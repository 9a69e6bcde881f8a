"""Threads that attend to cold blocks where they lie in DRAM (see `cold_split`).

For each step that has work for them, the engine's thread opens the step with its tasks. In each
layer, the GPU writes the queries to pinned DRAM and asks; the threads leave one result per task and
answer; the GPU waits for the answer and collects the results. See `attention.cold_serving`.

A result depends on its task alone, never on time or on the number of threads. The GPU waits for an
answer only so long: then the step is computed to its end, and `check` says that it has failed.
Threads sleep if no step needs them.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.codecs.lossless_format import LosslessFormat
from penstock.engine.attention import cold_serving as serving
from penstock.engine.attention.cold_serving import WORD, load_word, make_serve, store_word
from penstock.engine.table import Places

WORD_BYTES = 8 * WORD
_LEAVE_SECONDS = 5.0  # how long the threads may take to leave a step that has ended


class ColdAttentionFailed(RuntimeError):
    """The threads did not answer in time: the step's results are wrong."""


class ColdShape(NamedTuple):
    """The shape of a layer's KV in a block, and of the queries."""

    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    item_bytes: int  # 2: bfloat16, 4: float32

    @property
    def layer_bytes(self) -> int:
        return 2 * self.block_tokens * self.kv_heads * self.head_dim * self.item_bytes


class ColdTasks(NamedTuple):
    """What the threads do in each layer. A task is a run of whole blocks of a sequence."""

    blocks: Places  # addresses, task after task
    tasks: NDArray[np.int64]  # [tasks, 3]: row of the queries, first block, end of its blocks


class ColdThreads:
    def __init__(
        self,
        shape: ColdShape,
        max_rows: int,
        max_tasks: int,
        max_blocks: int,
        num_threads: int,
        host_form: LosslessFormat | None = None,
        *,
        pinned: bool = False,
    ) -> None:
        """Compile the kernel and start the threads. `pinned`: whether a GPU takes part.

        `host_form`: the form of HOST's blocks, if they are packed.
        """
        self.shape = shape
        self.max_tasks, self.max_blocks = max_tasks, max_blocks
        self.step = 0  # the number of the last step that was opened
        heads, dim, layers = shape.num_heads, shape.head_dim, shape.num_layers
        group = heads // shape.kv_heads

        def room(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, pin_memory=pinned)

        self.queries = room(max_rows, heads, dim)
        self.largest, self.totals = room(max_tasks, heads), room(max_tasks, heads)
        self.sums = room(max_tasks, heads, dim)
        # The GPU writes the first ones and the threads the others.
        self._shared = room(2 * layers + 1, WORD, dtype=torch.int64)
        self._control = np.zeros((serving.CONTROL_WORDS + 2 * layers, WORD), np.int64)
        self._times = np.zeros((layers, 2))
        self._tasks = np.zeros((max_tasks, 3), np.int64)
        self._blocks: Places = np.zeros(max_blocks, np.int64)
        self._num_bytes = 0  # that the threads read in the last step
        form = (0, 0, 0, 0, 0)
        if host_form is not None:
            form = (
                host_form.header_bytes,
                host_form.region_bytes,
                host_form.row_values,
                host_form.region_rows,
                host_form.max_exceptions,
            )
        self._form = form
        self._serve = make_serve(shape.kv_heads, group, dim, shape.block_tokens)
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._is_broken = False
        store_word(self._word(serving.STOP), 1)
        self._run()  # compiles, and returns at once
        store_word(self._word(serving.STOP), 0)
        self._threads = [
            threading.Thread(target=self._work, name=f"cold-attention-{n}", daemon=True)
            for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def asked_address(self) -> int:
        return self._shared.data_ptr()

    @property
    def done_address(self) -> int:
        return self._shared.data_ptr() + self.shape.num_layers * WORD_BYTES

    @property
    def gave_up_address(self) -> int:
        """The GPU writes the number of a step there in which it has waited for too long."""
        return self._shared.data_ptr() + 2 * self.shape.num_layers * WORD_BYTES

    @property
    def num_threads(self) -> int:
        return len(self._threads)

    def is_ready(self) -> bool:
        """Close the last step. False if the threads do not come out of it, now or ever."""
        if self._is_broken:
            return False
        store_word(self._word(serving.OPEN), 0)
        deadline = time.monotonic() + _LEAVE_SECONDS
        while load_word(self._word(serving.INSIDE)):
            if time.monotonic() > deadline:
                self._is_broken = True
                return False
            time.sleep(0)
        return True

    def open(self, work: ColdTasks) -> None:
        """Open the next step. Call it after `is_ready`, and before the GPU begins the step."""
        self.step += 1
        self._tasks[: len(work.tasks)] = work.tasks
        self._blocks[: len(work.blocks)] = work.blocks
        self._num_bytes = len(work.blocks) * self.shape.layer_bytes * self.shape.num_layers
        self._control[serving.NUM_TASKS, 0] = len(work.tasks)
        self._control[serving.CONTROL_WORDS :] = 0
        self._times[:] = 0
        with self._lock:
            store_word(self._word(serving.OPEN), self.step)
            self._wake.set()

    def cancel(self) -> None:
        """The step that was opened last has failed, or will not run: nobody may wait for it."""
        store_word(self._word(serving.CANCELLED), self.step)
        for layer in range(self.shape.num_layers):
            store_word(self.done_address + layer * WORD_BYTES, self.step)

    def check(self) -> None:
        """Raise ColdAttentionFailed if the GPU did not get an answer. Call it after each step."""
        if load_word(self.gave_up_address) and not self._is_broken:
            self._is_broken = True
            raise ColdAttentionFailed(
                "the processor did not attend to its part of the cold KV in time; from now on, the "
                "device attends to all of it"
            )

    def ask_all(self) -> bool:
        """Ask for all layers at once, without a GPU. False if the threads do not answer in time."""
        for layer in range(self.shape.num_layers):
            store_word(self.asked_address + layer * WORD_BYTES, self.step)
        deadline = time.monotonic() + _LEAVE_SECONDS
        while not self._has_ended(self.step):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0001)
        return True

    def bytes_per_second(self) -> float | None:
        """How fast the threads read KV in the last step. None if they did not finish one."""
        seconds = float((self._times[:, 1] - self._times[:, 0]).sum())
        if not self._num_bytes or seconds <= 0 or not self._times.all():
            return None
        return self._num_bytes / seconds

    def close(self) -> None:
        """Stop the threads. Afterwards nothing reads HOST, unless a thread hangs."""
        with self._lock:
            store_word(self._word(serving.STOP), 1)
            self._wake.set()
        for thread in self._threads:
            thread.join(_LEAVE_SECONDS)

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._run()
            with self._lock:
                if load_word(self._word(serving.STOP)):
                    return
                step = load_word(self._word(serving.OPEN))
                if step == 0 or self._has_ended(step):
                    self._wake.clear()

    def _run(self) -> None:
        """Serve steps until none has come for a while."""
        shape = self.shape
        group = shape.num_heads // shape.kv_heads
        self._serve(
            self._word(0),
            self.asked_address,
            self.done_address,
            shape.num_layers,
            shape.item_bytes,
            self._form,
            self._tasks,
            self._blocks,
            self.queries.numpy(),
            self.largest.numpy(),
            self.totals.numpy(),
            self.sums.numpy(),
            self._times,
            np.zeros(shape.layer_bytes // shape.item_bytes, np.uint32),
            np.zeros((group, shape.block_tokens), np.float32),
            np.zeros(2, np.int64),
        )

    def _has_ended(self, step: int) -> bool:
        last_layer = self.done_address + (self.shape.num_layers - 1) * WORD_BYTES
        return load_word(last_layer) >= step

    def _word(self, number: int) -> int:
        return int(self._control.ctypes.data) + number * WORD_BYTES
