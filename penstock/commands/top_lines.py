"""Lines for a terminal: tables with a bar that fills the free width, and fields that wrap.

Every line fits the width. Control characters in the server's text are replaced.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

GAP = 2
LABEL_WIDTH = 12
_FULL = "█"
_EMPTY = "░"
# One character for one, so that lines keep their width.
_PLAIN = str.maketrans({_FULL: "#", _EMPTY: ".", "–": "-", "…": "~", "µ": "u", "·": "|", "→": ">"})


def plain(value: object, max_chars: int = 200) -> str:
    """Text from the server on one line, without control characters."""
    text = "".join(char if char.isprintable() else "?" for char in str(value)[: max_chars + 1])
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def bar(share: float, width: int, style: str) -> Text:
    """A bar that is readable without color."""
    share = min(1.0, max(0.0, share))
    num_full = round(share * width)
    if width > 1:
        # Only 0 is drawn as empty, and only 1 as full.
        num_full = max(num_full, 1) if share > 0 else 0
        num_full = min(num_full, width - 1) if share < 1 else width
    return Text(_FULL * num_full, style) + Text(_EMPTY * (width - num_full), "dim")


@dataclass(frozen=True, slots=True)
class Bar:
    """A cell that takes the free width of the table."""

    share: float | None
    style: str = "cyan"


Cell = str | Text | Bar


def table(rows: Sequence[Sequence[Cell]], aligns: str, width: int, max_bar: int) -> list[Text]:
    """One line per row. `aligns` has a letter per column: l, r, or b for the column of bars."""
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max((row[i].cell_len for row in texts), default=0) for i in range(len(aligns))]
    if "b" in aligns:
        at = aligns.index("b")
        left = width - sum(widths[:at] + widths[at + 1 :]) - GAP * (len(aligns) - 1)
        widths[at] = max(widths[at], 4, min(max_bar, left))
    lines = []
    for row, drawn in zip(rows, texts, strict=True):
        line = Text()
        for i, (cell, text) in enumerate(zip(row, drawn, strict=True)):
            if isinstance(cell, Bar) and cell.share is not None:
                text = bar(cell.share, widths[i], cell.style)
            pad = " " * (widths[i] - text.cell_len)
            line += Text(" " * GAP if i else "")
            line += Text(pad) + text if aligns[i] == "r" else text + Text(pad)
        line.rstrip()
        lines.append(line)
    return lines


def fields(label: str, values: Sequence[str | Text], width: int, style: str = "") -> list[Text]:
    """A label and its values, wrapped to further lines if they do not fit."""
    lines = [Text(label.ljust(LABEL_WIDTH), "dim")]
    for value in values:
        text = value if isinstance(value, Text) else Text(value, style)
        is_first = lines[-1].cell_len == LABEL_WIDTH
        if not is_first and lines[-1].cell_len + 3 + text.cell_len > width:
            lines.append(Text(" " * LABEL_WIDTH))
            is_first = True
        lines[-1] += text if is_first else Text("   ") + text
    return lines if values else []


def paragraph(text: Text, width: int, indent: int) -> list[Text]:
    """Wrap the text and indent all lines but the first, which keeps its styles."""
    pieces = textwrap.wrap(text.plain, max(10, width), subsequent_indent=" " * indent)
    if not pieces:
        return []
    head = Text(pieces[0])
    for span in text.spans:
        if span.end <= len(pieces[0]):
            head.stylize(span.style, span.start, span.end)
    return [head, *(Text(piece) for piece in pieces[1:])]


def sides(left: Text, right: Text, width: int) -> Text:
    """One text at each end of the line; the right one only if it fits."""
    room = width - left.cell_len - right.cell_len
    return left + Text(" " * room) + right if room >= GAP else left


def beside(left: Sequence[Text], right: Sequence[Text], left_width: int) -> list[Text]:
    """Two columns."""
    lines = []
    for i in range(max(len(left), len(right))):
        line = left[i].copy() if i < len(left) else Text()
        if i < len(right):
            line += Text(" " * max(GAP, left_width - line.cell_len)) + right[i]
        lines.append(line)
    return lines


def fitted(lines: Sequence[Text], width: int, *, ascii_only: bool) -> list[Text]:
    """Cut the lines to the width, and replace characters that the terminal cannot show."""
    made = []
    for line in lines:
        line = line.copy()
        line.truncate(width, overflow="ellipsis")
        if ascii_only:
            shown = line.plain.translate(_PLAIN)
            line.plain = shown.encode("ascii", "replace").decode()
        made.append(line)
    return made


def _text(cell: Cell) -> Text:
    if isinstance(cell, Bar):
        return Text("–") if cell.share is None else Text()
    return cell if isinstance(cell, Text) else Text(cell)
