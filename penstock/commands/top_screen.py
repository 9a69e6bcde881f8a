"""What `penstock top` draws: the dashboard as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from penstock.commands.top_lines import (
    Bar,
    Cell,
    fields,
    fitted,
    paragraph,
    plain,
    sides,
    table,
)
from penstock.commands.top_numbers import WIDE, errors, numbers
from penstock.units import format_bytes, format_rate, format_seconds
from penstock.watch.server_watch import Snapshot
from penstock.watch.view import TIERS, FlowView, TierView, View

_HIGH = 30  # lines; with fewer, empty lines are left out
_MAX_BAR = 40
_FULL_SHARE = 0.95
_STYLES = {"act": "bold red", "consider": "yellow"}


@dataclass(frozen=True, slots=True)
class Screen:
    """A snapshot of a server, drawn at the time `now`, cut to the terminal's height if known."""

    snapshot: Snapshot
    now: float
    patience_seconds: float = 3.0  # after that, a missing answer is shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self.lines(options.max_width, options.height, ascii_only=options.ascii_only)
        yield Text("\n", no_wrap=True, overflow="crop").join(lines)

    def lines(
        self, width: int, height: int | None = None, *, ascii_only: bool = False
    ) -> list[Text]:
        view = self.snapshot.view
        gap = [] if height is not None and height < _HIGH else [Text()]
        top = [*self._head(width), *gap, *_tiers(view, width), Text()]
        top += [*numbers(view, width), *errors(view, width), Text()]
        hurts, sessions = _hurts(view, width), _sessions(self.snapshot, width)
        if height is not None:
            room = height - len(top) - len(gap)
            # Problems may take half of the rest, and what the sessions do not need.
            num_hurts = max((room + 1) // 2, room - len(sessions))
            if len(hurts) > num_hurts:
                hurts = _cut(_hurts(view, width, is_brief=True), num_hurts)
            sessions = _cut(sessions, room - len(hurts))
        lines = [*top, *sessions, *(gap if sessions else []), *hurts]
        return fitted(lines[:height], width, ascii_only=ascii_only)

    def _head(self, width: int) -> list[Text]:
        snapshot, facts = self.snapshot, self.snapshot.facts
        watched = _duration(self.now - snapshot.watched_since)
        name = Text("penstock top", "bold") + Text(f" · {plain(snapshot.url)}")
        models = ", ".join(plain(model, 60) for model in facts.models)
        version = plain(facts.version or "")
        server = "vLLM" if snapshot.kind == "vllm" else f"penstock {version}".strip()
        about = Text(" · ".join(part for part in (models, server) if part))
        about += Text(f" · {plain(facts.phase)}", "green" if facts.phase == "serving" else "yellow")
        span = f"of the last {_duration(snapshot.view.recent_seconds)}"
        if snapshot.view.is_since_start:
            span = "since its start"
        lines = [
            sides(name, Text(f"watched {watched}", "dim"), width),
            sides(about, Text(f"hits, P50 / P99 {span}", "dim"), width),
        ]
        unanswered = self.now - snapshot.seen_at
        if snapshot.error or unanswered > self.patience_seconds:
            words = f"no answer for {_duration(unanswered)}, showing the last known state"
            words += f": {plain(snapshot.error, 300)}" if snapshot.error else "; retrying"
            lines += [Text(line.plain, "bold red") for line in paragraph(Text(words), width, 2)]
        if facts.note:
            lines.append(Text(facts.note, "yellow"))
        return lines


def _tiers(view: View, width: int) -> list[Text]:
    head = ["tier", "in use", "", "", "hits", "load (queued)", "save (queued)"]
    rows: list[Sequence[Cell]] = [[Text(name, "dim") for name in head]]
    remarks: list[Text] = []
    for tier in view.tiers:
        rows.append(_tier_row(tier, view.flows))
        if tier.recovered_share is not None and tier.recovered_share < 1:
            remarks.append(Text(f"{tier.name} has read {tier.recovered_share:.0%} of its index"))
    if len(rows) == 1:
        return [Text("no tier has reported yet")]
    return table(rows, "lbrrrrr", width, _MAX_BAR) + _capacities(view, width) + remarks


def _capacities(view: View, width: int) -> list[Text]:
    """What the tiers hold in tokens, and how they pack it."""
    found: list[str | Text] = []
    for tier in view.tiers:
        if tier.capacity_tokens is None or tier.used_tokens is None:
            continue
        codec = "" if tier.codec is None else f" {plain(tier.codec, 12)}"
        found.append(f"{tier.name} {tier.used_tokens:,.0f} of {tier.capacity_tokens:,.0f}{codec}")
    return fields("tokens", found, width)


def _tier_row(tier: TierView, flows: Sequence[FlowView]) -> list[Cell]:
    share = tier.used_blocks / tier.capacity_blocks if tier.capacity_blocks else None
    if tier.used_bytes is None or tier.capacity_bytes is None:
        size = f"{tier.used_blocks:,.0f} of {tier.capacity_blocks:,.0f} blocks"
    else:
        size = _of(tier.used_bytes, tier.capacity_bytes)
    if share is None:
        size = "–"
    style = "cyan" if share is None or share < _FULL_SHARE else "yellow"
    row: list[Cell] = [Text(tier.name, "bold red" if tier.resting else "bold")]
    row += [Bar(share, style), "" if share is None else f"{share:.0%}", size]
    if tier.name == "device":  # its transfers are shown with the tiers below
        return [*row, "", "", ""]
    hits = "–" if tier.hit_share is None else f"{tier.hit_share:.0%}"
    return [*row, hits, *(_traffic(tier, flows, direction) for direction in ("load", "save"))]


def _traffic(tier: TierView, flows: Sequence[FlowView], direction: str) -> Text:
    """The rate of a tier's link and its queued transfers; RESTING if it is unused after faults."""
    num_queued = tier.queued_loads if direction == "load" else tier.queued_saves
    rate = _link(flows, tier.name, direction)
    is_resting = direction in tier.resting
    text = "RESTING" if is_resting else format_rate(rate) if rate else "0"
    if num_queued:
        text += f" ({num_queued:,.0f})"
    return Text(text, "bold red" if is_resting else "")


def _link(flows: Sequence[FlowView], tier: str, direction: str) -> float:
    """The rate of the link to a tier: all transfers between it and the tiers above."""
    place = TIERS.index(tier)
    return sum(
        flow.bytes_per_second
        for flow in flows
        if flow.direction == direction
        and max(TIERS.index(flow.source), TIERS.index(flow.target)) == place
    )


def _of(used: float, capacity: float) -> str:
    """With the unit once if it is the same: "13.6 of 20.0 GiB"."""
    part, whole = format_bytes(used), format_bytes(capacity)
    if part.split()[1] == whole.split()[1]:
        part = part.split()[0]
    return f"{part} of {whole}"


def _sessions(snapshot: Snapshot, width: int) -> list[Text]:
    sessions = snapshot.facts.sessions
    if sessions is None:
        return []
    if not sessions:
        return [Text("no sessions", "dim")]
    is_wide = width >= WIDE
    head = [f"sessions ({snapshot.facts.num_sessions:,})", "phase", "age"]
    head += ["prompt", "cached", "answer", "KV", "dev + DRAM"]
    aligns = "llrrrrbr"
    if is_wide:
        head, aligns = [*head, "preempted", "tenant"], aligns + "rl"
    rows: list[Sequence[Cell]] = [[Text(name, "dim") for name in head]]
    # The largest first: they fill the tiers.
    for session in sorted(sessions, key=_num_blocks, reverse=True):
        rows.append(_session_row(session, is_wide=is_wide))
    return table(rows, aligns, width, _MAX_BAR)


def _session_row(session: dict[str, Any], *, is_wide: bool) -> list[Cell]:
    resident, cold = _number(session, "resident_blocks"), _number(session, "cold_blocks")
    name = session.get("request_id") or session.get("id") or "–"
    tokens = (
        f"{_number(session, key):,.0f}"
        for key in ("prompt_tokens", "cached_tokens", "output_tokens")
    )
    share = resident / (resident + cold) if resident + cold else None
    row: list[Cell] = [
        plain(name, 36 if is_wide else 16),
        plain(session.get("phase", "–"), 8),
        format_seconds(_number(session, "seconds")),
        *tokens,
        Bar(share, "green"),
        f"{resident:,.0f} + {cold:,.0f}",
    ]
    if is_wide:
        row += [f"{_number(session, 'preemptions'):,.0f}", plain(session.get("tenant", ""), 8)]
    return row


def _hurts(view: View, width: int, *, is_brief: bool = False) -> list[Text]:
    """Findings and what to do; if brief, only the findings, one per line."""
    if not view.advice:
        return [Text("no problems", "green")]
    lines: list[Text] = []
    for advice in view.advice:
        text = Text(plain(advice.urgency, 8).ljust(10), _STYLES.get(advice.urgency, ""))
        text += Text(f"{plain(advice.topic)}: {plain(advice.finding, 400)}")
        if is_brief:
            lines.append(text)
        else:
            text += Text(f" → {plain(advice.change, 400)}" if advice.change else "")
            lines += paragraph(text, width, 10)
    return lines


def _cut(lines: list[Text], num: int) -> list[Text]:
    if len(lines) <= num:
        return lines
    kept = lines[: max(0, num - 1)]
    return [*kept, Text(f"… and {len(lines) - len(kept)} more", "dim")] if num > 0 else []


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    return f"{seconds:.0f} s" if seconds < 59.5 else format_seconds(seconds)


def _num_blocks(session: dict[str, Any]) -> float:
    return _number(session, "resident_blocks") + _number(session, "cold_blocks")


def _number(session: dict[str, Any], key: str) -> float:
    """0 if it is not a number: the server may not be ours."""
    value = session.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
