"""An error of ours at every entry, in every state: vLLM goes on, and nothing it computes is wrong.

The small vLLM (see `vllm_model`) asserts what the real one does: it hears of a load once, and only
of loads that it waits for; and it raises `Silent` where anything is computed from wrong bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from connectors.test_sides import Models, live, models
from connectors.vllm_model import Vllm

from penstock.connectors.vllm.orders import Reports
from penstock.connectors.vllm.scheduler_guard import GuardedScheduler

__all__ = ["models"]

# A step's first calls, some in the middle of it, and one when all tiers are full.
CALLS = (1, 2, 9, 40)
SCHEDULER = ("lookup", "allocated", "orders", "report", "finished")
BOOKS = ("match", "load", "save", "step", "cancel", "note", "used")
DISPATCH = ("gather", "fence", "fence_loads", "expect", "take", "reported", "ended")
WORKER = ("begin", "load", "save", "poll")
COPIER = ("submit", "poll", "fence", "start_timer", "stop_timer", "take_times")


class Injected(RuntimeError):
    pass


class Break:
    """Raises at one call of a method, before or after it has done its work."""

    def __init__(self, owner: Any, name: str, number: int, *, is_after: bool) -> None:
        self.num_calls = 0
        self._number = number
        self._is_after = is_after
        self._real: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, self)

    @property
    def has_happened(self) -> bool:
        return self.num_calls >= self._number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        is_it = self.num_calls == self._number
        if is_it and not self._is_after:
            raise Injected
        result = self._real(*args, **kwargs)
        if is_it:
            raise Injected
        return result


OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"overlaps": True, "num_workers": 2}, id="steps of two workers overlap"),
]


def spent(
    models: Models,
    options: dict[str, Any],
    break_it: Callable[[Vllm, int, bool], Break],
    num_steps: int = 60,
) -> int:
    """How many of the errors happened, each in the life of a server of its own."""
    num_happened = 0
    for number in CALLS:
        for is_after in (False, True):
            seed = random.Random(f"{number} {is_after}").randrange(1000)
            vllm = models(disk=True, seed=seed, **options)
            broken = break_it(vllm, number, is_after)
            live(vllm, seed, num_steps)
            num_happened += broken.has_happened
            request = vllm.add([1] * 30, 2)  # and it goes on serving
            vllm.run()
            assert request.num_output == 2
    return num_happened


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SCHEDULER)
def test_an_error_in_the_schedulers_side(
    models: Models, options: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def break_it(vllm: Vllm, number: int, is_after: bool) -> Break:
        return Break(vllm.side, name, number, is_after=is_after)

    assert spent(models, options, break_it) >= 2
    assert "offloading is off until a restart" in caplog.text


@pytest.mark.parametrize("is_after", [False, True])
def test_an_error_in_a_reset(models: Models, is_after: bool) -> None:
    vllm = models(disk=True, overlaps=True)
    Break(vllm.side, "reset", 1, is_after=is_after)
    live(vllm, 0, 60)
    while not vllm.reset():
        vllm.step()
    assert vllm.scheduler.side is None
    live(vllm, 1, 30)


def test_an_error_in_what_only_the_real_vllm_asks(models: Models) -> None:
    vllm = models()
    Break(vllm.side, "sources", 1, is_after=False)
    assert vllm.scheduler.sources("request") == {}
    assert vllm.scheduler.side is None


@pytest.mark.parametrize("name", BOOKS)
def test_an_error_in_the_books(models: Models, name: str) -> None:
    def break_it(vllm: Vllm, number: int, is_after: bool) -> Break:
        return Break(vllm.offloader, name, number, is_after=is_after)

    # On a busy machine few requests are aborted just while they load.
    num_steps = 200 if name == "cancel" else 60
    assert spent(models, {"overlaps": True}, break_it, num_steps) >= 2


@pytest.mark.parametrize("name", DISPATCH)
def test_an_error_in_what_the_workers_are_told(models: Models, name: str) -> None:
    def break_it(vllm: Vllm, number: int, is_after: bool) -> Break:
        return Break(vllm.side._dispatch, name, number, is_after=is_after)

    assert spent(models, {"overlaps": True, "num_workers": 2}, break_it) >= 2


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", WORKER)
def test_an_error_in_a_workers_side(
    models: Models, options: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def break_it(vllm: Vllm, number: int, is_after: bool) -> Break:
        vllm.side_step()  # the workers hear where DRAM is
        for worker in vllm.workers:
            worker.begin(vllm.side_step())
        return Break(vllm.workers[-1]._side, name, number, is_after=is_after)

    assert spent(models, options, break_it) >= 8
    assert "this worker stops copying until a restart" in caplog.text


@pytest.mark.parametrize("name", COPIER)
def test_an_error_in_what_copies(models: Models, name: str) -> None:
    def break_it(vllm: Vllm, number: int, is_after: bool) -> Break:
        return Break(vllm.copiers[-1], name, number, is_after=is_after)

    # A fence is needed only while a save is under way: how often depends on the machine.
    assert spent(models, {"overlaps": True, "num_workers": 2}, break_it) >= 1


def test_an_error_behind_vllms_back_ends_offloading(models: Models) -> None:
    vllm = models(disk=True)
    live(vllm, 0, 60)
    vllm.side._lock.error = Injected()  # as if its thread had met one
    request = vllm.add([2] * 30, 2)
    vllm.run()
    assert request.num_output == 2
    assert vllm.scheduler.side is None


def test_the_step_that_vllm_describes_cannot_be_read(models: Models, tmp_path: Path) -> None:
    vllm = models(disk=True)

    def unreadable() -> Any:
        raise AttributeError("another vLLM")

    assert vllm.scheduler.orders(unreadable).is_last_resort
    assert vllm.scheduler.lookup(vllm.add([1] * 9, 1), 0) == 0
    vllm.run()


def test_steps_go_on_until_all_that_wait_have_been_given_up() -> None:
    """Of a request that was aborted while it waited vLLM frees the blocks when it hears of it."""
    side: Any = Mock(failure=None, has_pending_work=False)
    scheduler, request = GuardedScheduler(side, 4), Mock(request_id="r")
    scheduler.lookup(request, 4)
    scheduler.allocated(request, [[7, 8, 9]], 8)
    assert not scheduler.has_pending_work, "the side itself knows what it still has to do"
    side.finished.side_effect = Injected
    scheduler.finished(request)
    assert scheduler.has_pending_work
    assert scheduler.orders(Mock()).complete == {"r": (8, 9)}
    scheduler.report(Reports(), ["r"])
    assert not scheduler.has_pending_work
