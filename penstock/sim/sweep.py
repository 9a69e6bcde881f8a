"""Many configurations side by side: each trace, policy and set of sizes is one point, one process.

A point with a device pool is simulated in time; one without is replayed, for its hit rate alone.
Beside the points stand the limits: what no policy could have beaten with as many blocks.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.errors import PenstockError
from penstock.sim.instance import InstanceConfig
from penstock.sim.optimum import optimum, unbounded
from penstock.sim.replay import Replayed, new_ledger, replay
from penstock.sim.simulator import simulate
from penstock.sim.tally import Simulated
from penstock.sim.trace import Trace, TraceRequest
from penstock.units import counted

_POLL_SECONDS = 0.2
# LRU knows no chains: replayed as it is published, a request's tail is older than its head.
_TAILS_FIRST = frozenset({"lru"})

Tick = Callable[[str, float], None]
"""What is being simulated, and the share of the whole that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration; sizes are in blocks, and no device pool means no time."""

    trace: int  # its number
    policy: str
    num_device_blocks: int | None
    num_host_blocks: int
    num_disk_blocks: int = 0
    instance: InstanceConfig | None = None  # where time passes: all of it
    speed: float = 1.0

    @property
    def num_blocks(self) -> int:
        """All tiers together: no more different blocks than that can be kept."""
        return (self.num_device_blocks or 0) + self.num_host_blocks + self.num_disk_blocks


@dataclass(frozen=True, slots=True)
class Limit:
    """For a trace and so many blocks: hit rates with the future known, and without a bound."""

    trace: int
    num_blocks: int
    optimum: float  # no policy has more
    unbounded: float


class _LimitJob(NamedTuple):
    trace: int
    num_blocks: int


_Job = Point | _LimitJob


class _Timed(NamedTuple):
    found: Simulated
    limit: Limit | None  # of its own, where requests were rejected


@dataclass(frozen=True, slots=True)
class Swept:
    points: tuple[Point, ...]
    found: tuple[Simulated | Replayed, ...]  # in the order of the points
    limits: tuple[Limit, ...]  # in the order of the points


def sweep(
    traces: Sequence[Trace],
    points: Sequence[Point],
    *,
    num_processes: int = 1,
    tick: Tick = lambda doing, share: None,
) -> Swept:
    """Measure every point, and the limits beside them. The order of the results is the points'."""
    timed = {point.trace for point in points if point.instance is not None}
    # Where time passes only full blocks can be kept; some traces name the rest of a prompt too.
    traces = [_only_full(t) if number in timed else t for number, t in enumerate(traces)]
    sizes = sorted({_LimitJob(point.trace, point.num_blocks) for point in points})
    jobs: list[_Job] = [*points, *sizes]
    if num_processes > 1 and len(jobs) > 1:
        found = _side_by_side(traces, jobs, min(num_processes, len(jobs)), tick)
    else:
        found = _one_by_one(traces, jobs, tick)
    limit_of = dict(zip(sizes, found[len(points) :], strict=True))
    results: list[Simulated | Replayed] = []
    limits: list[Limit] = []
    for point, result in zip(points, found, strict=False):
        timed_result, own_limit = result if isinstance(result, _Timed) else (result, None)
        results.append(timed_result)
        limits.append(own_limit or limit_of[_LimitJob(point.trace, point.num_blocks)])
    return Swept(tuple(points), tuple(results), tuple(limits))


def _run(traces: Sequence[Trace], job: _Job, tick: Callable[[int], None]) -> Any:
    trace = traces[job.trace]
    if isinstance(job, _LimitJob):
        return _limit(job.trace, job.num_blocks, trace.requests)
    if job.instance is None:
        ledger = new_ledger(job.policy, job.num_host_blocks)
        return replay(trace.requests, ledger, tick, tails_first=job.policy in _TAILS_FIRST)
    found = simulate(trace, job.instance, speed=job.speed, tick=tick)
    limit = None
    if found.num_refused:  # hit rates are of those served, and so is what bounds them
        seen = zip(trace.requests, found.requests, strict=True)
        served = [request for request, told in seen if not told.refusal]
        limit = _limit(job.trace, job.num_blocks, served)
    # What each request saw is too much to hand around.
    return _Timed(replace(found, requests=()), limit)


def _limit(trace: int, num_blocks: int, requests: Sequence[TraceRequest]) -> Limit:
    best = optimum(requests, num_blocks).hit_rate
    return Limit(trace, num_blocks, best, unbounded(requests).hit_rate)


def _one_by_one(traces: Sequence[Trace], jobs: Sequence[_Job], tick: Tick) -> list[Any]:
    found = []
    for number, job in enumerate(jobs):
        name, num_requests = _name(job), len(traces[job.trace].requests)

        def tick_job(
            done: int, number: int = number, name: str = name, n: int = num_requests
        ) -> None:
            tick(name, (number + done / max(1, n)) / len(jobs))

        tick_job(0)
        found.append(_run(traces, job, tick_job))
    return found


# What a process of a sweep has been given at its start.
_shared: tuple[Sequence[Trace], Any] | None = None


class _Stopped(Exception):
    """Nobody waits for this point any more."""


def _begin(traces: Sequence[Trace], progress: Any) -> None:
    global _shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it stops us
    _shared = traces, progress


def _work(number: int, job: _Job) -> Any:
    assert _shared is not None
    traces, progress = _shared

    def tick(done: int) -> None:
        progress[number] = done
        if progress[-1]:
            raise _Stopped

    found = _run(traces, job, tick)
    progress[number] = len(traces[job.trace].requests)
    return found


def _side_by_side(
    traces: Sequence[Trace], jobs: Sequence[_Job], num_processes: int, tick: Tick
) -> list[Any]:
    # Not forked: whoever calls may have threads, of a progress bar for one.
    context = multiprocessing.get_context("spawn")
    progress = context.Array("Q", len(jobs) + 1, lock=False)  # the last one says stop
    num_all = max(1, sum(len(traces[job.trace].requests) for job in jobs))
    with ProcessPoolExecutor(
        num_processes, mp_context=context, initializer=_begin, initargs=(traces, progress)
    ) as pool:
        futures = [pool.submit(_work, number, job) for number, job in enumerate(jobs)]
        try:
            while wait(futures, _POLL_SECONDS).not_done:
                num_done = sum(future.done() for future in futures)
                name = f"{num_done} of {len(jobs)}"
                tick(name, min(1.0, sum(progress) / num_all))
                if any(future.done() and future.exception() for future in futures):
                    break
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise PenstockError(
                "a process of the sweep was ended from outside, for want of memory perhaps: "
                "expected all to run to their end; try fewer at a time with --jobs"
            ) from None
        except BaseException:
            progress[len(jobs)] = 1
            pool.shutdown(cancel_futures=True)
            raise


def _name(job: _Job) -> str:
    name = "optimum" if isinstance(job, _LimitJob) else job.policy
    return f"{name}, {counted(job.num_blocks, 'block')}"


def _only_full(trace: Trace) -> Trace:
    requests = tuple(
        request
        if len(request.prompt_blocks) <= request.num_input_tokens // trace.block_tokens
        else replace(
            request,
            prompt_blocks=request.prompt_blocks[: request.num_input_tokens // trace.block_tokens],
        )
        for request in trace.requests
    )
    return replace(trace, requests=requests)
