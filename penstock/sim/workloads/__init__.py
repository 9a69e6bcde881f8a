"""Generated traffic, for when there is no trace. Each workload documents what it models and where
its numbers come from. Equal arguments give equal traces."""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict
from typing import Any

from penstock.errors import ConfigError
from penstock.sim.trace import Trace
from penstock.sim.workloads.agents import Agents
from penstock.sim.workloads.batch import Batch
from penstock.sim.workloads.chat import ChatWorkload
from penstock.sim.workloads.code import Code
from penstock.sim.workloads.rag import Rag
from penstock.sim.workloads.world import World, in_order

__all__ = ["WORKLOADS", "generate", "knobs_of"]

_KINDS: dict[str, type[ChatWorkload | Rag | Code | Agents | Batch]] = {
    "chat": ChatWorkload,
    "rag": Rag,
    "code": Code,
    "agents": Agents,
    "batch": Batch,
}
WORKLOADS: dict[str, str] = {
    "chat": "conversations of a few turns, with thinking time and shared system prompts",
    "rag": "questions about documents, a few of which are popular",
    "code": "bursts of code completions: a shared outline and open files that are edited",
    "agents": "agents that call tools and grow their context, with pauses and subagents",
    "batch": "one instruction with many different documents, all sent at once",
}
DEFAULT_BLOCK_TOKENS = 64
_MAX_KNOB = 1e9
_SHARES = ("edit_share", "subagent_share")
_MAY_BE_ZERO = (*_SHARES, "seconds_between", "num_subagents", "system_tokens")


def generate(
    name: str,
    *,
    num_requests: int,
    seed: int = 0,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    **knobs: float,
) -> Trace:
    """The first requests of a workload. Raises ConfigError for unknown names and bad values."""
    _check_name(name)
    if num_requests < 1:
        raise ConfigError(f"num_requests is {num_requests}: expected at least 1.")
    if block_tokens < 1:
        raise ConfigError(f"block_tokens is {block_tokens}: expected at least 1.")
    checked: dict[str, Any] = {knob: _check(name, knob, value) for knob, value in knobs.items()}
    workload = _KINDS[name](**checked)
    world = World(name, seed, block_tokens)
    return Trace(name, block_tokens, in_order(workload.sessions(world), num_requests))


def knobs_of(name: str) -> dict[str, float]:
    """A workload's parameters and their defaults."""
    _check_name(name)
    return asdict(_KINDS[name]())


def _check_name(name: str) -> None:
    if name not in _KINDS:
        raise ConfigError(f"there is no workload {name!r}: expected {', '.join(WORKLOADS)}.")


def _check(workload: str, knob: str, value: float) -> float:
    known = knobs_of(workload)
    if knob not in known:
        close = difflib.get_close_matches(knob, known, n=1)
        advice = f"did you mean {close[0]}?" if close else f"expected {', '.join(known)}."
        raise ConfigError(f"the workload {workload} has no parameter {knob!r}: {advice}")
    whole = isinstance(known[knob], int)
    low = 0 if knob in _MAY_BE_ZERO else 1 if whole else 1e-9
    high = 1.0 if knob in _SHARES else _MAX_KNOB
    if not math.isfinite(value) or not low <= value <= high or (whole and value != int(value)):
        kind = "an integer" if whole else "a number"
        raise ConfigError(f"{knob} is {value}: expected {kind} from {low:g} to {high:g}.")
    return int(value) if whole else value
