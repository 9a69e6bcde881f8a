"""Requests whose prompt another vLLM computes (`do_remote_prefill`): wait for its KV.

vLLM asks again at every step how much of a waiting request's KV there is. The answer is "not known
yet" until all of it is there, or until nothing has come for too long: then the rest is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.costs.patience import prefill_patience

_ASK_SECONDS = 0.02  # between two questions to a remote tier
# vLLM's routers ask the decoder when the prompt is computed. What is missing then is on its way.
_MAX_SECONDS = 5.0

HANDED_OVER = {"do_remote_prefill": True, "do_remote_decode": False}
"""What a prefiller's answer tells the decoder, in the fields that vLLM's routers pass on."""


@dataclass(slots=True)
class Awaiting:
    """What has come of one prompt so far."""

    num_tokens: int
    since: float  # when it last got more
    next_question: float

    def note(self, num_tokens: int, now: float) -> None:
        if num_tokens > self.num_tokens:
            self.num_tokens, self.since = num_tokens, now

    def is_over(self, now: float, compute_seconds: float | None) -> bool:
        return now - self.since > prefill_patience(compute_seconds, _MAX_SECONDS)

    def asks_again(self, now: float) -> bool:
        """Whether it is time to ask the remote tier."""
        if now < self.next_question:
            return False
        self.next_question = now + _ASK_SECONDS
        return True


def begin_awaiting(request: Any, now: float) -> Awaiting | None:
    """None if the request computes its own prompt."""
    return Awaiting(0, now, now) if _says(request, "do_remote_prefill") else None


def hands_over(request: Any) -> bool:
    """Whether another vLLM will generate this request's answer."""
    return _says(request, "do_remote_decode")


def _says(request: Any, name: str) -> bool:
    params = getattr(request, "kv_transfer_params", None)
    return isinstance(params, Mapping) and bool(params.get(name))
