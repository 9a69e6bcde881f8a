"""A lock around books that nobody may use after an error: they cannot be trusted then."""

from __future__ import annotations

import threading
from types import TracebackType


class BooksLock:
    """Like `threading.RLock`, as a context manager. An error within it is kept before the lock is
    released, and raised again at every later entry, also in other threads."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.regardless = threading.RLock()  # the lock itself, for what must happen after an error

    def __enter__(self) -> None:
        self.regardless.acquire()
        if self.error is not None:
            self.regardless.release()
            raise self.error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.error is None and isinstance(error, Exception):
            self.error = error
        self.regardless.release()
