"""Who else was at work on this machine: the reader of a measurement should know."""

from __future__ import annotations

import os
from pathlib import Path

_WORTH_A_NOTE = 0.1


class Neighbours:
    """Of what the processors did since this was made, the share that was not ours."""

    def __init__(self) -> None:
        self._before = self._read()

    @property
    def share(self) -> float | None:
        """Of all processors' time; None where it cannot be known."""
        now = self._read()
        if now is None or self._before is None:
            return None
        busy, ours, all_ticks = (
            after - before for after, before in zip(now, self._before, strict=True)
        )
        return min(1.0, max(0.0, (busy - ours) / max(1.0, all_ticks)))

    def note(self) -> list[str]:
        share = self.share
        if share is None or share < _WORTH_A_NOTE:
            return []
        return [
            f"Other processes took about {share:.0%} of this machine while the demonstration ran: "
            "its times are longer than they would be, and vary."
        ]

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Ticks: of all processors busy, of this process and its children, of all together."""
        try:
            first = Path("/proc/stat").read_text().splitlines()[0].split()
        except OSError:
            return None
        user, nice, system, idle, waiting, irq, softirq, steal = map(float, first[1:9])
        busy = user + nice + system + irq + softirq + steal
        ours = sum(os.times()[:4]) * os.sysconf("SC_CLK_TCK")
        return busy, ours, busy + idle + waiting
