"""What a trace is to the simulator: who came when, and which blocks are equal. No text."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types import BlockKey


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A name stands for its block and all before it: equal names are equal prefixes."""

    arrival_seconds: float  # from the trace's beginning
    num_input_tokens: int
    num_output_tokens: int
    prompt_blocks: tuple[BlockKey, ...]  # full ones
    output_blocks: tuple[BlockKey, ...] = ()  # those that the answer completes, where known
    session: str = ""  # empty: not known


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]  # in the order of their arrival
