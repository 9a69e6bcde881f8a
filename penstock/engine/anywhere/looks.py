"""A look at tokens that were placed, to choose those that are mended (see `blending`). Pure.

A look may take several steps, because every step has a budget. What was seen is kept until all
tokens were looked at, so that the choice does not depend on the number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from penstock.engine.anywhere.segmented import Segmented

_Request = TypeVar("_Request", bound=Segmented)


@dataclass(slots=True, eq=False)
class Look(Generic[_Request]):
    """Choose the tokens to mend in these parts of a prompt: see `Request.mended`."""

    request: _Request
    reused: list[range]
    start: int  # the first position that is looked at
    position: int  # the next one
    changes: list[Any] = field(default_factory=list)  # of the keys, from `start` on

    @property
    def stop(self) -> int:
        return self.reused[-1].stop

    @property
    def num_left(self) -> int:
        return self.stop - self.position

    def advance(self, num_tokens: int) -> LookPart[_Request]:
        start, self.position = self.position, self.position + num_tokens
        return LookPart(self, range(start, self.position), not self.num_left)


class LookPart(NamedTuple, Generic[_Request]):
    """What a step does for a look."""

    look: Look[_Request]
    positions: range
    is_last: bool
