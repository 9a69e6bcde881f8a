"""One piece of advice, and the numbers that several rules look at. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from penstock.watch.samples import Samples

MIN_LOOKUPS = 20  # below that, a share says nothing
MANY = 0.01  # of what should have been none


class Urgency(StrEnum):
    ACT = "act"
    CONSIDER = "consider"
    WELL = "well"


@dataclass(frozen=True, slots=True)
class Advice:
    urgency: Urgency
    topic: str
    finding: str
    change: str = ""
    numbers: tuple[tuple[str, float], ...] = ()


Rule = Callable[[Samples], Iterator[Advice]]


def block_bytes(seen: Samples) -> float | None:
    """The size of a block, as blocks that moved have shown it."""
    blocks = seen.total("penstock_blocks_total")
    return seen.total("penstock_bytes_total") / blocks if blocks else None


def hit_rate(seen: Samples) -> float | None:
    asked = seen.total("penstock_lookup_blocks_total")
    return seen.total("penstock_hit_blocks_total") / asked if asked else None
