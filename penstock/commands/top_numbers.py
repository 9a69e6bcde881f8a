"""The numbers in the middle of `penstock top`: reuse, speed and errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from penstock.commands.top_lines import Cell, beside, fields, plain, table
from penstock.units import format_bytes, format_rate, format_seconds
from penstock.watch.view import Spread, View

WIDE = 130  # from this width on, transfers have their own column
_FLOWS_WIDTH = 46
_PHASES = ("running", "loading", "waiting")
# Not shown as lost: the first three are counted by tier, the last is intended.
_LOST_OTHERWISE = ("corrupt", "dropped", "unfit", "cancelled")


def numbers(view: View, width: int) -> list[Text]:
    is_wide = width >= WIDE and bool(view.flows)
    room = width - _FLOWS_WIDTH if is_wide else width
    lines = [
        *fields("first token", _first_tokens(view), room),
        *fields("reused", list(_reuse(view)), room),
        *fields("speed", list(_speed(view)), room),
        *fields("sequences", list(_sequences(view)), room),
        *fields("KV in use", list(_residency(view)), room),
    ]
    return beside(lines, _flows(view), room) if is_wide else lines


def _first_tokens(view: View) -> list[str | Text]:
    spreads = view.first_token_seconds
    order = sorted(spreads, key=lambda kind: (kind != "loaded", kind))
    shown: list[str | Text] = [
        f"{plain(kind, 20)} {_spread(spreads[kind])}" for kind in order if spreads[kind].count
    ]
    loaded, computed = (
        spreads[kind].p50 if kind in spreads else None for kind in ("loaded", "computed")
    )
    if loaded and computed:
        shown.append(Text(f"{computed / loaded:.1f}x as fast", "bold"))
    return shown or ["–"]


def _reuse(view: View) -> Iterator[str]:
    """Share, counts and time, all for the same tokens and the same span."""
    start = view.reused_share_since_start, view.prompt_tokens_since_start, view.seconds_saved
    yield _reused(*start) if view.is_since_start else _reused(view.reused_share, view.prompt_tokens)
    if view.hit_rate is not None:
        yield f"hits below {view.hit_rate:.0%}"
    if view.is_since_start:
        return
    if view.reused_share_since_start is not None:
        yield f"in all {_reused(*start)}"


def _reused(share: float | None, tokens: dict[str, float], seconds_saved: float = 0.0) -> str:
    """The time is what loading saved; it is not estimated for blocks on the device."""
    if share is None:
        return "–"
    device, loaded = tokens.get("device", 0.0), tokens.get("loaded", 0.0)
    time = f", saving {format_seconds(seconds_saved)}" if seconds_saved and loaded else ""
    every = sum(tokens.values())
    return f"{share:.0%} of {every:,.0f}: {device:,.0f} on device, {loaded:,.0f} loaded{time}"


def _speed(view: View) -> Iterator[str]:
    yield "–" if view.tokens_per_second is None else f"{view.tokens_per_second:,.0f} tokens/s"
    if view.step_seconds.count:
        yield f"step {_spread(view.step_seconds)}"
    if view.token_seconds.count:
        yield f"token {_spread(view.token_seconds)}"


def _sequences(view: View) -> Iterator[str]:
    known = [*_PHASES, *(phase for phase in view.sequences if phase not in _PHASES)]
    counts = [(phase, view.sequences[phase]) for phase in known if phase in view.sequences]
    if counts:
        yield ", ".join(f"{num:,.0f} {plain(phase, 20)}" for phase, num in counts)
    lately = "" if view.is_since_start else f" ({view.recent_preemptions:,.0f} lately)"
    yield f"{view.preemptions:,.0f} preempted{lately if view.preemptions else ''}"


def _residency(view: View) -> Iterator[str]:
    if "all" in view.resident_share:
        lowest = view.resident_share.get("lowest", view.resident_share["all"])
        yield f"{view.resident_share['all']:.0%} resident, least {lowest:.0%}"
    if view.cold_reads_per_token is not None:
        yield f"{view.cold_reads_per_token:,.1f} cold reads/token"
    if view.retained_blocks:
        yield f"{view.retained_blocks:,.0f} kept by hints"
    if view.lossy_requests:
        yield f"{view.lossy_requests:,.0f} requests used lossy KV"


def errors(view: View, width: int) -> list[Text]:
    groups = {
        "corrupt": view.corrupt_blocks,
        "dropped": view.dropped_blocks,
        "do not fit their codec": {tier.name: tier.unfit_blocks for tier in view.tiers},
        "lost loads": _others(view.lost_loads),
        "lost saves": _others(view.lost_saves),
        "refused": view.refused,
    }
    shown = [
        f"{name}: " + ", ".join(f"{plain(kind, 20)} {num:,.0f}" for kind, num in found.items())
        for name, counts in groups.items()
        if (found := {kind: num for kind, num in counts.items() if num})
    ]
    return fields("errors", shown, width, "bold red")


def _others(lost: dict[str, float]) -> dict[str, float]:
    return {what: num for what, num in lost.items() if what not in _LOST_OTHERWISE}


def _flows(view: View) -> list[Text]:
    rows: list[Sequence[Cell]] = [[Text(name, "dim") for name in ("moves", "", "now", "in all")]]
    rows += [
        [
            f"{flow.source} → {flow.target}",
            plain(flow.direction, 10),
            format_rate(flow.bytes_per_second) if flow.bytes_per_second else "0",
            format_bytes(flow.total_bytes),
        ]
        for flow in view.flows
    ]
    return table(rows, "llrr", _FLOWS_WIDTH, 0)


def _spread(spread: Spread) -> str:
    return " / ".join("–" if at is None else format_seconds(at) for at in (spread.p50, spread.p99))
