"""A request's outputs, with vLLM's names. They hold no references into the engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One token's log probability under the model, before penalties and temperature."""

    logprob: float
    rank: int | None = None  # 1 is the most likely token
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """The output of one of a request's n sequences."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # one entry per token, by token id
    # stop: an end token, stop token or stop string; length: the token limit; or abort.
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token id or string; None for the end token

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times are in seconds on the engine's clock. Counts cover the whole request."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_loaded_tokens: int = 0  # prompt tokens loaded from a lower tier instead of computed
    num_lossy_tokens: int = 0  # tokens whose KV a lossy codec may have changed

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds from arrival to the first token; None before it."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def total_seconds(self) -> float | None:
        """Seconds from arrival to the end; None before it."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A request and its outputs."""

    request_id: str
    prompt: str | None  # None if token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0  # prompt tokens found in any tier instead of computed
    num_reused_tokens: int = 0  # of segments, whose KV was used where they stand
    num_mended_tokens: int = 0  # of the same segments, computed where they stand
    metrics: RequestMetrics | None = None
