"""The charts of a sweep: hit rate and time to first token over the size that was swept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.sim.plot import Chart, PlotLine, Section
from penstock.sim.settings import Sizes
from penstock.units import counted, format_seconds

_TIERS = ("host", "disk", "device")


def sections(
    traces: Sequence[dict[str, Any]],
    points: Sequence[dict[str, Any]],
    sizes: Sequence[Sizes],
    unit: str,
) -> list[Section]:
    """One section for each trace. `sizes` has the sizes of each point, in `unit`."""
    swept = _swept(sizes)
    found = []
    for number, trace in enumerate(traces):
        pairs = [(p, s) for p, s in zip(points, sizes, strict=True) if p["trace"] == number]
        timed = any("first_token_seconds" in point for point, _ in pairs)
        charts = [_hit_chart(pairs, swept, unit)]
        if timed:
            charts.append(_time_chart(pairs, swept, unit))
        header, rows = _table(pairs, unit, timed=timed)
        note = (
            f"{counted(trace['num_requests'], 'request')}, "
            f"{counted(trace['num_blocks'], 'block')} of "
            f"{counted(trace['block_tokens'], 'token')} in their prompts."
        )
        found.append(Section(trace["name"], note, tuple(charts), header, rows))
    return found


_Pairs = Sequence[tuple[dict[str, Any], Sizes]]


def _hit_chart(pairs: _Pairs, swept: str, unit: str) -> Chart:
    lines = [
        PlotLine(name, _points(of, swept, lambda p: p["hit_rate"]), colour=colour)
        for colour, (name, of) in enumerate(_by_name(pairs, swept).items())
    ]
    for name, field, kind in (
        ("offline optimum", "optimum_hit_rate", "limit"),
        ("unbounded", "unbounded_hit_rate", "bound"),
    ):
        best = {size[swept]: point[field] for point, size in pairs if field in point}
        lines.append(PlotLine(name, tuple(sorted(best.items())), kind))
    return Chart(
        "Hit rate",
        f"{swept}, {unit}",
        "share of the prompts' blocks",
        tuple(lines),
        _show_share,
        _show_share,
    )


def _time_chart(pairs: _Pairs, swept: str, unit: str) -> Chart:
    lines = []
    for colour, (name, of) in enumerate(_by_name(pairs, swept).items()):
        for percentile, kind in (("p50", "policy"), ("p99", "late")):
            values = _points(of, swept, lambda p, at=percentile: p["first_token_seconds"][at])
            lines.append(PlotLine(f"{name}, {percentile.upper()}", values, kind, colour))
    return Chart(
        "Time to first token",
        f"{swept}, {unit}",
        "P50 filled, P99 hollow",
        tuple(lines),
        format_seconds,
        _show_seconds,
    )


def _points(pairs: _Pairs, swept: str, value: Any) -> tuple[tuple[float, float], ...]:
    found = [(size[swept], value(point)) for point, size in pairs]
    return tuple(sorted((size, each) for size, each in found if each is not None))


def _by_name(pairs: _Pairs, swept: str) -> dict[str, list[tuple[dict[str, Any], Sizes]]]:
    """One line for each policy, and for each combination of other sizes that were swept too."""
    others = [
        tier for tier in _TIERS if tier != swept and len({size[tier] for _, size in pairs}) > 1
    ]
    lines: dict[str, list[tuple[dict[str, Any], Sizes]]] = {}
    for point, size in pairs:
        more = [f"{tier} {size[tier]:,.4g}" for tier in others]
        lines.setdefault(", ".join([point["policy"], *more]), []).append((point, size))
    return lines


def _swept(sizes: Iterable[Sizes]) -> str:
    """The tier whose size is the x axis: the first that has several sizes."""
    counts = {tier: len({size[tier] for size in sizes}) for tier in _TIERS}
    return max(_TIERS, key=lambda tier: (counts[tier] > 1, -_TIERS.index(tier)))


def _table(
    pairs: _Pairs, unit: str, *, timed: bool
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    header = ["policy", *(f"{tier}, {unit}" for tier in ("device", "host", "disk")), "hit rate"]
    limits = {"optimum": "optimum_hit_rate", "unbounded": "unbounded_hit_rate"}
    limits = {name: field for name, field in limits.items() if all(field in p for p, _ in pairs)}
    header += limits
    if timed:
        header += ["TTFT P50", "P90", "P99", "rejected"]
    rows = []
    for point, size in pairs:
        row = [point["policy"], *(f"{size[tier]:,.4g}" for tier in ("device", "host", "disk"))]
        for field in ("hit_rate", *limits.values()):
            row.append(_show_share(point[field]))
        if timed:
            times = point["first_token_seconds"].values()
            row += ["–" if time is None else format_seconds(time) for time in times]
            row.append(f"{sum(point['rejections'].values()):,}")
        rows.append(tuple(row))
    return tuple(header), tuple(rows)


def _show_seconds(seconds: float) -> str:
    if seconds == 0:
        return "0"
    return f"{seconds:,.4g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _show_share(share: float) -> str:
    return f"{100 * share:.3g}%"
