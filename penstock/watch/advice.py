"""A piece of advice, and the numbers that several rules use. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from penstock.watch.samples import Samples

MIN_LOOKUPS = 20  # with fewer, a share says nothing
MANY = 0.01  # a share of what should never happen


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


def block_bytes(seen: Samples, tier: str = "host") -> float | None:
    """The size of a block in a tier: as it reports, or from what was transferred."""
    # Several engines of one vLLM report one value each, and `total` adds them up.
    num_engines = seen.total("penstock_tier_codec_info", tier="host")
    if num_engines and (size := seen.total("penstock_block_bytes", tier=tier)):
        return size / num_engines
    blocks = seen.total("penstock_blocks_total")
    return seen.total("penstock_bytes_total") / blocks if blocks else None


def tokens_of_steps(seen: Samples) -> float:
    """Tokens that were generated, counted at every step, like the KV that steps read.

    The output tokens of requests are counted only when a request ends.
    """
    return seen.total("penstock_step_sequences_total") or seen.total("penstock_output_tokens_total")


def reused_share(seen: Samples) -> float | None:
    """The share of prompt tokens that were not computed: found on the device, or loaded."""
    tokens = seen.by("penstock_prompt_tokens_total", "source")
    total = sum(tokens.values())
    return 1 - tokens.get("computed", 0.0) / total if total else None


def hit_rate(seen: Samples) -> float | None:
    """The share of looked-up blocks that were found. Blocks on the device are not looked up."""
    asked = seen.total("penstock_lookup_blocks_total")
    return seen.total("penstock_hit_blocks_total") / asked if asked else None
