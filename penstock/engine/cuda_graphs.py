"""Steps of single tokens, captured once as CUDA graphs and replayed.

A graph is captured for each of some batch sizes. A step that fetches more cold blocks than fit the
buffers at once runs kernel by kernel. Rows that are left over attend to one scratch
block and are written nowhere. Everything that a graph reads is in tensors that keep their address,
so blocks may move between replays. A step's plan is sent before its graph is replayed: an event
behind it tells when the next plan may be filled in, long before the graph ends.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.engine.decode_plan import DecodePlan
from penstock.engine.runner import PackedRow

_cuda: Any = torch.cuda  # mostly untyped

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


class CudaGraphs:
    """Captured steps of single tokens, by the number of rows and whether cold blocks are fetched.

    A step that fetches nothing has its own graph, which does not wait for fetches.
    """

    def __init__(
        self,
        fill: Callable[[PackedRow | None, int], bool],
        forward: Callable[..., Tensor],
        plan: DecodePlan,
        max_rows: int,
        device: torch.device,
        *,
        can_fetch: bool,
    ) -> None:
        """`fill` and `forward` are those of the runner."""
        self._fill = fill
        self._forward = forward
        self._plan = plan
        sizes = [1, 2, 4, *range(8, max_rows, 8), max_rows]
        self._sizes = sorted({size for size in sizes if size <= max_rows})
        self._can_fetch = can_fetch
        self._kept = torch.arange(max_rows, device=device)
        self._captured: dict[tuple[int, bool], tuple[Any, Tensor]] = {}
        self._memory: Any = None  # one pool for all graphs, because only one runs at a time

    def run(self, row: PackedRow, between_waves: Callable[[], None]) -> Tensor:
        """Logits of all rows, valid until the next step.

        `between_waves` is called in steps of several waves, never during a capture, which it might
        break.
        """
        size = next(size for size in self._sizes if size >= len(row.singles))
        fetches = self._fill(row, size)
        self._plan.send()
        if self._plan.num_waves > 1:  # such steps are long, and each would need its own graph
            return self._step(size, fetches=fetches, between_waves=between_waves)
        if (size, fetches) not in self._captured:
            self._capture(size, fetches=fetches)
            self._fill(row, size)
            self._plan.send()
        graph, logits = self._captured[size, fetches]
        graph.replay()
        return logits

    def capture_all(self, progress: Callable[[str], None]) -> None:
        kinds = [
            (size, fetches)
            for size in reversed(self._sizes)  # the largest first: the others reuse its memory
            for fetches in ([False, True] if self._can_fetch else [False])
        ]
        for place, (size, fetches) in enumerate(kinds):
            progress(f"capturing the decode step: {place + 1} of {len(kinds)}")
            self._capture(size, fetches=fetches)

    @torch.inference_mode()
    def _capture(self, size: int, *, fetches: bool) -> None:
        self._fill(None, size)
        self._plan.send()
        stream: Any = _cuda.Stream()
        stream.wait_stream(_cuda.current_stream())
        with _cuda.stream(stream):
            self._step(size, fetches=fetches)  # compiles kernels that are not compiled yet
        _cuda.current_stream().wait_stream(stream)
        graph = _cuda.CUDAGraph()
        with _undisturbed(), _cuda.graph(graph, pool=self._memory, **_IN_THIS_THREAD):
            logits = self._step(size, fetches=fetches)
        self._memory = graph.pool()
        self._captured[size, fetches] = (graph, logits)

    def _step(
        self, size: int, *, fetches: bool, between_waves: Callable[[], None] = lambda: None
    ) -> Tensor:
        plan = self._plan
        rows = (plan.ids[:size], plan.positions[:size], plan.addresses[:size])
        return self._forward(
            *rows, self._kept[:size], size, [], fetches=fetches, between_waves=between_waves
        )
