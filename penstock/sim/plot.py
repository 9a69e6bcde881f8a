"""An HTML page with line charts and tables that needs no network.

The charts are SVG, written here. Colours follow the reader's light or dark setting. Each line also
has its own marker, so that lines can be told apart without colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 560, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 16, 46
_NUM_COLOURS = 8

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2430; --dim: #6b7280;
  --grid: #e3e6eb; --c0: #0b62a4; --c1: #c2410c; --c2: #15803d; --c3: #7e22ce; --c4: #b4235a;
  --c5: #8a6d00; --c6: #0f766e; --c7: #475569; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --ink: #e6e8ec; --dim: #9aa3b2;
  --grid: #2a303a; --c0: #6cb6ff; --c1: #ff9a5c; --c2: #63d68a; --c3: #c99bff; --c4: #ff85a8;
  --c5: #e3c04a; --c6: #4fd1c0; --c7: #aab4c4; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  margin: 2rem auto; max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { color: var(--dim); margin: .3rem 0; max-width: 70ch; }
.row { display: flex; flex-wrap: wrap; gap: 1.5rem; }
figure { margin: 0; flex: 1 1 480px; max-width: 600px; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
figcaption small { color: var(--dim); font-weight: 400; }
svg { width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .dim { fill: var(--dim); }
.grid { stroke: var(--grid); stroke-width: 1; }
.axis { stroke: var(--dim); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.limit { stroke: var(--dim); stroke-dasharray: 6 4; }
.bound { stroke: var(--dim); stroke-dasharray: 1.5 4; stroke-linecap: round; }
.late { stroke-dasharray: 5 3; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .2rem 0 0 3.6rem; padding: 0;
  list-style: none; font-size: .85rem; }
.key svg { width: 34px; height: 12px; vertical-align: middle; margin-right: .3rem; }
table { border-collapse: collapse; margin-top: 1rem; font-size: .9rem; }
th, td { text-align: right; padding: .2rem .8rem; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; }
"""


@dataclass(frozen=True, slots=True)
class PlotLine:
    name: str
    points: tuple[tuple[float, float], ...]  # by size
    kind: str = "policy"  # or "limit", "bound"; "late" for a policy's P99
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x_name: str
    y_name: str
    lines: tuple[PlotLine, ...]
    show_y: Callable[[float], str]
    show_tick: Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Section:
    """The charts of one trace, and a table of their numbers."""

    title: str
    note: str
    charts: tuple[Chart, ...]
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def page(title: str, note: str, sections: Sequence[Section]) -> str:
    """One self-contained HTML document."""
    body = "\n".join(_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(note)}</p>\n{body}\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    charts = "\n".join(map(_figure, section.charts))
    table = ""
    if section.rows:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in section.header)
        rows = "\n".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in section.rows
        )
        table = f"<table>\n<tr>{head}</tr>\n{rows}\n</table>"
    return (
        f"<section>\n<h2>{escape(section.title)}</h2>\n<p>{escape(section.note)}</p>\n"
        f'<div class="row">\n{charts}\n</div>\n{table}\n</section>'
    )


def _figure(chart: Chart) -> str:
    keys = "\n".join(
        f"<li>{_sample(line)}{escape(line.name)}</li>" for line in chart.lines if line.points
    )
    return (
        f"<figure>\n<figcaption>{escape(chart.title)} <small>{escape(chart.y_name)}</small>"
        f"</figcaption>\n{_svg(chart)}\n"
        f'<ul class="key">{keys}</ul>\n</figure>'
    )


