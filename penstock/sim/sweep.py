"""Run many configurations: each combination of trace, policy and sizes is one point.

Points run in parallel processes. A point with a device pool is simulated in time; without one, only
its hit rate is replayed. Each point also gets its limit: the best that any policy could reach with
as many blocks.
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
from penstock.sim.fleet import FleetConfig, simulate_fleet
from penstock.sim.fleet_tally import FleetSimulated
from penstock.sim.instance import InstanceConfig
from penstock.sim.optimum import optimum, unbounded
from penstock.sim.replay import Replayed, new_ledger, replay
from penstock.sim.simulator import simulate
from penstock.sim.tally import Simulated
from penstock.sim.trace import Trace, TraceRequest
from penstock.units import counted

_POLL_SECONDS = 0.2
# LRU does not know parents. As in published figures, a request's last blocks count as the oldest.
_TAILS_FIRST = frozenset({"lru"})

Tick = Callable[[str, float], None]
"""Called with what is being simulated and the share of all work done, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration. Sizes are in blocks."""

    trace: int  # index of the trace
    policy: str
    num_device_blocks: int | None
    num_host_blocks: int
    num_disk_blocks: int = 0
    instance: InstanceConfig | None = None  # None: replayed without time
    speed: float = 1.0

    @property
    def num_blocks(self) -> int:
        """The blocks of all tiers together: the most different blocks that can be kept."""
        return (self.num_device_blocks or 0) + self.num_host_blocks + self.num_disk_blocks


@dataclass(frozen=True, slots=True)
class Limit:
    """The best possible hit rates for a trace: with `num_blocks` blocks, and unbounded."""

    trace: int
    num_blocks: int
    optimum: float  # no policy has a higher hit rate
    unbounded: float


class _LimitJob(NamedTuple):
    trace: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class FleetPoint:
    """One fleet, always simulated in time. `point` has the sizes of its instances and nodes."""

    point: Point
    fleet: FleetConfig

    @property
    def trace(self) -> int:
        return self.point.trace


_Job = Point | _LimitJob | FleetPoint


class _Timed(NamedTuple):
    found: Simulated
    limit: Limit | None  # its own limit, if requests were rejected


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
    """Run every point and compute the limits. Results are in the order of the points."""
    timed = {point.trace for point in points if point.instance is not None}
    # In timed points only full blocks are kept; some traces also name the partial block at the end.
    traces = [only_full(t) if number in timed else t for number, t in enumerate(traces)]
    sizes = sorted({_LimitJob(point.trace, point.num_blocks) for point in points})
    jobs: list[_Job] = [*points, *sizes]
    found = _run_all(traces, jobs, num_processes, tick)
    limit_of = dict(zip(sizes, found[len(points) :], strict=True))
    results: list[Simulated | Replayed] = []
    limits: list[Limit] = []
    for point, result in zip(points, found, strict=False):
        timed_result, own_limit = result if isinstance(result, _Timed) else (result, None)
        results.append(timed_result)
        limits.append(own_limit or limit_of[_LimitJob(point.trace, point.num_blocks)])
    return Swept(tuple(points), tuple(results), tuple(limits))


def sweep_fleets(
    traces: Sequence[Trace],
    points: Sequence[FleetPoint],
    *,
    num_processes: int = 1,
    tick: Tick = lambda doing, share: None,
) -> list[FleetSimulated]:
    """Run every fleet. Results are in the order of the points."""
    return _run_all(traces, points, num_processes, tick)


def _run_all(
    traces: Sequence[Trace], jobs: Sequence[_Job], num_processes: int, tick: Tick
) -> list[Any]:
    if num_processes > 1 and len(jobs) > 1:
        return _side_by_side(traces, jobs, min(num_processes, len(jobs)), tick)
    return _one_by_one(traces, jobs, tick)


def _run(traces: Sequence[Trace], job: _Job, tick: Callable[[int], None]) -> Any:
    trace = traces[job.trace]
    if isinstance(job, _LimitJob):
        return _limit(job.trace, job.num_blocks, trace.requests)
    if isinstance(job, FleetPoint):
        fleet = simulate_fleet(trace, job.fleet, speed=job.point.speed, tick=tick)
        return replace(fleet, total=replace(fleet.total, requests=()))
    if job.instance is None:
        ledger = new_ledger(job.policy, job.num_host_blocks)
        return replay(trace.requests, ledger, tick, tails_first=job.policy in _TAILS_FIRST)
    found = simulate(trace, job.instance, speed=job.speed, tick=tick)
    limit = None
    if found.num_refused:  # hit rates cover only served requests, so the limit must too
        results = zip(trace.requests, found.requests, strict=True)
        served = [request for request, result in results if not result.refusal]
        limit = _limit(job.trace, job.num_blocks, served)
    # The results of single requests are too large to pass between processes.
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


# Set once in each worker process.
_shared: tuple[Sequence[Trace], Any] | None = None


class _Stopped(Exception):
    """The sweep was cancelled."""


def _begin(traces: Sequence[Trace], progress: Any) -> None:
    global _shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops us
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
    # Not forked: the caller may have threads, for example for a progress bar.
    context = multiprocessing.get_context("spawn")
    progress = context.Array("Q", len(jobs) + 1, lock=False)  # the last element is the stop flag
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
                "a worker process of the sweep was killed, perhaps because memory ran out: run "
                "fewer at a time with --jobs"
            ) from None
        except BaseException:
            progress[len(jobs)] = 1
            pool.shutdown(cancel_futures=True)
            raise


def _name(job: _Job) -> str:
    if isinstance(job, FleetPoint):
        return f"{job.fleet.router}, {counted(job.fleet.num_instances, 'instance')}"
    name = "optimum" if isinstance(job, _LimitJob) else job.policy
    return f"{name}, {counted(job.num_blocks, 'block')}"


def only_full(trace: Trace) -> Trace:
    """The trace without partial blocks at the end of prompts."""
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
