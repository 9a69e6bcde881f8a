"""A trace as the simulator sees it: arrival times, lengths and block keys, no text."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types import BlockKey


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. A key stands for a block and all before it: equal keys are equal prefixes."""

    arrival_seconds: float  # since the start of the trace
    num_input_tokens: int
    num_output_tokens: int
    prompt_blocks: tuple[BlockKey, ...]  # only full blocks
    output_blocks: tuple[BlockKey, ...] = ()  # blocks that the answer completes, if known
    session: str = ""  # empty if not known


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]  # in order of arrival
