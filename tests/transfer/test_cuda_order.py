"""The order in which copies of a GPU are queued. Needs no GPU: its calls are recorded."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from penstock.transfer import cuda
from penstock.transfer.cuda_link import QueuedCopies
from penstock.types import Direction, Slot, Verdict


class _Anything:
    """A stream or an event."""

    def __init__(self, **_: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class _Link:
    """Its buffers are used in turn, so one transfer must be queued after another."""

    first = last = _Anything()

    def __init__(self) -> None:
        self.num_queueing = 0
        self.most = 0

    def queue(self, slots: Sequence[Slot], blocks: Sequence[Slot]) -> QueuedCopies:
        self.num_queueing += 1
        self.most = max(self.most, self.num_queueing)
        time.sleep(0.01)  # as the driver's calls do, it lets other threads run
        self.num_queueing -= 1
        return QueuedCopies()


def test_two_threads_never_queue_copies_of_one_direction_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner queues copies, and the waiter those whose DRAM had to be pinned first."""
    fake = SimpleNamespace(device=lambda _: nullcontext(), Event=_Anything)
    monkeypatch.setattr(cuda, "_cuda", fake)
    link: Any = _Link()
    way = cuda._Way(link, Direction.SAVE, None)
    slots = [Slot(0)]

    def queue() -> None:
        for _ in range(5):
            way.queue(slots, slots, None, lambda _: [Verdict.OK])

    threads = [threading.Thread(target=queue) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    way.waiter.close()
    assert link.most == 1
