"""What a request gives back, in vLLM's shape. Plain values: nothing here points into the engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One token's log probability in the model's own distribution, before any penalty."""

    logprob: float
    rank: int | None = None  # 1 is the likeliest
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the n sequences of a request, so far."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # one entry a token, by token id
    # stop: an end token, a stop token or a stop string; length: no more tokens allowed; abort.
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token or string; None for the end token

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times are seconds of the engine's clock; counts are over the whole request."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_loaded_tokens: int = 0  # of the prompt: brought back from a lower tier, not computed

    @property
    def first_token_seconds(self) -> float | None:
        """From arrival to the first token; None before it."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def total_seconds(self) -> float | None:
        """From arrival to the end; None before it."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A request and everything it has produced so far."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0  # of the prompt: not computed, whichever tier had them
    metrics: RequestMetrics | None = None