def _svg(chart: Chart) -> str:
    xs = sorted({x for line in chart.lines for x, _ in line.points})
    ys = [y for line in chart.lines for _, y in line.points]
    if not xs:
        return "<svg></svg>"
    ticks = nice_ticks(max(ys))
    high = ticks[-1]

    def at_x(x: float) -> float:
        if len(xs) == 1:
            return _LEFT + (_WIDTH - _LEFT - _RIGHT) / 2
        if xs[0] > 0:
            share = (math.log(x) - math.log(xs[0])) / (math.log(xs[-1]) - math.log(xs[0]))
        else:  # size 0 has no logarithm: space the sizes evenly
            share = xs.index(x) / (len(xs) - 1)
        return _LEFT + 12 + share * (_WIDTH - _LEFT - _RIGHT - 24)

    def at_y(y: float) -> float:
        return _HEIGHT - _BOTTOM - min(y / high, 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    label = f"{chart.title}: {chart.y_name} over {chart.x_name}"
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">']
    for tick in ticks:
        y = at_y(tick)
        parts.append(_segment("grid", _LEFT, y, _WIDTH - _RIGHT, y))
        parts.append(_text(_LEFT - 8, y + 4, chart.show_tick(tick), "end"))
    bottom = _HEIGHT - _BOTTOM
    parts.append(_segment("axis", _LEFT, bottom, _WIDTH - _RIGHT, bottom))
    last_end = -math.inf
    for x in xs:
        parts.append(_segment("axis", at_x(x), bottom, at_x(x), bottom + 4))
        text = f"{x:,.4g}" if x < 1000 else f"{x:,.0f}"
        half = 3.5 * len(text)
        if at_x(x) - half > last_end + 4:  # leave out labels that would overlap
            parts.append(_text(at_x(x), bottom + 18, text, "middle"))
            last_end = at_x(x) + half
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, chart.x_name, "middle", "dim"))
    for line in chart.lines:
        parts.append(_line(line, [(at_x(x), at_y(y)) for x, y in line.points], chart))
    parts.append("</svg>")
    return "\n".join(parts)


def _line(line: PlotLine, places: Sequence[tuple[float, float]], chart: Chart) -> str:
    if not places:
        return ""
    drawn = []
    if len(places) > 1 or line.kind in ("limit", "bound"):
        ends = places
        if len(places) == 1:
            (_, y) = places[0]
            ends = [(_LEFT + 12, y), (_WIDTH - _RIGHT - 12, y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in ends)
        drawn.append(f'<polyline class="line {_class(line)}"{_stroke(line)} points="{path}"/>')
    if line.kind in ("policy", "late"):
        for (x, y), (size, value) in zip(places, line.points, strict=True):
            tip = f"{line.name}, {size:,.4g} {chart.x_name}: {chart.show_y(value)}"
            drawn.append(f"<g><title>{escape(tip)}</title>{_mark(line, x, y)}</g>")
    return "\n".join(drawn)


def _sample(line: PlotLine) -> str:
    mark = _mark(line, 17, 6) if line.kind in ("policy", "late") else ""
    stroke = f'<polyline class="line {_class(line)}"{_stroke(line)} points="1,6 33,6"/>'
    return f'<svg viewBox="0 0 34 12" aria-hidden="true">{stroke}{mark}</svg>'


def _class(line: PlotLine) -> str:
    return "" if line.kind == "policy" else line.kind


def _stroke(line: PlotLine) -> str:
    return "" if line.kind in ("limit", "bound") else f' style="stroke: {_colour(line)}"'


def _colour(line: PlotLine) -> str:
    return f"var(--c{line.colour % _NUM_COLOURS})"


def _mark(line: PlotLine, x: float, y: float) -> str:
    """A marker. Its shape depends on the colour; it is hollow for a policy's P99."""
    fill = "var(--paper)" if line.kind == "late" else _colour(line)
    style = f'style="fill: {fill}; stroke: {_colour(line)}; stroke-width: 1.5"'
    shape = line.colour % 4
    if shape == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" {style}/>'
    if shape == 1:
        return f'<rect x="{x - 3.3:.1f}" y="{y - 3.3:.1f}" width="6.6" height="6.6" {style}/>'
    corners = [(0, -4.6), (4.2, 3.0), (-4.2, 3.0)]
    if shape == 3:
        corners = [(0, -4.8), (4.8, 0), (0, 4.8), (-4.8, 0)]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" {style}/>'


def _segment(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'


def nice_ticks(highest: float, num_ticks: int = 5) -> list[float]:
    """Ticks from 0 to `highest` or just above, in steps of 1, 2 or 5 times a power of ten."""
    if not highest > 0:
        return [0.0, 1.0]
    raw = highest / num_ticks
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    count = math.ceil(highest / step - 1e-9)
    return [step * number for number in range(count + 1)]
