"""Books are not used after an error, whichever thread it happened in."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from penstock.connectors.vllm.books_lock import BooksLock


class Broken(Exception):
    pass


def test_an_error_is_raised_again_at_every_entry() -> None:
    lock = BooksLock()
    with lock, lock:  # it may be entered again by its own thread
        pass
    assert lock.error is None
    error = Broken()
    with pytest.raises(Broken), lock:
        raise error
    for _ in range(2):
        with pytest.raises(Broken), lock:
            pytest.fail("the books were used")
    assert lock.error is error


def test_a_thread_that_waits_for_the_lock_does_not_enter_after_an_error() -> None:
    lock = BooksLock()
    entered, fails = threading.Event(), threading.Event()
    used: list[int] = []

    def fail() -> None:
        with lock:
            entered.set()
            fails.wait()
            raise Broken

    def use() -> None:
        with lock:
            used.append(1)

    def quietly(act: Callable[[], None]) -> None:
        with pytest.raises(Broken):
            act()

    threads = [threading.Thread(target=quietly, args=[act]) for act in (fail, use)]
    threads[0].start()
    entered.wait()
    threads[1].start()
    fails.set()
    for thread in threads:
        thread.join()
    assert not used


def test_what_must_happen_after_an_error_can() -> None:
    lock = BooksLock()
    with pytest.raises(Broken), lock:
        raise Broken
    with lock.regardless:
        pass
