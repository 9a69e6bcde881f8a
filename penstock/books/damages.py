"""Log lines about damaged blocks: the first at once, then at most one a minute for each tier."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types import Tier

QUIET_SECONDS = 60.0


@dataclass(slots=True)
class _Tally:
    quiet_until: float
    num_blocks: int = 0  # since the last line
    error: str = ""  # the latest


class Damages:
    """Counts damaged blocks and returns the lines to log. Pure: time is an argument."""

    def __init__(self) -> None:
        self._tallies: dict[Tier, _Tally] = {}

    def note(self, tier: Tier, num_blocks: int, error: str, now: float) -> list[str]:
        """Count damaged blocks; returns the lines to log now."""
        tally = self._tallies.get(tier)
        if tally is None:
            self._tallies[tier] = _Tally(now + QUIET_SECONDS)
            return [_line(tier, num_blocks, error)]
        tally.num_blocks += num_blocks
        tally.error = error or tally.error
        return self.tick(now)

    def tick(self, now: float) -> list[str]:
        """Returns lines about blocks counted since the last line, if a minute has passed."""
        lines = []
        for tier, tally in list(self._tallies.items()):
            if now < tally.quiet_until:
                continue
            if tally.num_blocks == 0:
                del self._tallies[tier]
                continue
            lines.append(_line(tier, tally.num_blocks, tally.error))
            self._tallies[tier] = _Tally(now + QUIET_SECONDS)
        return lines

    def rest(self) -> list[str]:
        """Returns the remaining lines, before closing."""
        left = [(tier, t) for tier, t in self._tallies.items() if t.num_blocks]
        self._tallies.clear()
        return [_line(tier, tally.num_blocks, tally.error) for tier, tally in left]


def _line(tier: Tier, num_blocks: int, error: str) -> str:
    what = "1 block was" if num_blocks == 1 else f"{num_blocks} blocks were"
    why = f": {error}" if error else ""
    return f"{tier.name}: {what} found damaged and will be computed again{why}"
