"""A trace as the simulator sees it: arrival times, lengths and block keys, no text."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.types import BlockKey


@dataclass(frozen=True, slots=True)
class TraceSegment:
    """A part of a prompt whose KV may be used wherever it stands (docs/anywhere.md)."""

    start: int  # its place in the prompt, in tokens
    blocks: tuple[BlockKey, ...]  # its full blocks, as those of a prompt of its own
    num_first_tokens: int = 0  # mended at its start ("link")
    blend_share: float = 0.0  # of the reused tokens, mended anywhere in it ("blend")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. A key stands for a block and all before it: equal keys are equal prefixes."""

    arrival_seconds: float  # since the start of the trace
    num_input_tokens: int
    num_output_tokens: int
    prompt_blocks: tuple[BlockKey, ...]  # only full blocks
    output_blocks: tuple[BlockKey, ...] = ()  # blocks that the answer completes, if known
    session: str = ""  # empty if not known
    segments: tuple[TraceSegment, ...] = ()  # in order; the first is not at the prompt's start
    # The prompt's full blocks if nothing were marked; only given if there are segments.
    plain_blocks: tuple[BlockKey, ...] = ()

    def without_marks(self) -> TraceRequest:
        """The same request if it had no segments. The blocks of its answer are not known then."""
        if not self.segments:
            return self
        return replace(
            self, prompt_blocks=self.plain_blocks, output_blocks=(), segments=(), plain_blocks=()
        )


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]  # in order of arrival

    @property
    def has_segments(self) -> bool:
        return any(request.segments for request in self.requests)

    def without_marks(self) -> Trace:
        requests = tuple(request.without_marks() for request in self.requests)
        return replace(self, requests=requests)
