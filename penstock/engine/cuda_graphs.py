"""Steps of single tokens, captured once as CUDA graphs and replayed.

A graph is captured for each of some batch sizes and kinds of steps. Steps that are rare run kernel
by kernel, such as those that fetch more cold blocks than fit the buffers at once. Rows that are
left over attend to one scratch block and are written nowhere. Everything that a graph reads is in
tensors that keep their address, so blocks may move between replays. A step's plan is sent before
its graph is replayed: an event behind it tells when the next plan may be filled in, long before the
graph ends.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.engine.decode_plan import DecodePlan, StepKind
from penstock.engine.runner import PackedRow
from penstock.engine.taken_apart import MAX_APART

_cuda: Any = torch.cuda  # mostly untyped

log = logging.getLogger(__name__)

# Steps that bring blocks have few graphs: only one request runs then, with what is left of it.
_ROWS_THAT_BRING = (1, 16, MAX_APART)

# Other threads keep pinning memory and waiting for copies, which must not break a capture.
_IN_THIS_THREAD = {"capture_error_mode": "thread_local"}


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Turn off garbage collection: freeing a graph or a tensor would break the capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """Torch raises if any thread would wait for the GPU."""
    try:
        with warnings.catch_warnings():  # it warns once that it does not notice all waits
            warnings.simplefilter("ignore")
            _cuda.set_sync_debug_mode("error")
        yield
    finally:
        _cuda.set_sync_debug_mode("default")


class CudaGraphs:
    """Captured steps of single tokens, by the number of rows and what they do with cold blocks.

    A step that fetches nothing has its own graph, which does not wait for fetches.
    """

    def __init__(
        self,
        fill: Callable[[PackedRow | None, int], StepKind],
        send: Callable[[StepKind], None],
        forward: Callable[..., Tensor],
        plan: DecodePlan,
        max_rows: int,
        device: torch.device,
        kinds: Sequence[StepKind],
        cut_short: Callable[[], None] = lambda: None,
    ) -> None:
        """`fill`, `send`, `forward` and `cut_short` are those of the runner.

        `kinds`: that steps may have.
        """
        self._cut_short = cut_short
        self._fill = fill
        self._send = send
        self._forward = forward
        self._plan = plan
        sizes = [1, 2, 4, *range(8, max_rows, 8), max_rows]
        self._sizes = sorted({size for size in sizes if size <= max_rows})
        self._sizes_that_bring = [s for s in self._sizes if s in (*_ROWS_THAT_BRING, max_rows)][:3]
        self._kinds = kinds
        self._kept = torch.arange(max_rows, device=device)
        self._captured: dict[tuple[int, StepKind], tuple[Any, Tensor]] = {}
        self._memory: Any = None  # one pool for all graphs, because only one runs at a time

    def run(
        self, row: PackedRow, between_waves: Callable[[], None], *, brings: bool = False
    ) -> Tensor:
        """Logits of all rows, valid until the next step.

        `between_waves` is called in steps of several waves, never during a capture, which it might
        break.
        """
        num_rows = len(row.singles)
        sizes = [*(self._sizes_that_bring if brings else ()), *self._sizes]
        size = next(size for size in sizes if size >= num_rows)
        kind = self._fill(row, size)
        self._send(kind)
        # Steps of several waves are long, and each would need its own graph.
        if self._plan.num_waves > 1 or kind not in self._kinds_of(size):
            return self._step(size, kind, between_waves)
        if (size, kind) not in self._captured:
            self._capture(size, kind)
            kind = self._fill(row, size)
            self._send(kind)
            if not self.captures:
                return self._step(size, kind, between_waves)
        graph, logits = self._captured[size, kind]
        graph.replay()
        return logits

    @property
    def captures(self) -> bool:
        """Whether the model's steps can be captured."""
        return bool(self._kinds)

    def capture_all(self, progress: Callable[[str], None]) -> None:
        # The largest first: the others reuse its memory.
        steps = [(size, kind) for size in reversed(self._sizes) for kind in self._kinds_of(size)]
        for place, (size, kind) in enumerate(steps):
            progress(f"capturing the decode step: {place + 1} of {len(steps)}")
            if self.captures:
                self._capture(size, kind)

    def replay_empty(self) -> None:
        """Replay the smallest step with rows that do nothing."""
        size = self._sizes[0]
        kind = self._fill(None, size)
        self._send(kind)
        self._captured[size, kind][0].replay()

    def _kinds_of(self, size: int) -> Sequence[StepKind]:
        brings = size in self._sizes_that_bring
        return [kind for kind in self._kinds if brings or not kind.brings]

    @torch.inference_mode()
    def _capture(self, size: int, kind: StepKind) -> None:
        """Capture a step. From a model that waits for the GPU halfway nothing is captured."""
        self._fill(None, size)
        self._send(kind)
        stream: Any = _cuda.Stream()
        stream.wait_stream(_cuda.current_stream())
        with _cuda.stream(stream):
            self._step(size, kind)  # compiles kernels that are not compiled yet
            waits = self._waits(size, kind)
        _cuda.current_stream().wait_stream(stream)
        if waits:
            log.warning(
                "steps of this model are computed kernel by kernel, which takes longer, because "
                "they cannot be captured as CUDA graphs: %s",
                waits,
            )
            self._kinds = ()
            return
        graph = _cuda.CUDAGraph()
        # If the capture fails, torch leaves its stream as the current one: nothing that is queued
        # there would be in order with saves and loads.
        with (
            _cuda.stream(_cuda.current_stream()),
            _undisturbed(),
            _cuda.graph(graph, pool=self._memory, **_IN_THIS_THREAD),
        ):
            logits = self._step(size, kind)
        self._memory = graph.pool()
        self._captured[size, kind] = (graph, logits)

    def _waits(self, size: int, kind: StepKind) -> str:
        """Why a step cannot be captured: where it would wait for the GPU. Empty if it never does.

        A capture that fails would leave torch in a state that nobody can use.
        """
        try:
            with _waiting_forbidden():
                self._step(size, kind)
        except RuntimeError as error:
            self._cut_short()  # it waits for streams itself, which is allowed again
            if "synchronizing" not in str(error):  # torch's word for it; anything else is a fault
                raise
            return str(error)
        return ""

    def _step(
        self, size: int, kind: StepKind, between_waves: Callable[[], None] = lambda: None
    ) -> Tensor:
        plan = self._plan
        rows = (plan.ids[:size], plan.positions[:size], plan.addresses[:size])
        return self._forward(
            *rows, self._kept[:size], size, [], kind=kind, between_waves=between_waves
        )
