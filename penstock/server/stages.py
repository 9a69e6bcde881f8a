"""The stages of a request in order, as the dashboard and traces show them. Pure."""

from __future__ import annotations

from typing import NamedTuple

from penstock.events import RequestStory, Stage

WAIT, LOAD, PREFILL, DECODE = STAGES = ("wait", "load", "prefill", "decode")
_NAMES = {"waiting": WAIT, "loading": LOAD}
_RUNNING = "running"


class StageSpan(NamedTuple):
    """A stage, in nanoseconds since the request arrived."""

    name: str
    start_ns: int
    end_ns: int
    num_preemptions: int  # before it


def pieces_of(told: RequestStory) -> tuple[list[StageSpan], list[int]]:
    """The stages from arrival to end, without gaps; and the times of preemptions.

    Running is split at the first token. Stages that took no time are left out.
    """
    # A request that was cancelled before the engine's next step has only waited.
    stages = told.stages or (Stage("waiting", 0.0),)
    ends = [*(stage.start for stage in stages[1:]), told.seconds]
    end_ns = to_ns(told.seconds)
    first_ns = end_ns if told.first_token_seconds is None else to_ns(told.first_token_seconds)
    pieces: list[StageSpan] = []
    preempted_ns: list[int] = []
    reached = 0

    def add(name: str, until_ns: int) -> None:
        nonlocal reached
        until_ns = min(until_ns, end_ns)
        if until_ns > reached:
            pieces.append(StageSpan(name, reached, until_ns, len(preempted_ns)))
            reached = until_ns

    for number, (stage, end) in enumerate(zip(stages, ends, strict=True)):
        if number and stage.phase == "waiting":
            preempted_ns.append(reached)
        if stage.phase == _RUNNING:
            add(PREFILL, min(first_ns, to_ns(end)))
            add(DECODE, to_ns(end))
        else:
            add(_NAMES[stage.phase], to_ns(end))
    return pieces, preempted_ns


def to_ns(seconds: float) -> int:
    return round(seconds * 1e9)
