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


def tokens_of_steps(seen: Samples) -> float:
    """Tokens that steps gave, counted when what they read is: at every step.

    The tokens of answers are counted only when a request ends.
    """
    return seen.total("penstock_step_sequences_total") or seen.total("penstock_output_tokens_total")


def reused_share(seen: Samples) -> float | None:
    """Of prompt tokens, those that were not computed: found on the device, or loaded."""
    tokens = seen.by("penstock_prompt_tokens_total", "source")
    total = sum(tokens.values())
    return 1 - tokens.get("computed", 0.0) / total if total else None


def hit_rate(seen: Samples) -> float | None:
    """Of the blocks looked up below the device. What lay on the device was not looked up."""
    asked = seen.total("penstock_lookup_blocks_total")
    return seen.total("penstock_hit_blocks_total") / asked if asked else None
