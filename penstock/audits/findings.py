"""What an audit compares, and what it finds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.audits.compare import Difference, compare_blocks, differing_stretches
from penstock.audits.layout import BlockLayout
from penstock.audits.tolerance import Tolerance
from penstock.types import BlockKey, Tier


class AuditCheck(StrEnum):
    COMPUTED = "computed"  # stored KV beside the same KV computed again
    READ_BACK = "read_back"  # KV that was loaded, read back from the device


@dataclass(frozen=True, slots=True)
class AuditSubject:
    """What is audited, for the report."""

    model: str
    namespace: str  # digits
    block_tokens: int


@dataclass(frozen=True, slots=True)
class BlockPair:
    """A block twice: as it should be, and as it is stored or was loaded."""

    key: BlockKey
    index: int  # position in the prompt, in blocks
    group: int  # KV cache group
    source: Tier | None  # the tier it was, or would have been, loaded from
    stored: memoryview
    fresh: memoryview  # computed, or read back from the device


@dataclass(frozen=True, slots=True)
class Finding:
    """One block that differs in one layer by more than the tolerance."""

    check: AuditCheck
    key: BlockKey
    index: int
    group: int
    source: Tier | None
    difference: Difference
    limit: float

    def describe(self) -> dict[str, object]:
        """For JSON."""
        value = self.difference.value
        return {
            "check": self.check.value,
            "layer": self.difference.layer,
            "part": self.difference.part or None,
            "head": self.difference.head,
            "group": self.group,
            "block": self.index,
            "key": self.key.hex(),
            "difference": value if math.isfinite(value) else str(value),
            "tolerance": self.limit,
            "tier": None if self.source is None else self.source.label,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of one audit."""

    num_blocks: int
    findings: list[Finding]
    clean: list[tuple[int, list[Difference]]]  # group and differences of blocks that passed


def compare_computed(
    pairs: Sequence[BlockPair], layouts: Sequence[BlockLayout], tolerances: Sequence[Tolerance]
) -> Comparison:
    """Compare stored blocks with computed ones, within the tolerance of each group."""
    findings: list[Finding] = []
    clean: list[tuple[int, list[Difference]]] = []
    for pair in pairs:
        differences = compare_blocks(layouts[pair.group], pair.fresh, pair.stored)
        beyond = tolerances[pair.group].exceeded(differences)
        findings += [_finding(AuditCheck.COMPUTED, pair, each, limit) for each, limit in beyond]
        if not beyond:
            clean.append((pair.group, differences))
    return Comparison(len(pairs), findings, clean)


def compare_read_back(pairs: Sequence[BlockPair], layouts: Sequence[BlockLayout]) -> Comparison:
    """Compare blocks read back from the device with the stored ones, bit for bit."""
    findings = [
        _finding(AuditCheck.READ_BACK, pair, difference, 0.0)
        for pair in pairs
        for difference in differing_stretches(layouts[pair.group], pair.fresh, pair.stored)
    ]
    return Comparison(len(pairs), findings, [])


def _finding(check: AuditCheck, pair: BlockPair, difference: Difference, limit: float) -> Finding:
    return Finding(check, pair.key, pair.index, pair.group, pair.source, difference, limit)
