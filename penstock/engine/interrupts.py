"""Ctrl-C, or a notebook's stop button, waits for the end of a step.

Python raises it wherever it happens to be, between two lines of the books or of a copy that has
just begun. Whoever stops an answer goes on to ask the next question: nothing may be left half done.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Whole:
    """Work that is not cut in two, unless somebody insists."""

    def __init__(self) -> None:
        self.is_broken = False  # somebody has insisted: what was at work cannot be trusted

    @contextmanager
    def work(self) -> Iterator[None]:
        """What interrupts the work is raised at its end; a second one at once."""
        usual = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(usual):
            yield  # then Python raises nothing here
            return
        waiting: list[tuple[int, FrameType | None]] = []

        def note(number: int, frame: FrameType | None) -> None:
            waiting.append((number, frame))
            if len(waiting) > 1:
                usual(number, frame)

        signal.signal(signal.SIGINT, note)
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.is_broken = True
            raise
        finally:
            signal.signal(signal.SIGINT, usual)
            if waiting and not self.is_broken:
                usual(*waiting[0])
