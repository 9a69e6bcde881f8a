"""The table of damaged blocks that `store check` prints."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from penstock.commands import new_table, stdout_console

_MAX_SHOWN = 50


def print_damages(
    headers: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None
) -> None:
    table = new_table(*headers, title=title)
    for column in table.columns:
        column.justify = "left"
    for row in rows[:_MAX_SHOWN]:
        table.add_row(*row)
    stdout_console().print(table)
    if len(rows) > _MAX_SHOWN:
        typer.echo(f"{len(rows) - _MAX_SHOWN:,} more are not shown; --json lists all.")
