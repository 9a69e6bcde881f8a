"""With steps launched ahead, no pinned buffer is overwritten before it was read, on either side.

A GPU that is only imagined does its work late: at the latest when the CPU waits for it. What each
step was given, and what the CPU was told, must be right however late that is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")
from penstock.engine import decode_plan, mailbox
from penstock.engine.decode_plan import DecodePlan
from penstock.engine.mailbox import Mailbox

CPU = torch.device("cpu")


class Gpu:
    """One stream, as in `torch.cuda`."""

    def __init__(self) -> None:
        self._queued: list[Callable[[], None]] = []
        self.num_done = 0

    def queue(self, work: Callable[[], None]) -> None:
        self._queued.append(work)

    def do(self, end: int) -> None:
        while self.num_done < min(end, len(self._queued)):
            self.num_done += 1
            self._queued[self.num_done - 1]()

    def Event(self) -> Event:  # noqa: N802
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._end = 0

    def record(self) -> None:
        self._end = len(self._gpu._queued)

    def synchronize(self) -> None:
        self._gpu.do(self._end)


class Steps:
    """Steps of one sequence: each token is the sum of its number and the token before it."""

    def __init__(self, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gpu = gpu
        for module in (decode_plan, mailbox):
            monkeypatch.setattr(module, "_cuda", gpu)
        monkeypatch.setattr(decode_plan, "pull_plan", lambda *_: gpu.queue(self._pull))
        monkeypatch.setattr(mailbox, "push_numbers", lambda *a: gpu.queue(lambda: self._push(*a)))
        self.plan = DecodePlan(2, 8, 16, 256, CPU)
        # As on a GPU, where the plan is pulled from pinned memory.
        self.plan._on_gpu = True
        self.plan._read = gpu.Event()
        self.mailbox = Mailbox(8, 2, CPU)

    def _pull(self) -> None:
        self.plan._sent.copy_(self.plan._staged)

    def _push(self, numbers: Tensor, target: int, kept: Tensor) -> None:
        (box,) = (box for box in self.mailbox._boxes if box.data_ptr() == target)
        box[: len(numbers)] = kept[: len(numbers)] = numbers

    def launch(self, number: int, token: int) -> Callable[[], list[int]]:
        rows = [np.array([value], np.int64) for value in (token, number, 0)]
        self.plan.fill(np.array([number]), [1], [1], rows)
        self.plan.send()
        chosen = torch.zeros(1, dtype=torch.int64)

        def compute() -> None:
            given = int(self.plan.ids[0])
            if given < 0:  # see `kernels.take_kept`
                given = int(self.mailbox.kept[~given])
            assert self.plan.positions[0] == number
            assert self.plan.table[0] == number
            chosen[0] = given + number

        self._gpu.queue(compute)
        return self.mailbox.post(chosen)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=12))
def test_each_step_gets_its_plan_and_the_cpu_its_tokens(steps: list[tuple[bool, int]]) -> None:
    """In each step: whether it is launched ahead, and how much the GPU does meanwhile."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = Gpu()
        tried = Steps(gpu, monkeypatch)
        token = expected = 5
        unread: Callable[[], list[int]] | None = None
        for number, (is_ahead, num_done) in enumerate(steps):
            if unread is not None and not is_ahead:
                (token,) = unread()
                assert token == expected
                unread = None
            read = tried.launch(number, token if unread is None else ~0)
            gpu.do(gpu.num_done + num_done)
            if unread is not None:
                assert unread() == [expected]
            expected += number
            unread = read
        assert unread is not None
        assert unread() == [expected]
