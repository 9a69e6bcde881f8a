"""Convert text from the code to Markdown."""

from __future__ import annotations

import html
import re


def code(text: str) -> str:
    """Code for a table cell, where a bar would end the cell even between backticks."""
    return f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"


def prose(text: str) -> str:
    """A docstring or help text for a page in reference/; names of pages become links."""
    text = re.sub(r"<(?=\w)", "&lt;", text)
    return re.sub(r"\bdocs/([\w-]+\.md)", r"[docs/\1](../\1)", text)


def cell(text: str) -> str:
    return prose(" ".join(text.split())).replace("|", "&#124;")


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]
