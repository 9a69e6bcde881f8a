"""Ctrl-C, or a notebook's stop button, takes effect at the end of a step.

Python raises KeyboardInterrupt at any line, for example halfway through an update of the books or
of a copy. The user may go on with the same LLM afterwards, so a step must not be left half done.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class InterruptGuard:
    """Delays an interrupt until the work in progress has ended."""

    def __init__(self) -> None:
        self.is_broken = False  # a second interrupt stopped the work halfway

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise an interrupt at the end of the block; a second one at once."""
        usual = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(usual):
            yield  # Python raises no KeyboardInterrupt here
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
