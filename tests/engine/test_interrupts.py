"""Ctrl-C amid a step: raised at its end, and the engine goes on with sound books."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.interrupts import InterruptGuard
from penstock.errors import PenstockError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
STORY = "Once upon a time there was a lighthouse keeper who counted ships. " * 6


def interrupt(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def work(
    guard: InterruptGuard, times: int, said: list[str], error: Exception | None = None
) -> None:
    with guard.deferred():
        interrupt(times)
        said.append("to the end")
        if error is not None:
            raise error
    said.append("and further")


def test_it_is_raised_at_the_end_of_the_work() -> None:
    guard, said = InterruptGuard(), list[str]()
    with pytest.raises(KeyboardInterrupt):
        work(guard, 1, said)
    assert said == ["to the end"]
    assert not guard.is_broken
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_is_raised_at_once() -> None:
    guard, said = InterruptGuard(), list[str]()
    with pytest.raises(KeyboardInterrupt):
        work(guard, 2, said)
    assert said == []
    assert guard.is_broken
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_in_the_work_does_not_swallow_it() -> None:
    guard = InterruptGuard()
    with pytest.raises(KeyboardInterrupt) as raised:
        work(guard, 1, [], ValueError("the work went wrong"))
    assert isinstance(raised.value.__context__, ValueError)
    assert not guard.is_broken


def test_who_has_another_handler_is_told_at_the_end() -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: told.append(number))
    try:
        with InterruptGuard().deferred():
            interrupt()
            assert not told
        assert told == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_work_as_ever() -> None:
    done: list[str] = []

    def run() -> None:
        with InterruptGuard().deferred():
            done.append("work")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == ["work"]


@pytest.fixture
def llm(cache: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        with LLM(
            dtype="float32", kv_offloading_size=0.25, device_kv_gib=0.05, block_tokens=16
        ) as made:
            yield made


def interrupt_in(llm: LLM, name: str, call: int, times: int = 1) -> None:
    """Amid the given call of one of the scheduler's methods."""
    scheduler: Any = llm.engine.scheduler
    usual: Callable[..., Any] = getattr(scheduler, name)
    num_calls = 0

    def interrupted(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            interrupt(times)
        return usual(*args)

    setattr(scheduler, name, interrupted)


@pytest.mark.parametrize("name", ["schedule", "computed"])
@pytest.mark.parametrize("call", [1, 4])
def test_an_answer_is_stopped_and_the_next_is_right(llm: LLM, name: str, call: int) -> None:
    offloader = llm.engine.offloader
    assert offloader is not None
    interrupt_in(llm, name, call)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([STORY], GREEDY)
    assert not llm.engine.has_work
    llm.engine.check()
    (again,) = llm.generate([STORY], GREEDY)
    offloader.drain()
    offloader.empty_host()
    llm.engine.pool.forget()
    (wanted,) = llm.generate([STORY], GREEDY)
    assert wanted.num_cached_tokens == 0
    assert again.outputs[0].token_ids == wanted.outputs[0].token_ids


def test_who_insists_has_to_make_another(llm: LLM) -> None:
    interrupt_in(llm, "computed", 2, times=2)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([STORY], GREEDY)
    with pytest.raises(PenstockError, match="make another"):
        llm.generate([STORY], GREEDY)
    with pytest.raises(PenstockError, match="make another"):
        llm.hint("release", session="nobody")
