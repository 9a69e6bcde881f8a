"""How busy other processes kept this machine, as a note for readers of the measurements."""

from __future__ import annotations

import os
from pathlib import Path

_WORTH_A_NOTE = 0.1


class Neighbours:
    """Measures the CPU time of other processes since this object was made."""

    def __init__(self) -> None:
        self._before = self._read()

    @property
    def share(self) -> float | None:
        """Their share of all CPU time; None if it cannot be measured."""
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
            f"Other processes used about {share:.0%} of this machine during the demo, so its times "
            "are longer than on an idle machine, and vary."
        ]

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Clock ticks: busy time of all CPUs, time of this process and its children, total time."""
        try:
            first = Path("/proc/stat").read_text().splitlines()[0].split()
        except OSError:
            return None
        user, nice, system, idle, waiting, irq, softirq, steal = map(float, first[1:9])
        busy = user + nice + system + irq + softirq + steal
        ours = sum(os.times()[:4]) * os.sysconf("SC_CLK_TCK")
        return busy, ours, busy + idle + waiting
