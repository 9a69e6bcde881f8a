"""Which steps are captured, with torch's CUDA calls imagined. `test_cuda` has real ones."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine import cuda_graphs
from penstock.engine.cuda_graphs import CudaGraphs
from penstock.engine.decode_plan import StepKind
from penstock.engine.runner import PackedRow

NOTHING: Any = np.zeros(0, np.int64)


class Cuda:
    """Keeps order of what is asked of it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.mode = "default"
        self.has_warned = False
        self.is_capturing = False
        self.stream_now = "main"

    def Stream(self) -> Any:  # noqa: N802
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None, name=self.stream_now)

    @contextmanager
    def stream(self, stream: Any) -> Any:
        before = self.stream_now
        self.stream_now = getattr(stream, "name", "side")
        try:
            yield
        finally:
            self.stream_now = before

    def set_sync_debug_mode(self, mode: str) -> None:
        """As torch's, which warns at its first call in a process, and has set the mode by then."""
        self.mode = mode
        if not self.has_warned:
            self.has_warned = True
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    def CUDAGraph(self) -> Any:  # noqa: N802
        return SimpleNamespace(replay=lambda: self.told.append("replay"), pool=lambda: None)

    @contextmanager
    def graph(self, graph: Any, **_: Any) -> Any:
        """As torch's: if a capture fails, its stream stays the current one."""
        self.is_capturing, self.stream_now = True, "capture"
        yield
        self.is_capturing, self.stream_now = False, "main"


class Steps:
    """A runner's part in it."""

    def __init__(self, cuda: Cuda, *, waits: bool, breaks: bool = False) -> None:
        self.cuda, self.waits, self.breaks = cuda, waits, breaks
        self.num_cut_short = 0
        self.kind = StepKind()
        ids = torch.zeros(4, dtype=torch.int64)
        plan: Any = SimpleNamespace(ids=ids, positions=ids, addresses=ids, num_waves=1)
        self.graphs = CudaGraphs(
            lambda row, size: self.kind,
            lambda kind: None,
            self.forward,
            plan,
            4,
            torch.device("cpu"),
            [StepKind(), StepKind(brings=True)],
            self.cut_short,
        )

    def cut_short(self) -> None:
        assert self.cuda.mode == "default", "this waits for streams"
        self.num_cut_short += 1

    def forward(self, *_: Any, kind: StepKind, **__: Any) -> torch.Tensor:
        if self.waits and (self.cuda.mode == "error" or self.cuda.is_capturing):
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.breaks and self.cuda.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.cuda.told.append("captured" if self.cuda.is_capturing else "computed")
        return torch.zeros(4, 8)

    def run(self, num_rows: int = 1, *, brings: bool = False) -> list[str]:
        self.cuda.told = []
        self.kind = StepKind(brings=brings)
        singles: Any = [None] * num_rows
        row = PackedRow([], NOTHING, singles, [], NOTHING, NOTHING, [])
        self.graphs.run(row, lambda: None, brings=brings)
        return self.cuda.told


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(cuda_graphs, "_cuda", made)
    monkeypatch.setattr(cuda_graphs, "_undisturbed", nullcontext)
    return made


def test_a_step_is_captured_once_and_replayed(cuda: Cuda) -> None:
    steps = Steps(cuda, waits=False)
    steps.graphs.capture_all(lambda _: None)
    assert cuda.told.count("captured") == 3 + 2  # for 1, 2 and 4 rows; blocks arrive for 1 and 4
    assert (cuda.mode, cuda.stream_now) == ("default", "main")
    assert steps.run() == ["replay"]
    for num_rows in (1, 2, 4):
        assert steps.run(num_rows, brings=True) == ["replay"]
    assert steps.num_cut_short == 0


@pytest.mark.parametrize("is_warm", [True, False])
def test_a_model_that_waits_for_the_gpu_is_not_captured(
    cuda: Cuda, is_warm: bool, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps(cuda, waits=True)
    with caplog.at_level(logging.WARNING):
        if is_warm:
            steps.graphs.capture_all(lambda _: None)
        else:
            steps.run()
    assert not steps.graphs.captures
    assert (cuda.mode, cuda.stream_now, steps.num_cut_short) == ("default", "main", 1)
    (told,) = caplog.messages
    assert "kernel by kernel" in told
    assert "synchronizing" in told
    assert steps.run() == ["computed"]


def test_a_capture_that_fails_leaves_the_stream_as_it_was(cuda: Cuda) -> None:
    """Saves and loads wait for the default stream: nothing may be queued on another."""
    steps = Steps(cuda, waits=False, breaks=True)
    with pytest.raises(RuntimeError, match="capturing"):
        steps.run()
    assert cuda.stream_now == "main"


def test_a_fault_is_not_taken_for_a_wait(cuda: Cuda) -> None:
    steps = Steps(cuda, waits=False)
    forward = steps.forward

    def fail(*args: Any, kind: StepKind, **options: Any) -> torch.Tensor:
        if cuda.mode == "error":
            raise RuntimeError("an illegal memory access was encountered")
        return forward(*args, kind=kind, **options)

    steps.graphs._forward = fail
    with pytest.raises(RuntimeError, match="illegal memory"):
        steps.run()
    assert steps.graphs.captures
    assert (cuda.mode, cuda.stream_now) == ("default", "main")
