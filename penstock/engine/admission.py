"""Decides whether a request may start now, later, or never. Pure.

A request needs room for its prompt and its longest answer. While it runs, its KV must be on the
device or, if it may be cold, in HOST. When it is preempted, the lower tiers must hold its KV. So:

* a request that does not fit device and HOST together is refused, with the numbers;
* a request that does not fit beside those that have started waits;
* if `max_waiting` requests are waiting, the next one is refused with a time to retry.
"""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.units import counted

_MIN_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 60.0


class TooLong(PenstockError):
    """A request can never fit. The message says by how much."""


class NoRoom(TooLong):
    """The model could read the request, but its KV is larger than the tiers."""


class Busy(PenstockError):
    """The queue is full. Retry after `retry_after_seconds`."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Admission:
    """Keeps count of the blocks that started requests may grow to.

    If nothing is offloaded, `num_lower_blocks` is None. Then preempted requests are recomputed, so
    only the scheduler limits how many start.
    """

    def __init__(
        self,
        block_tokens: int,
        num_device_blocks: int,
        num_lower_blocks: int | None,
        max_waiting: int,
        *,
        num_cold_blocks: int = 0,
    ) -> None:
        """Up to `num_cold_blocks` of a running sequence may be in HOST."""
        self._num_cold_blocks = num_cold_blocks
        self._block_tokens = block_tokens
        self._num_device_blocks = num_device_blocks
        self._num_blocks = (
            None if num_lower_blocks is None else num_device_blocks + num_lower_blocks
        )
        self._max_waiting = max_waiting
        self._started: dict[str, int] = {}  # blocks each may grow to
        self._num_reserved = 0
        self._seconds_per_request: float | None = None
        self._last_end: float | None = None

    @property
    def num_reserved_blocks(self) -> int:
        return self._num_reserved

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def num_running_blocks(self, *, never_cold: bool) -> int:
        """The most blocks that one request can have while it runs."""
        return self._num_device_blocks + (0 if never_cold else self._num_cold_blocks)

    def check(
        self, num_prompt: int, max_new: int, num_waiting: int, *, never_cold: bool = False
    ) -> None:
        """Raise TooLong or Busy if the request cannot be queued. Changes nothing."""
        need = self.num_blocks(num_prompt + max_new)
        room = self.num_running_blocks(never_cold=never_cold)
        if need > room:
            has = "the device pool and DRAM hold"
            if room == self._num_device_blocks:
                has = "the device pool holds"
            # OpenAI's wording: clients search for it before they shorten a prompt.
            raise NoRoom(
                f"This model's maximum context length is {room * self._block_tokens} tokens here, "
                f"since {has} {room} blocks of {self._block_tokens}. However, you requested "
                f"{num_prompt + max_new} tokens ({num_prompt} in the prompt, {max_new} in the "
                f"completion), which need {need} blocks. Please reduce the length of the prompt or "
                "max_tokens, or enlarge the pool."
            )
        if num_waiting >= self._max_waiting:
            seconds = self.retry_seconds(num_waiting)
            waiting = f"{counted(num_waiting, 'request')} {'is' if num_waiting == 1 else 'are'}"
            raise Busy(
                f"{waiting} waiting, and the limit (max_waiting) is {self._max_waiting}; "
                f"retry in {seconds:.0f} s.",
                seconds,
            )

    def fits(self, num_tokens: int) -> bool:
        """Whether all tiers together have room for one more request of this size."""
        if self._num_blocks is None or not self._started:
            return True
        return self._num_reserved + self.num_blocks(num_tokens) <= self._num_blocks

    def start(self, request_id: str, num_tokens: int) -> None:
        if request_id not in self._started:  # otherwise it resumes
            self._started[request_id] = self.num_blocks(num_tokens)
            self._num_reserved += self._started[request_id]

    def end(self, request_id: str, now: float) -> None:
        """A request has finished or was aborted, whether it had started or not."""
        blocks = self._started.pop(request_id, None)
        if blocks is None:
            return
        self._num_reserved -= blocks
        if self._last_end is not None:
            seconds = max(0.0, now - self._last_end)
            before = self._seconds_per_request
            self._seconds_per_request = (
                seconds if before is None else before + 0.2 * (seconds - before)
            )
        self._last_end = now

    def retry_seconds(self, num_waiting: int) -> float:
        """When half of the queue should have started, at the recent pace."""
        pace = self._seconds_per_request or _MIN_RETRY_SECONDS
        return min(max(num_waiting / 2 * pace, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
