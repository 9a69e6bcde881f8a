"""Launching a step before the tokens of the one before it are read.

    step 1 is computed      | step 2 is computed      | step 3 is computed
          schedule, launch 2 | read 1, launch 3, text | read 2, launch 4, text

On a GPU a step is only queued. If the next one is queued behind it, the GPU never waits for the
CPU. The tokens that step 1 chooses stay on the device, where step 2 reads them; the CPU learns them
while step 2 is computed, and settles ends, stop strings and text then. Until then a request's last
token is a number below zero (`Request.expect`): it has no key, so no block that contains it is
named, saved or offered.

At most one step is unread when the next is launched. If a request ends with a token of step 1, its
part of step 2 is thrown away: the books never learn of it. Its blocks are released meanwhile.
Whatever is written to them next, by a later step or by a load, waits on the device until step 2 has
ended (see `transfer.cuda`). DRAM has no such order, so a step that reads or brings blocks from
there is always read before anything else happens; so is one whose tokens the CPU needs to choose
the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.engine.sampler import Sampled
from penstock.engine.scheduler import Chunk

if TYPE_CHECKING:
    from penstock.engine.request import Request

_Owner = TypeVar("_Owner")


@dataclass(frozen=True, slots=True)
class LaunchedStep(Generic[_Owner]):
    """A step that is queued on the device, or has been computed there."""

    chunks: Sequence[Chunk]
    owners: Sequence[_Owner]  # of its tokens
    read: Callable[[], list[Sampled]]  # waits for them
    end: Any  # of the step: see `Runner.wait`
    launched: float  # when
    is_left: bool  # the next step may be launched before this one is read
    looks: bool = False  # it also looked at tokens, which takes time (see `anywhere.looks`)
    num_brought: int = 0  # blocks that it brought from DRAM, which takes time (see `bringing`)


class Ahead(Generic[_Owner]):
    """The step whose tokens are not read yet, if there is one."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.unread: LaunchedStep[_Owner] | None = None
        self.num_ahead = 0  # steps launched before the one before them was read
        self._last_end = 0.0

    def may_leave(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the next step may be launched before the tokens of this one are read."""
        return self.is_on and all(map(_permits, chunks))

    def may_follow(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a step of these chunks may be launched now."""
        return self.unread is None or not any(map(_reads_host, chunks))

    def launched(self, step: LaunchedStep[_Owner], requests: Sequence[Request]) -> None:
        """`step` is queued, perhaps behind an unread one. `requests`: of its tokens, in order."""
        self.num_ahead += self.unread is not None
        if step.is_left:
            for row, request in enumerate(requests):
                request.expect(row)

    def ended(self, step: LaunchedStep[_Owner], now: float) -> float:
        """How long a step took that has ended: it may have begun only when another ended."""
        began = max(step.launched, self._last_end)
        self._last_end = now
        return now - began


def _permits(chunk: Chunk) -> bool:
    return not (_reads_host(chunk) or (chunk.samples and chunk.request.needs_last_token))


def _reads_host(chunk: Chunk) -> bool:
    table = chunk.request.table
    return bool(table.num_cold or table.arriving_pins)
