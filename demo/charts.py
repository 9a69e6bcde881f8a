"""Draw the charts, one per finding, each in a light and a dark version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from first_token import NAMES, FirstToken
from restart import Restart
from sessions import Run, Shape

mpl.use("Agg")
from matplotlib import pyplot as plt

WIDTH_INCHES = 9.6


@dataclass(frozen=True, slots=True)
class Theme:
    suffix: str
    paper: str
    ink: str
    faint: str
    computed: str
    host: str
    disk: str

    def of(self, source: str) -> str:
        return {"computed": self.computed, "host": self.host, "disk": self.disk}[source]


THEMES = (
    Theme("", "#ffffff", "#1c2330", "#6b7280", "#c2703d", "#2f6fb5", "#2a8f7f"),
    Theme("-dark", "#14181f", "#e6e9ef", "#9aa3b2", "#d98a57", "#5b9be0", "#45b8a4"),
)


def draw_first_token(rows: Sequence[FirstToken], out: Path) -> str:
    """Draw one panel for each prompt length, with three bars each."""
    sizes = sorted({row.num_tokens for row in rows})
    longest = {row.source: row for row in rows if row.num_tokens == sizes[-1]}
    title = (
        f"At {sizes[-1]:,} tokens the first token is "
        f"{times(longest['host'].times_faster)} faster from DRAM and "
        f"{times(longest['disk'].times_faster)} faster from disk"
    )
    for theme in THEMES:
        with _figure(theme, 2.9, title, f"first_token{theme.suffix}.png", out) as figure:
            panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
            figure.subplots_adjust(left=0.155, right=0.985, top=0.7, bottom=0.12, wspace=0.16)
            for panel, size in zip(panels, sizes, strict=True):
                here = [row for row in rows if row.num_tokens == size]
                _bars(
                    panel,
                    theme,
                    [NAMES[row.source] for row in here],
                    [row.seconds for row in here],
                    [theme.of(row.source) for row in here],
                    [_label(row) for row in here],
                )
                panel.set_title(f"{size:,} tokens", loc="left", fontsize=11, color=theme.ink)
            _note(
                figure,
                theme,
                "Seconds from the request's arrival to its first token. Each panel has its own "
                "linear scale, from 0.",
            )
    return title


def draw_sessions(shape: Shape, off: Run, on: Run, out: Path) -> str:
    """Draw the answers over time and the tokens that were recomputed."""
    fewer = 1 - on.num_recomputed / max(1, off.num_recomputed)
    title = (
        f"{shape.num_sessions} sessions in a pool for {shape.num_held}: {on.seconds:.0f} s with "
        f"offloading, {off.seconds:.0f} s without; {fewer:.0%} fewer tokens recomputed"
    )
    note = (
        f"Preemptions: {off.num_preemptions} with offloading off, where the blocks are recomputed; "
        f"{on.num_preemptions} with it on, where they are loaded."
    )
    for theme in THEMES:
        with _figure(theme, 3.9, title, f"sessions{theme.suffix}.png", out) as figure:
            over_time, totals = figure.subplots(1, 2, width_ratios=(5, 3))
            figure.subplots_adjust(left=0.075, right=0.985, top=0.78, bottom=0.2, wspace=0.42)
            _over_time(over_time, theme, shape, off, on)
            totals.set_title("tokens recomputed", loc="left", fontsize=11, color=theme.ink)
            _bars(
                totals,
                theme,
                ["offloading off", "offloading on"],
                [off.num_recomputed, on.num_recomputed],
                [theme.computed, theme.host],
                [f"{run.num_recomputed:,}" for run in (off, on)],
                height=0.45,
            )
            _note(figure, theme, note)
    return title


def draw_restart(restart: Restart, out: Path) -> str:
    resumed = restart.resumed
    title = (
        f"After kill -9 and a restart {resumed.num_cached:,} of {resumed.num_prompt:,} tokens come "
        f"from disk: {resumed.first_token_seconds:.2f} s, not {restart.computed_seconds:.2f} s"
    )
    names = ["turn 1, before the kill", "turn 2, after the restart", "turn 2, without the disk"]
    seconds = [
        restart.first.first_token_seconds,
        resumed.first_token_seconds,
        restart.computed_seconds,
    ]
    labels = [
        f"{seconds[0]:.2f} s  computed",
        f"{seconds[1]:.2f} s  loaded, {times(seconds[2] / seconds[1])} faster",
        f"{seconds[2]:.2f} s  computed",
    ]
    for theme in THEMES:
        with _figure(theme, 2.5, title, f"restart{theme.suffix}.png", out) as figure:
            panel = figure.subplots()
            figure.subplots_adjust(left=0.215, right=0.985, top=0.8, bottom=0.14)
            colours = [theme.computed, theme.disk, theme.computed]
            _bars(panel, theme, names, seconds, colours, labels, room=1.3)
            _note(figure, theme, "Seconds from the request to the first word of the answer.")
    return title


def times(ratio: float) -> str:
    return f"{ratio:.0f}×" if ratio >= 9.5 else f"{ratio:.1f}×"


def _label(row: FirstToken) -> str:
    seconds = f"{row.seconds:.1f} s" if row.seconds >= 10 else f"{row.seconds:.2f} s"
    return seconds if row.source == "computed" else f"{seconds}  ({times(row.times_faster)})"


def _over_time(panel: Any, theme: Theme, shape: Shape, off: Run, on: Run) -> None:
    total = shape.num_sessions * shape.num_turns
    for run, colour, name in ((off, theme.computed, "off"), (on, theme.host, "on")):
        panel.step(
            [0.0, *run.finished], range(total + 1), where="post", color=colour, linewidth=2.2
        )
        panel.plot(run.seconds, total, "o", color=colour, markersize=6)
        panel.annotate(
            f"{name}: {run.seconds:.0f} s",
            (run.seconds, total),
            xytext=(0, 8),
            textcoords="offset points",
            ha="right",
            color=colour,
            fontweight="bold",
        )
    panel.set_xlim(0, off.seconds * 1.02)
    panel.set_ylim(0, total * 1.14)
    panel.set_yticks([shape.num_sessions * turn for turn in range(shape.num_turns + 1)])
    panel.grid(axis="y", color=theme.faint, alpha=0.25)
    panel.set_axisbelow(True)
    panel.set_xlabel("seconds", color=theme.faint, loc="right")
    panel.set_title(
        "complete answers (one grid line per turn)", loc="left", fontsize=11, color=theme.ink
    )
    panel.tick_params(length=0, colors=theme.faint)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color(theme.faint)


def _bars(
    panel: Any,
    theme: Theme,
    names: Sequence[str],
    values: Sequence[float],
    colours: Sequence[str],
    labels: Sequence[str],
    *,
    height: float = 0.62,
    room: float = 1.35,
) -> None:
    """Draw horizontal bars from top to bottom, each followed by its number."""
    places = range(len(names))
    panel.barh(places, values, height, color=colours)
    panel.set_yticks(places, names, fontsize=10.5, color=theme.ink)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlim(0, max(values) * room)
    for place, value, label in zip(places, values, labels, strict=True):
        panel.annotate(
            label,
            (value, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=10.5,
            color=theme.ink,
        )
    panel.set_xticks([])
    panel.tick_params(length=0)
    for side in ("top", "right", "bottom"):
        panel.spines[side].set_visible(False)
    panel.spines["left"].set_color(theme.faint)


@contextmanager
def _figure(theme: Theme, height: float, title: str, name: str, out: Path) -> Iterator[Any]:
    figure = plt.figure(figsize=(WIDTH_INCHES, height), facecolor=theme.paper)
    with mpl.rc_context({"text.color": theme.ink, "axes.facecolor": theme.paper}):
        figure.text(0.012, 0.97, title, fontsize=12, fontweight="bold", va="top", color=theme.ink)
        yield figure
        figure.savefig(out / name, dpi=160)
    plt.close(figure)


def _note(figure: Any, theme: Theme, text: str) -> None:
    figure.text(0.012, 0.03, text, fontsize=9, color=theme.faint, va="bottom")
