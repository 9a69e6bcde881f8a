"""Returns small results from a GPU without its copy engines.

A copy of eight bytes would queue behind a gigabyte that is being saved, and delay the step. A
kernel that writes to pinned DRAM does not. It also keeps the first numbers on the device, for a
step that is launched before the CPU has read them (see `ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.engine.attention.triton import push_numbers

_cuda: Any = torch.cuda  # untyped

_NUM_BOXES = 2  # one may be unread while the next is filled


class Mailbox:
    def __init__(self, max_numbers: int, max_kept: int, device: torch.device) -> None:
        self.kept = torch.zeros(max_kept, dtype=torch.int64, device=device)
        on_gpu = device.type == "cuda"
        shape = (_NUM_BOXES, max_numbers)
        self._boxes = torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu)
        self._arrived: Sequence[Any] = [_cuda.Event() for _ in range(_NUM_BOXES)]
        self._next = 0

    def post(self, numbers: Tensor) -> Callable[[], list[int]]:
        """Send one row of 64-bit integers.

        The returned function waits for them and must be called before the second row after this
        one is posted.
        """
        box, arrived = self._boxes[self._next], self._arrived[self._next]
        self._next = (self._next + 1) % _NUM_BOXES
        push_numbers(numbers, box.data_ptr(), self.kept)
        arrived.record()

        def read() -> list[int]:
            arrived.synchronize()
            found: list[int] = box[: len(numbers)].tolist()
            return found

        return read
