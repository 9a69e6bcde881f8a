"""A thread that keeps the lower tiers going while vLLM is idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_TICK_SECONDS = 0.003
_IDLE_SECONDS = 0.5
_JOIN_SECONDS = 5.0


class Ticker:
    """Calls `tick` repeatedly while it returns True, then again when woken."""

    def __init__(self, tick: Callable[[], bool]) -> None:
        self._tick = tick
        self.error: Exception | None = None  # the error that stopped the thread
        self._stopped = threading.Event()
        self._awake = threading.Event()
        self._awake.set()  # the index of a disk may have to be read
        self._thread = threading.Thread(target=self._run, name="penstock-ticker", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._awake.set()

    def stop(self, *, wait: bool) -> None:
        self._stopped.set()
        self._awake.set()
        if wait:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._awake.wait(_IDLE_SECONDS)
            self._awake.clear()
            while not self._stopped.is_set() and self._is_moving():
                time.sleep(_TICK_SECONDS)

    def _is_moving(self) -> bool:
        try:
            return self._tick()
        except Exception as error:  # raised again in vLLM's next call, which is guarded
            self.error = error
            self._stopped.set()
            return False
