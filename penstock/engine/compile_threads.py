"""The threads that compile grammars.

A compiler calls itself once for each rule that leads to another. A chain of thousands of rules,
which fits into a grammar, needs more stack than threads usually have; without it, the process would
end. Some grammars take minutes, and nothing can stop the thread that compiles one: another takes
its place.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_STACK_BYTES = 256 << 20  # only what is used takes memory; the longest chain used less than 64 MiB
_THREADS = 2  # besides those that are late
_MAX_LATE = 4
_starting = threading.Lock()  # the size of stacks is a setting of the whole process


class CompileThreads:
    """`late_seconds`: after which a thread is replaced."""

    def __init__(self, late_seconds: float) -> None:
        self._late_seconds = late_seconds
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._began: dict[threading.Thread, float] = {}  # when each began what it does

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        future: Future[_Result] = Future()
        with self._lock:
            self._waiting.append((future, work))
        try:
            self.replace_late()
        except BaseException:  # no thread can be started
            future.cancel()
            raise
        return future

    def replace_late(self) -> None:
        """Start threads for what waits, as many as there may be."""
        with self._lock:
            for _ in range(min(self._room(), len(self._waiting))):
                thread = threading.Thread(target=self._run, name="penstock-grammars", daemon=True)
                _start(thread)
                self._began[thread] = time.monotonic()

    def close(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            future.cancel()

    def _room(self) -> int:
        now = time.monotonic()
        num_late = sum(now - began > self._late_seconds for began in self._began.values())
        return _THREADS + min(num_late, _MAX_LATE) - len(self._began)

    def _run(self) -> None:
        own = threading.current_thread()
        while True:
            with self._lock:
                self._began.pop(own, None)
                if not self._waiting or self._room() <= 0:
                    return
                self._began[own] = time.monotonic()
                future, work = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            del future, work


def _start(thread: threading.Thread) -> None:
    with _starting:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
