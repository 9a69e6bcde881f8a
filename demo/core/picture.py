"""The demo's page with one chart: how full each tier was, before and after the kill."""

from __future__ import annotations

from pathlib import Path

from worker import SPEC

WIDTH, LEFT, RIGHT, TOP = 960, 120, 20, 40
PANEL, SPACE = 120, 34  # height of one tier's panel, and room below it
COLOURS = {"host": "#2f81c4", "disk": "#d9822b"}
NAMES = {"host": "DRAM", "disk": "disk"}
GAP_SECONDS = 0.25  # drawn between the two processes, however long the restart took
HEIGHT = TOP + len(COLOURS) * (PANEL + SPACE) + 26

Facts = dict[str, object]

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Penstock: demo of the core</title>
<style>
 body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto;
        padding: 0 1rem; color: #1c2330; background: #fff }}
 svg {{ width: 100%; height: auto }}
 @media (prefers-color-scheme: dark) {{ body {{ color: #e6e9ef; background: #14181f }} }}
</style>
<h1>Killed, restarted, and every block is correct</h1>
<p>{caption}</p>
{drawing}
</html>
"""


def report(first: list[Facts], second: list[Facts], out: Path) -> Path:
    loaded = [facts for facts in second if facts["what"] == "loaded"]
    num_right = sum(int(facts["right"]) for facts in loaded)
    num_loaded = sum(int(facts["blocks"]) for facts in loaded)
    caption = (
        "A process saves KV blocks: DRAM fills up, and everything is also written to disk. It is "
        "killed with <code>kill -9</code> in the middle of a write. A second process opens the "
        f"same directory, reads its index and loads the blocks: {num_right:,} of {num_loaded:,} "
        "are correct, bit for bit. Each triangle is one conversation loaded from that tier."
    )
    drawing = _Drawing(first, second).svg()
    (out / "tiers.svg").write_text(drawing)
    page = out / "report.html"
    page.write_text(PAGE.format(caption=caption, drawing=drawing))
    return page


class _Drawing:
    def __init__(self, first: list[Facts], second: list[Facts]) -> None:
        self.begin = float(first[0]["time"])
        self.killed = next(float(f["time"]) for f in first if f["what"] == "killed") - self.begin
        self.restarted = self.killed + GAP_SECONDS
        self.second_begin = float(second[0]["time"]) - self.restarted
        self.end = float(second[-1]["time"]) - self.second_begin
        self.first, self.second = first, second

    def svg(self) -> str:
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="system-ui, sans-serif" font-size="14" fill="currentColor" role="img" '
            'aria-label="How full DRAM and disk were, before and after the kill">'
        ]
        for index, tier in enumerate(COLOURS):
            parts += self.panel(tier, TOP + index * (PANEL + SPACE))
        x, width = self.x(self.killed), self.x(self.restarted) - self.x(self.killed)
        bottom = HEIGHT - 26 - SPACE
        parts.append(
            f'<rect x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{bottom - TOP}" '
            'fill="#c0392b" opacity=".15"/>'
            f'<text x="{x + width / 2:.1f}" y="{TOP - 12}" text-anchor="middle" '
            'fill="#c0392b" font-weight="600">kill -9</text>'
            f'<text x="{LEFT}" y="{HEIGHT - 10}">first process: saves</text>'
            f'<text x="{x + width:.1f}" y="{HEIGHT - 10}">second process: reads the index, '
            "loads everything and compares it</text></svg>"
        )
        return "\n".join(parts)

    def panel(self, tier: str, top: float) -> list[str]:
        floor, colour = top + PANEL, COLOURS[tier]
        slots = next(int(f["slots"]) for f in self.first if f.get("tier") == tier)
        size = slots * SPEC.block_bytes / 1e6
        parts = [
            f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{PANEL}" '
            'fill="none" stroke="currentColor" opacity=".25"/>'
            f'<text x="{LEFT - 12}" y="{top + 16}" text-anchor="end" font-weight="600">'
            f"{NAMES[tier]}</text>"
            f'<text x="{LEFT - 12}" y="{top + 36}" text-anchor="end" opacity=".7">'
            f"{size:,.0f} MB</text>"
        ]
        for life, origin, end in (
            (self.first, self.begin, self.killed),
            (self.second, self.second_begin, self.end),
        ):
            steps = [
                (self.x(float(f["time"]) - origin), floor - PANEL * int(f["used"]) / slots)
                for f in life
                if f["what"] == "usage" and f["tier"] == tier
            ]
            path = f"M{steps[0][0]:.1f},{floor}"
            for x, y in steps:  # a step chart: the level is constant between two events
                path += f" H{x:.1f} V{y:.1f}"
            path += f" H{self.x(end):.1f} V{floor} Z"
            parts.append(f'<path d="{path}" fill="{colour}" fill-opacity=".5" stroke="{colour}"/>')
        for facts in self.second:
            if facts["what"] == "loaded" and facts["source"] == tier:
                x = self.x(float(facts["time"]) - self.second_begin)
                parts.append(
                    f'<path d="M{x:.1f},{floor + 4} l6,11 h-12 Z" fill="{colour}">'
                    f"<title>{facts['blocks']} blocks in {facts['seconds']:.3f} s</title></path>"
                )
        return parts

    def x(self, seconds: float) -> float:
        return LEFT + seconds / self.end * (WIDTH - LEFT - RIGHT)
